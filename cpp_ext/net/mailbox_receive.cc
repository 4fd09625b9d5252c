// The receiving half of a mailbox: what is kept, what has a room, and who is told.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "net/mailbox_operation.h"

namespace baguarun::net {

namespace {

// Credit is given back in parcels, not for every message.
constexpr uint64_t kCreditBytes = Mailbox::kMaxKeptBytes / 4;

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
