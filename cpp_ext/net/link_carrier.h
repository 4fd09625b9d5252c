// Packets between ranks over links: each sends on the link that it made.
#pragma once

#include <deque>
#include <vector>

#include "net/carrier.h"
#include "net/mesh.h"

namespace baguarun::net {

// Threads: one at a time.
class LinkCarrier : public Carrier {
 public:
  LinkCarrier(Mesh& mesh, int rank) : mesh_(mesh), rank_(rank) {}

  size_t dataBytes() const override { return size_t{1} << 20; }
  bool isLong() override;
  uint64_t bytesPerAnswer() override;
  bool send(const Packet& packet, const std::byte* payload) override;
  uint64_t numSent() const override { return numSent_; }
  uint64_t numFlushed() override;
  bool hasUnsent() override { return !hasEnded() && numFlushed() < numSent_; }
  bool receive(PacketSink& sink) override;

 private:
  // Kept until the link has taken it.
  struct Parcel {
    std::vector<std::byte> bytes;
    Request* request;
    Request* payload;  // of kData, which goes from where it is
  };

  bool hasEnded() const { return mesh_.end(Mesh::Use::kSending, rank_).has_value(); }
  bool post(Link& link);

  Mesh& mesh_;
  const int rank_;
  std::deque<Parcel> parcels_;
  size_t numPayloads_ = 0;  // of them
  uint64_t numSent_ = 0;
  uint64_t numFlushed_ = 0;
  std::vector<std::byte> room_;  // for the next packet
  Request* incoming_ = nullptr;
  Packet packet_;
  bool isPayload_ = false;  // `incoming_` is the payload of `packet_`
};

}  // namespace baguarun::net
