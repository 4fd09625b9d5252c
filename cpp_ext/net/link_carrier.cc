#include "net/link_carrier.h"

#include <chrono>
#include <cstring>

#include "net/error.h"

namespace baguarun::net {

namespace {

// What is given to the link goes before all that comes later. One payload is on its way, the next one is
// there when that is gone.
constexpr size_t kMaxPayloads = 2;

// A question costs one, and a thread may wait for its turn that long anyway.
constexpr std::chrono::milliseconds kLongTrip{1};
// An answer has to pass what lies in front of it in the other direction, too.
constexpr double kTripsPerAnswer = 1.5;

// Of no use to a peer that is gone.
bool isWord(Packet::Kind kind) {
  switch (kind) {
    case Packet::Kind::kGrant:
    case Packet::Kind::kAhead:
    case Packet::Kind::kTaken:
    case Packet::Kind::kCredit:
      return true;
    case Packet::Kind::kEager:
    case Packet::Kind::kRequest:
    case Packet::Kind::kPush:
    case Packet::Kind::kData:
      return false;
  }
  return false;
}

}  // namespace

bool LinkCarrier::isLong() {
  const Link* const link = mesh_.find(Mesh::Use::kSending, rank_);
  return link != nullptr && link->way().shortestTrip >= kLongTrip;
}

uint64_t LinkCarrier::bytesPerAnswer() {
  const Link* const link = mesh_.find(Mesh::Use::kSending, rank_);
  const Way way = link != nullptr ? link->way() : Way{};
  const std::chrono::duration<double> until = kTripsPerAnswer * way.shortestTrip;
  return static_cast<uint64_t>(static_cast<double>(way.bytesPerSecond) * until.count());
}

bool LinkCarrier::send(const Packet& packet, const std::byte* payload) {
  // What is a message, or a part of one, waits until somebody looks why.
  if (hasEnded()) {
    return isWord(packet.kind);
  }
  Link* const link = mesh_.find(Mesh::Use::kSending, rank_);
  // A packet takes up to two of the link's requests.
  numFlushed();
  if (link == nullptr || 2 * (parcels_.size() + 1) > Link::kMaxRequests) {
    return false;
  }
  const bool isData = packet.kind == Packet::Kind::kData;
  if (isData && numPayloads_ == kMaxPayloads) {
    return false;
  }
  Parcel& parcel = parcels_.emplace_back();
  parcel.bytes.resize(sizeof(packet) + (isData ? 0 : packet.bytes));
  std::memcpy(parcel.bytes.data(), &packet, sizeof(packet));
  if (!isData && packet.bytes > 0) {
    std::memcpy(parcel.bytes.data() + sizeof(packet), payload, packet.bytes);
  }
  parcel.request = link->isend(parcel.bytes.data(), parcel.bytes.size());
  parcel.payload = isData ? link->isend(payload, packet.bytes) : nullptr;
  NET_CHECK(parcel.request != nullptr && (!isData || parcel.payload != nullptr));
  mesh_.poke(Mesh::Use::kSending, rank_, sizeof(packet) + packet.bytes);
  numPayloads_ += isData ? 1 : 0;
  ++numSent_;
  return true;
}

uint64_t LinkCarrier::numFlushed() {
  Link* const link = mesh_.find(Mesh::Use::kSending, rank_);
  while (!parcels_.empty()) {
    const Parcel& parcel = parcels_.front();
    if (!parcel.request->isDone() || (parcel.payload != nullptr && !parcel.payload->isDone())) {
      break;
    }
    link->test(parcel.request);
    if (parcel.payload != nullptr) {
      link->test(parcel.payload);
      --numPayloads_;
    }
    parcels_.pop_front();
    ++numFlushed_;
  }
  return numFlushed_;
}

bool LinkCarrier::receive(PacketSink& sink) {
  Link* const link = mesh_.find(Mesh::Use::kReceiving, rank_);
  if (link == nullptr || mesh_.end(Mesh::Use::kReceiving, rank_).has_value()) {
    return false;
  }
  if (incoming_ == nullptr) {
    return post(*link);
  }
  if (!incoming_->isDone()) {
    return false;
  }
  const size_t bytes = link->test(incoming_).bytes;
  incoming_ = nullptr;
  if (isPayload_) {
    isPayload_ = false;
    sink.filled(rank_, packet_);
    return post(*link);
  }
  const bool isWhole = bytes >= sizeof(packet_);
  if (isWhole) {
    std::memcpy(&packet_, room_.data(), sizeof(packet_));
  }
  const bool isData = isWhole && packet_.kind == Packet::Kind::kData;
  if (!isWhole || (!isData && bytes != sizeof(packet_) + packet_.bytes)) {
    throw Error(Fault::kRemote, link->peer(), "sent a packet that means nothing");
  }
  if (isData) {
    isPayload_ = true;
    incoming_ = link->irecv(sink.room(rank_, packet_), packet_.bytes);
    mesh_.poke(Mesh::Use::kReceiving, rank_, 0);
    return true;
  }
  sink.take(rank_, packet_, room_.data() + sizeof(packet_));
  return post(*link);
}

// Room for the next packet; the link has nothing else posted.
bool LinkCarrier::post(Link& link) {
  room_.resize(sizeof(Packet) + kEagerBytes);
  incoming_ = link.irecv(room_.data(), room_.size());
  mesh_.poke(Mesh::Use::kReceiving, rank_, 0);
  return true;
}

}  // namespace baguarun::net
