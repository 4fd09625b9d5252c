// Packets between ranks of one host, through the rings of a ShmGroup.
#pragma once

#include "net/carrier.h"
#include "net/shm_group.h"

namespace baguarun::net {

// Threads: one at a time.
class ShmCarrier : public Carrier {
 public:
  // `place` is the peer's in `group`, `rank` what the sink shall know it by.
  ShmCarrier(ShmGroup& group, int place, int rank) : group_(group), place_(place), rank_(rank) {}

  size_t dataBytes() const override { return kEagerBytes; }
  bool send(const Packet& packet, const std::byte* payload) override;
  // What is sent is copied.
  uint64_t numSent() const override { return 0; }
  uint64_t numFlushed() override { return 0; }
  // All of it is in memory that the peer sees.
  bool hasUnsent() override { return false; }
  bool receive(PacketSink& sink) override;

 private:
  ShmGroup& group_;
  const int place_;
  const int rank_;
};

}  // namespace baguarun::net
