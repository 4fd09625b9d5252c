// Packets between two ranks, in order, without waiting: what a mailbox's messages are made of.
#pragma once

#include <cstddef>
#include <cstdint>

namespace baguarun::net {

// The header of a packet; `bytes` of payload follow where the kind says so.
struct Packet {
  enum class Kind : uint32_t {
    kEager,    // a whole message: `tag`, payload
    kRequest,  // a message of `total` bytes with `tag` waits as `id`
    kGrant,    // room for the message that waits as `id`
    kAhead,    // room, known as `id`, for the next message of `total` bytes with `tag` that has not got any
    kPush,     // a message of `total` bytes with `tag`, whose payload follows as that of `id`, unasked
    kTaken,    // `id` that was pushed has got a room, the one known as `offset` unless that is 0
    kData,     // payload of message `id` at `offset`
    kCredit,   // `total` bytes of eager messages have been read
  };
  Kind kind = Kind::kEager;
  uint32_t tag = 0;
  uint64_t id = 0;
  uint64_t bytes = 0;
  uint64_t offset = 0;
  uint64_t total = 0;
};
static_assert(sizeof(Packet) == 40);

// Largest payload of any kind but kData.
inline constexpr size_t kEagerBytes = 64 << 10;

// What takes packets.
class PacketSink {
 public:
  virtual ~PacketSink() = default;
  // Any kind but kData. `payload` is the carrier's.
  virtual void take(int from, const Packet& packet, const std::byte* payload) = 0;
  // Where the payload of a kData packet goes.
  virtual std::byte* room(int from, const Packet& packet) = 0;
  // The payload is there.
  virtual void filled(int from, const Packet& packet) = 0;
};

// Threads: one at a time.
class Carrier {
 public:
  virtual ~Carrier() = default;
  // Largest payload of a kData packet.
  virtual size_t dataBytes() const = 0;
  // Whether an answer takes so long that a question should be spared, and how much goes by meanwhile.
  virtual bool isLong() { return false; }
  virtual uint64_t bytesPerAnswer() { return 0; }
  // Sends a packet; `payload` of kData must stay until it is flushed. False: no room now, call again.
  virtual bool send(const Packet& packet, const std::byte* payload) = 0;
  // Packets sent, and how many of the first of them are flushed.
  virtual uint64_t numSent() const = 0;
  virtual uint64_t numFlushed() = 0;
  // Whether packets that were sent move on only while somebody drives.
  virtual bool hasUnsent() = 0;
  // Hands what has come to `sink`. False: nothing came. Throws Error where the peer is gone.
  virtual bool receive(PacketSink& sink) = 0;
};

}  // namespace baguarun::net
