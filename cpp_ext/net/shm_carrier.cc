#include "net/shm_carrier.h"

#include <cstring>

#include "net/error.h"

namespace baguarun::net {

static_assert(ShmGroup::kPacketBytes >= kEagerBytes + sizeof(Packet));

bool ShmCarrier::send(const Packet& packet, const std::byte* payload) {
  std::byte* const room = group_.packetRoom(place_);
  if (room == nullptr) {
    return false;
  }
  std::memcpy(room, &packet, sizeof(packet));
  if (packet.bytes > 0) {
    std::memcpy(room + sizeof(packet), payload, packet.bytes);
  }
  group_.postPacket(place_);
  return true;
}

bool ShmCarrier::receive(PacketSink& sink) {
  const std::byte* const at = group_.nextPacket(place_);
  if (at == nullptr) {
    return false;
  }
  Packet packet;
  std::memcpy(&packet, at, sizeof(packet));
  NET_CHECK(packet.bytes <= kEagerBytes);
  if (packet.kind == Packet::Kind::kData) {
    std::memcpy(sink.room(rank_, packet), at + sizeof(packet), packet.bytes);
    sink.filled(rank_, packet);
  } else {
    sink.take(rank_, packet, at + sizeof(packet));
  }
  group_.dropPacket(place_);
  return true;
}

}  // namespace baguarun::net
