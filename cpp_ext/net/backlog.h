// What of a stream is under way, and how much of it may be where the network is slower than we are.
//
// TCP fills the queue in front of a slow line until something is lost; where several senders meet there, all
// of them lose, and wait for what is sent again while the line runs empty. So once the round trip takes much
// longer than it needs to, the stream's send buffer is held as small as keeps the queue short. Where the
// queue is short the buffer grows again, and in the end is the kernel's. The idea is that of RFC 6817
// (LEDBAT): to go by the delay, before there is loss.
#pragma once

#include <chrono>
#include <cstdint>

#include "net/socket.h"

namespace baguarun::net {

// Who decides how large a stream's send buffer is: the kernel, whoever said it last, or the queue.
enum class Buffering { kFree, kAsItIs, kByQueue };

// Threads: a value, one at a time.
class Backlog {
 public:
  // To be called when the kernel takes no more of the stream on `fd`.
  void onFull(int fd, Buffering buffering, Clock::time_point now);

  // How much longer the round trip was than the shortest one, lately.
  std::chrono::microseconds queueing() const noexcept { return queueing_; }
  // Lately the send buffer, as large as the kernel makes it, held less than the way does, for want of a
  // queue.
  bool isHeldByBuffer() const noexcept;
  // What arrived per second while the stream stayed full, and over how long, since the last call of
  // measure().
  double bytesPerSecond() const noexcept;
  Clock::duration measured() const noexcept { return measured_; }
  void measure() noexcept;
  // Bytes of the send buffer; 0: the kernel decides.
  uint32_t limit() const noexcept { return limit_; }
  // One above what the kernel grants is none.
  void setLimit(int fd, uint32_t limit);
  // The limit with which each of `numStreams` shows whether together they move more than this one alone, with
  // no more of a queue; 0: none.
  uint32_t limitOfEach(size_t numStreams) const noexcept;

 private:
  void averageRate(uint64_t arrived, Clock::duration elapsed) noexcept;
  void averageHeld(std::chrono::microseconds held, Clock::duration elapsed) noexcept;

  std::chrono::microseconds queueing_{0};
  std::chrono::microseconds shortestTrip_{0};
  uint32_t limit_ = 0;
  uint32_t most_ = UINT32_MAX;  // that the kernel grants, as far as is known
  // What arrived per second while the stream was busy, lately.
  double rate_ = 0;
  uint64_t bytesArrived_ = 0;
  uint64_t busyTime_ = 0;  // in microseconds, by the kernel's count, less where the receiver had no room
  // The share of the time in which all that the buffer holds was under way, lately.
  double heldShare_ = 0;
  uint64_t heldTime_ = 0;  // in microseconds, by the kernel's count
  uint64_t bytesMeasured_ = 0;
  Clock::duration measured_{0};
  Clock::time_point lastCheck_{};
  Clock::time_point lastChange_{};
};

// By the kernel's count, 0 where it does not know.
struct Way {
  std::chrono::microseconds shortestTrip{0};  // of the last minutes
  uint64_t bytesPerSecond = 0;                // delivered, when last there was enough to send
};
Way wayOf(int fd) noexcept;

}  // namespace baguarun::net
