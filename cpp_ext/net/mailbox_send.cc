// The sending half of a mailbox: which message goes at once, asks, or is pushed.
#include <algorithm>
#include <utility>

#include "net/mailbox_operation.h"

namespace baguarun::net {

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

bool Mailbox::isLargeSend(const Operation& operation) const {
  return operation.isSend && operation.peer != rank_ && operation.bytes > kEagerBytes;
}

// Not past a message of the same tag that asks, whose room would be taken for this one's.
bool Mailbox::mayPush(const Operation& send) const {
  const Lane& lane = lanes_[static_cast<size_t>(send.peer)];
  const uint64_t pushedBytes = lane.pushedBytes + send.bytes;
  if (!isLargeSend(send) || pushedBytes > kMaxPushedBytes || lane.offers.contains(send.tag)) {
    return false;
  }
  Carrier* const carrier = hooks_.carrierTo(send.peer);
  // Who asks is looked for last, among all that do.
  return carrier != nullptr && carrier->isLong() &&
         (lane.largeBytes <= kMaxPushedBytes || pushedBytes <= carrier->bytesPerAnswer()) &&
         firstAsking(send.peer, send.tag, std::nullopt) == nullptr;
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

// The network has a pushed message, or there is word of its room: the later of the two ends it.
void Mailbox::finishHalf(const Handle& push) {
  if (std::exchange(push->isHalfDone, true)) {
    finish(push);
  }
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

// There is room for a message that asked.
void Mailbox::takeGrant(int from, const Packet& packet) {
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

void Mailbox::sendData(const Handle& send, uint64_t id) {
  queue(send->peer, {.packet = {.kind = Packet::Kind::kData, .id = id}, .operation = send});
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

}  // namespace baguarun::net
