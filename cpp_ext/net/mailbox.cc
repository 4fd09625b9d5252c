#include "net/mailbox.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace baguarun::net {

struct Mailbox::Operation : Communicator::Message {
  bool isDone() const override {
    if (done.load(std::memory_order_acquire)) {
      return true;
    }
    verdict->checkAtRest();
    return done.load(std::memory_order_acquire);
  }
  int source() const override { return from.load(std::memory_order_relaxed); }

  std::shared_ptr<const Verdict> verdict;
  bool isSend = false;
  std::byte* data = nullptr;  // only read where isSend
  uint64_t bytes = 0;
  int peer = 0;  // who it was asked for; kAnySource: anybody
  uint32_t tag = 0;
  uint64_t id = 0;
  uint64_t moved = 0;
  bool isOffered = false;  // a receive whose room the sender knows as `id`
  bool isPushed = false;
  bool isHalfDone = false;  // a pushed send that the network has, or whose room there is word of
  // Of what is kept: the memory, and the receive that has got it before all of it was there.
  std::unique_ptr<std::byte[]> memory;
  std::shared_ptr<Operation> owner;
  std::atomic<int> from{Communicator::kAnySource};
  std::atomic<bool> done{false};
};

namespace {

// Credit is given back in parcels, not for every message.
constexpr uint64_t kCreditBytes = Mailbox::kMaxKeptBytes / 4;
// Even an empty message costs memory where it is kept.
constexpr uint64_t kKeepingBytes = 64;
// Packets taken or sent per call, so that a busy peer does not keep the caller from the others.
constexpr int kMaxPackets = 16;

// Rooms that were offered ahead are numbered apart from messages that ask.
constexpr uint64_t kOfferBit = uint64_t{1} << 39;

// Receivers tell messages apart by sender and number.
uint64_t keyOf(int from, uint64_t id) { return static_cast<uint64_t>(from) << 40 | id; }

void copyBytes(std::byte* to, const std::byte* from, uint64_t bytes) {
  if (bytes > 0) {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace

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

bool Mailbox::isLargeSend(const Operation& operation) const {
  return operation.isSend && operation.peer != rank_ && operation.bytes > kEagerBytes;
}

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
  if (operation->peer >= 0) {
    ++lanes_[static_cast<size_t>(operation->peer)].numAwaited;
  }
  operation->isSend ? beginSend(operation) : beginReceive(operation);
}

void Mailbox::beginSend(const Handle& operation) {
  if (operation->peer == rank_) {
    arrive({.from = rank_, .bytes = operation->bytes, .ownSend = operation}, operation->tag, nullptr);
    return;
  }
  Lane& lane = lanes_[static_cast<size_t>(operation->peer)];
  const uint64_t cost = operation->bytes + kKeepingBytes;
  Packet packet{.kind = Packet::Kind::kEager,
                .tag = operation->tag,
                .bytes = operation->bytes,
                .total = operation->bytes};
  const auto offers = lane.offers.find(operation->tag);
  const bool isSure = !lane.pushedTags.contains(operation->tag);
  if (isSure && offers != lane.offers.end() && offers->second.front().total == operation->bytes) {
    const uint64_t id = offers->second.front().id;
    offers->second.pop_front();
    if (offers->second.empty()) {
      lane.offers.erase(offers);
    }
    sendData(operation, id);
    return;
  }
  if (operation->bytes <= kEagerBytes && lane.eagerBytes + cost <= kMaxKeptBytes) {
    lane.eagerBytes += cost;
  } else if (mayPush(*operation)) {
    push(operation);
    return;
  } else {
    operation->id = ++numSends_;
    sends_[operation->id] = operation;
    packet.kind = Packet::Kind::kRequest;
    packet.id = operation->id;
    packet.bytes = 0;
  }
  queue(operation->peer, {.packet = packet, .operation = operation});
}

// Not past a message of the same tag that asks, whose room would be taken for this one's.
bool Mailbox::mayPush(const Operation& send) const {
  const Lane& lane = lanes_[static_cast<size_t>(send.peer)];
  const uint64_t pushedBytes = lane.pushedBytes + send.bytes;
  if (!isLargeSend(send) || pushedBytes > kMaxPushedBytes || lane.offers.contains(send.tag) ||
      firstAsking(send.peer, send.tag, std::nullopt) != nullptr) {
    return false;
  }
  Carrier* const carrier = hooks_.carrierTo(send.peer);
  return carrier != nullptr && carrier->isLong() &&
         (lane.largeBytes <= kMaxPushedBytes || pushedBytes <= carrier->bytesPerAnswer());
}

void Mailbox::push(const Handle& send) {
  Lane& lane = lanes_[static_cast<size_t>(send->peer)];
  lane.pushedBytes += send->bytes;
  ++lane.pushedTags[send->tag];
  send->id = ++numSends_;
  send->isPushed = true;
  pushes_[send->id] = send;
  queue(send->peer,
        {.packet = {.kind = Packet::Kind::kPush, .tag = send->tag, .id = send->id, .total = send->bytes},
         .operation = send});
  sendData(send, send->id);
}

// A pushed message has got a room. Offers of its tag that are left are for those who ask, or who come.
void Mailbox::endPush(int from, const Packet& packet) {
  Lane& lane = lanes_[static_cast<size_t>(from)];
  const auto push = pushes_.find(packet.id);
  if (push == pushes_.end() || push->second->peer != from) {
    throw Error(Fault::kRemote, hooks_.name(from), "has taken a message that nobody pushed");
  }
  const Handle send = push->second;
  pushes_.erase(push);
  finishHalf(send);
  lane.pushedBytes -= send->bytes;
  const auto tag = lane.pushedTags.find(send->tag);
  const bool isLast = --tag->second == 0;
  if (isLast) {
    lane.pushedTags.erase(tag);
  }
  const auto found = lane.offers.find(send->tag);
  if (found == lane.offers.end()) {
    return;
  }
  std::erase_if(found->second, [&](const Packet& offer) { return offer.id == packet.offset; });
  if (!isLast && !found->second.empty()) {
    return;
  }
  const std::deque<Packet> left = std::move(found->second);
  lane.offers.erase(found);
  for (const Packet& offer : left) {
    takeOffer(from, offer);
  }
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

void Mailbox::sendData(const Handle& send, uint64_t id) {
  queue(send->peer, {.packet = {.kind = Packet::Kind::kData, .id = id}, .operation = send});
}

void Mailbox::beginReceive(const Handle& operation) {
  Tag& tag = tags_[operation->tag];
  const auto found = std::ranges::find_if(tag.arrived, [&](const Arrival& arrival) {
    return operation->peer == Communicator::kAnySource || operation->peer == arrival.from;
  });
  if (found == tag.arrived.end()) {
    offerAhead(operation, tag);
    tag.posted.push_back(operation);
    return;
  }
  Arrival arrival = std::move(*found);
  tag.arrived.erase(found);
  if (tag.arrived.empty() && tag.posted.empty()) {
    tags_.erase(operation->tag);
  }
  deliver(operation, arrival, arrival.payload.data());
  if (arrival.isEager()) {
    credit(arrival.from, arrival.bytes);
  }
}

// Not behind a receive from anybody, which what comes next may be for, nor behind one that was.
void Mailbox::offerAhead(const Handle& receive, const Tag& tag) {
  const bool isWanted = receive->bytes > kEagerBytes && receive->peer >= 0 && receive->peer != rank_;
  const auto isBefore = [&](const Handle& other) {
    return other->peer < 0 ||
           (other->peer == receive->peer && other->bytes > kEagerBytes && !other->isOffered);
  };
  if (!isWanted || std::ranges::any_of(tag.posted, isBefore)) {
    return;
  }
  receive->isOffered = true;
  receive->id = kOfferBit | ++numOffers_;
  receives_[keyOf(receive->peer, receive->id)] = receive;
  tell(receive->peer,
       {.kind = Packet::Kind::kAhead, .tag = receive->tag, .id = receive->id, .total = receive->bytes});
}

// The room is for the first message that has asked and got none, or else for one to come.
void Mailbox::takeOffer(int from, const Packet& packet) {
  Lane& lane = lanes_[static_cast<size_t>(from)];
  const bool isSure = !lane.pushedTags.contains(packet.tag);
  const Handle first = isSure ? firstAsking(from, packet.tag, packet.total) : nullptr;
  if (first == nullptr) {
    lane.offers[packet.tag].push_back(packet);
    return;
  }
  sends_.erase(first->id);
  sendData(first, packet.id);
}

// Of `bytes`, where that is given.
Mailbox::Handle Mailbox::firstAsking(int peer, uint32_t tag, std::optional<uint64_t> bytes) const {
  Handle first;
  for (const auto& [id, send] : sends_) {
    const bool fits = send->peer == peer && send->tag == tag && (!bytes || *bytes == send->bytes);
    if (fits && (first == nullptr || id < first->id)) {
      first = send;
    }
  }
  return first;
}

// A message has come, or word of it: to whoever waits for it first, or kept.
void Mailbox::arrive(Arrival arrival, uint32_t tagNumber, const std::byte* payload) {
  Tag& tag = tags_[tagNumber];
  const auto found = std::ranges::find_if(tag.posted, [&](const Handle& receive) {
    return receive->peer == Communicator::kAnySource || receive->peer == arrival.from;
  });
  if (found == tag.posted.end()) {
    if (payload != nullptr) {
      arrival.payload.assign(payload, payload + arrival.bytes);
    }
    if (arrival.isPushed) {
      arrival.kept = keep(arrival.from, arrival.id, arrival.bytes);
    }
    tag.arrived.push_back(std::move(arrival));
    return;
  }
  const Handle receive = *found;
  tag.posted.erase(found);
  if (tag.arrived.empty() && tag.posted.empty()) {
    tags_.erase(tagNumber);
  }
  deliver(receive, arrival, payload);
  if (arrival.isEager()) {
    credit(arrival.from, arrival.bytes);
  }
}

void Mailbox::deliver(const Handle& receive, Arrival& arrival, const std::byte* payload) {
  if (arrival.bytes != receive->bytes) {
    throw Error(Fault::kUsage, hooks_.name(arrival.from),
                "sent a message of " + std::to_string(arrival.bytes) + " bytes with tag " +
                    std::to_string(receive->tag) + " to " + hooks_.name(rank_) + ", which wants " +
                    std::to_string(receive->bytes));
  }
  receive->from = arrival.from;
  if (arrival.isPushed) {
    deliverPushed(receive, arrival);
  } else if (arrival.ownSend != nullptr) {
    copyBytes(receive->data, arrival.ownSend->data, arrival.bytes);
    finish(arrival.ownSend);
    finish(receive);
  } else if (arrival.isWaiting && receive->isOffered) {
    // It asked before it knew of the room, which it takes now.
  } else if (arrival.isWaiting) {
    receive->id = arrival.id;
    receives_[keyOf(arrival.from, arrival.id)] = receive;
    tell(arrival.from, {.kind = Packet::Kind::kGrant, .id = arrival.id});
    // An empty message that had to ask has nothing to follow.
    if (arrival.bytes == 0) {
      receives_.erase(keyOf(arrival.from, arrival.id));
      finish(receive);
    }
  } else {
    copyBytes(receive->data, payload, arrival.bytes);
    finish(receive);
  }
}

void Mailbox::deliverPushed(const Handle& receive, const Arrival& arrival) {
  Lane& lane = lanes_[static_cast<size_t>(arrival.from)];
  uint64_t offer = 0;
  if (std::exchange(receive->isOffered, false)) {
    offer = receive->id;
    receives_.erase(keyOf(arrival.from, offer));
  }
  receive->id = arrival.id;
  tell(arrival.from, {.kind = Packet::Kind::kTaken, .id = arrival.id, .offset = offer});
  if (arrival.kept == nullptr) {
    receives_[keyOf(arrival.from, arrival.id)] = receive;
    return;
  }
  lane.keptBytes -= arrival.bytes;
  if (arrival.kept->moved < arrival.bytes) {
    // A part is on its way to where it is kept: it goes on from there when all of it has come.
    arrival.kept->owner = receive;
    return;
  }
  copyBytes(receive->data, arrival.kept->data, arrival.bytes);
  finish(receive);
}

// Room for a pushed message that nobody wants yet.
Mailbox::Handle Mailbox::keep(int from, uint64_t id, uint64_t bytes) {
  Lane& lane = lanes_[static_cast<size_t>(from)];
  if (bytes > kMaxPushedBytes - lane.keptBytes) {
    throw Error(Fault::kRemote, hooks_.name(from), "pushed more than is kept");
  }
  lane.keptBytes += bytes;
  auto kept = std::make_shared<Operation>();
  kept->memory = std::make_unique_for_overwrite<std::byte[]>(bytes);
  kept->data = kept->memory.get();
  kept->bytes = bytes;
  receives_[keyOf(from, id)] = kept;
  return kept;
}

void Mailbox::credit(int from, uint64_t bytes) {
  Lane& lane = lanes_[static_cast<size_t>(from)];
  lane.readBytes += bytes + kKeepingBytes;
  if (lane.readBytes < kCreditBytes) {
    return;
  }
  const uint64_t readBytes = std::exchange(lane.readBytes, 0);
  tell(from, {.kind = Packet::Kind::kCredit, .total = readBytes});
}

void Mailbox::finish(const Handle& operation) {
  if (isLargeSend(*operation)) {
    lanes_[static_cast<size_t>(operation->peer)].largeBytes -= operation->bytes;
  }
  if (operation->peer >= 0) {
    --lanes_[static_cast<size_t>(operation->peer)].numAwaited;
  }
  --numPending_;
  operation->done.store(true, std::memory_order_release);
}

// The network has a pushed message, or there is word of its room: the later of the two ends it.
void Mailbox::finishHalf(const Handle& push) {
  if (std::exchange(push->isHalfDone, true)) {
    finish(push);
  }
}

// Sends what is queued for `peer` as far as there is room.
bool Mailbox::flush(int peer, Lane& lane) {
  Carrier* const carrier = hooks_.carrierTo(peer);
  // Somebody's send ends with it.
  const auto isAwaited = [](const Packet& word) { return word.kind == Packet::Kind::kTaken; };
  if (carrier == nullptr) {
    lane.hasUnsent = std::ranges::any_of(lane.words, isAwaited);
    return false;
  }
  bool moved = false;
  while (!lane.words.empty() && carrier->send(lane.words.front(), nullptr)) {
    lane.words.pop_front();
    moved = true;
  }
  for (int count = 0; count < kMaxPackets && lane.words.empty() && !lane.outgoing.empty(); ++count) {
    if (!sendNext(*carrier, lane.outgoing.front(), lane)) {
      break;
    }
    moved = true;
  }
  while (!lane.unflushed.empty() && lane.unflushed.front().first <= carrier->numFlushed()) {
    const Handle& flushed = lane.unflushed.front().second;
    flushed->isPushed ? finishHalf(flushed) : finish(flushed);
    lane.unflushed.pop_front();
    moved = true;
  }
  lane.hasUnsent = carrier->hasUnsent() || std::ranges::any_of(lane.words, isAwaited);
  return moved;
}

bool Mailbox::sendNext(Carrier& carrier, Outgoing& next, Lane& lane) {
  const Handle operation = next.operation;
  Packet packet = next.packet;
  if (packet.kind == Packet::Kind::kData) {
    packet.offset = operation->moved;
    packet.bytes = std::min<uint64_t>(operation->bytes - operation->moved, carrier.dataBytes());
  }
  if (!carrier.send(packet, operation->data + packet.offset)) {
    return false;
  }
  switch (packet.kind) {
    case Packet::Kind::kEager:
      lane.outgoing.pop_front();
      finish(operation);
      break;
    case Packet::Kind::kData:
      operation->moved += packet.bytes;
      if (operation->moved == operation->bytes) {
        lane.outgoing.pop_front();
        lane.unflushed.emplace_back(carrier.numSent(), operation);
      }
      break;
    case Packet::Kind::kRequest:
    case Packet::Kind::kPush:
      lane.outgoing.pop_front();
      break;
    case Packet::Kind::kGrant:
    case Packet::Kind::kAhead:
    case Packet::Kind::kTaken:
    case Packet::Kind::kCredit:
      NET_CHECK(false);
  }
  return true;
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
    case Packet::Kind::kGrant: {
      const auto found = sends_.find(packet.id);
      if (found == sends_.end() || found->second->peer != from) {
        throw Error(Fault::kRemote, hooks_.name(from), "granted a message that nobody sends it");
      }
      const Handle send = found->second;
      sends_.erase(found);
      if (send->bytes == 0) {
        finish(send);
        return;
      }
      sendData(send, packet.id);
      return;
    }
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

std::byte* Mailbox::room(int from, const Packet& packet) {
  const auto found = receives_.find(keyOf(from, packet.id));
  const bool fits = found != receives_.end() && packet.offset == found->second->moved &&
                    packet.bytes <= found->second->bytes - packet.offset;
  if (!fits) {
    throw Error(Fault::kRemote, hooks_.name(from), "sent a part of a message that nobody wants");
  }
  const Handle& receive = found->second;
  if (receive->isOffered && packet.offset == 0) {
    receive->from = from;
    unpost(receive);
  }
  return receive->data + packet.offset;
}

// A receive whose room was offered has got its message, without a word of it before or with one.
void Mailbox::unpost(const Handle& receive) {
  const auto tag = tags_.find(receive->tag);
  if (tag == tags_.end()) {
    return;
  }
  std::erase(tag->second.posted, receive);
  if (tag->second.posted.empty() && tag->second.arrived.empty()) {
    tags_.erase(tag);
  }
}

void Mailbox::filled(int from, const Packet& packet) {
  const auto found = receives_.find(keyOf(from, packet.id));
  const Handle receive = found->second;
  receive->moved += packet.bytes;
  if (receive->moved < receive->bytes) {
    return;
  }
  receives_.erase(found);
  if (receive->memory == nullptr) {
    finish(receive);
  } else if (receive->owner != nullptr) {
    copyBytes(receive->owner->data, receive->data, receive->bytes);
    finish(receive->owner);
  }
}

}  // namespace baguarun::net
