#include "net/mailbox.h"

#include <algorithm>
#include <string>
#include <utility>

#include "net/mailbox_operation.h"

namespace baguarun::net {

Mailbox::Mailbox(int rank, int size, std::shared_ptr<Verdict> verdict, Hooks hooks)
    : rank_(rank),
      verdict_(std::move(verdict)),
      hooks_(std::move(hooks)),
      lanes_(static_cast<size_t>(size)) {}

std::shared_ptr<Communicator::Message> Mailbox::post(bool isSend, void* data, size_t bytes, int peer,
                                                     uint32_t tag) {
  const int first = isSend ? 0 : Communicator::kAnySource;
  if (peer < first || peer >= static_cast<int>(lanes_.size())) {
    throw Error(Fault::kUsage, "",
                std::string(isSend ? "to=" : "from=") + std::to_string(peer) + ": want a rank below " +
                    std::to_string(lanes_.size()));
  }
  auto operation = std::make_shared<Operation>();
  operation->verdict = verdict_;
  operation->isSend = isSend;
  operation->data = static_cast<std::byte*>(data);
  operation->bytes = bytes;
  operation->peer = peer;
  operation->tag = tag;
  if (isSend) {
    operation->from = rank_;
  }
  const std::lock_guard lock(mutex_);
  posted_.push_back(operation);
  ++numPending_;
  hasPosted_.store(true);
  return operation;
}

bool Mailbox::needs(int peer) const { return lanes_[static_cast<size_t>(peer)].numAwaited > 0; }

bool Mailbox::needsToSend(int peer) const { return lanes_[static_cast<size_t>(peer)].numSending > 0; }

bool Mailbox::progress() {
  bool moved = false;
  if (hasPosted_.load()) {
    std::vector<Handle> posted;
    {
      const std::lock_guard lock(mutex_);
      posted.swap(posted_);
      hasPosted_.store(false);
    }
    // All of them, before the first one may be pushed.
    for (const Handle& operation : posted) {
      if (isLargeSend(*operation)) {
        lanes_[static_cast<size_t>(operation->peer)].largeBytes += operation->bytes;
      }
    }
    for (const Handle& operation : posted) {
      begin(operation);
    }
    moved = true;
  }
  for (int count = 0; count < kMaxPackets && hooks_.receive(*this); ++count) {
    moved = true;
  }
  bool hasUnsent = false;
  for (size_t i = 0; i < busyLanes_.size();) {
    const int peer = busyLanes_[i];
    Lane& lane = lanes_[static_cast<size_t>(peer)];
    moved |= flush(peer, lane);
    hasUnsent |= lane.hasUnsent;
    if (lane.words.empty() && lane.outgoing.empty() && lane.unflushed.empty() && !lane.hasUnsent) {
      busyLanes_[i] = busyLanes_.back();
      busyLanes_.pop_back();
    } else {
      ++i;
    }
  }
  hasUnsent_.store(hasUnsent);
  return moved;
}

void Mailbox::begin(const Handle& operation) {
  ++(operation->peer >= 0 ? lanes_[static_cast<size_t>(operation->peer)].numAwaited : numFromAny_);
  if (operation->isSend) {
    ++lanes_[static_cast<size_t>(operation->peer)].numSending;
  }
  operation->isSend ? beginSend(operation) : beginReceive(operation);
}

void Mailbox::take(int from, const Packet& packet, const std::byte* payload) {
  switch (packet.kind) {
    case Packet::Kind::kEager:
      arrive({.from = from, .bytes = packet.bytes}, packet.tag, payload);
      return;
    case Packet::Kind::kRequest:
      arrive({.from = from, .bytes = packet.total, .isWaiting = true, .id = packet.id}, packet.tag, nullptr);
      return;
    case Packet::Kind::kPush:
      arrive({.from = from, .bytes = packet.total, .isPushed = true, .id = packet.id}, packet.tag, nullptr);
      return;
    case Packet::Kind::kTaken:
      endPush(from, packet);
      return;
    case Packet::Kind::kGrant:
      takeGrant(from, packet);
      return;
    case Packet::Kind::kAhead:
      takeOffer(from, packet);
      return;
    case Packet::Kind::kCredit: {
      uint64_t& used = lanes_[static_cast<size_t>(from)].eagerBytes;
      used -= std::min(used, packet.total);
      return;
    }
    case Packet::Kind::kData:
      break;
  }
  throw Error(Fault::kRemote, hooks_.name(from), "sent a packet that means nothing");
}

void Mailbox::finish(const Handle& operation) {
  if (isLargeSend(*operation)) {
    lanes_[static_cast<size_t>(operation->peer)].largeBytes -= operation->bytes;
  }
  --(operation->peer >= 0 ? lanes_[static_cast<size_t>(operation->peer)].numAwaited : numFromAny_);
  if (operation->isSend) {
    --lanes_[static_cast<size_t>(operation->peer)].numSending;
  }
  --numPending_;
  operation->done.store(true, std::memory_order_release);
}

void Mailbox::queue(int peer, Outgoing outgoing) {
  lanes_[static_cast<size_t>(peer)].outgoing.push_back(std::move(outgoing));
  markBusy(peer);
}

void Mailbox::tell(int peer, const Packet& word) {
  lanes_[static_cast<size_t>(peer)].words.push_back(word);
  markBusy(peer);
}

void Mailbox::markBusy(int peer) {
  if (std::ranges::find(busyLanes_, peer) == busyLanes_.end()) {
    busyLanes_.push_back(peer);
  }
}

}  // namespace baguarun::net
