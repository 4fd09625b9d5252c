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

// Threads: a value, one at a time.
class Backlog {
 public:
  // To be called when the kernel takes no more of the stream on `fd`. `mayLimit`: the buffer may be held
  // small.
  void onFull(int fd, bool mayLimit, Clock::time_point now);

  // How much longer the round trip was than the shortest one, lately.
  std::chrono::microseconds queueing() const noexcept { return queueing_; }
  // What arrived per second while the stream stayed full, and over how long, since the last call of
  // measure().
  double bytesPerSecond() const noexcept;
  Clock::duration measured() const noexcept { return measured_; }
  void measure() noexcept;
  // Bytes of the send buffer; 0: the kernel decides.
  uint32_t limit() const noexcept { return limit_; }

 private:
  void setLimit(int fd, uint32_t limit);

  std::chrono::microseconds queueing_{0};
  uint32_t limit_ = 0;
  uint64_t bytesArrived_ = 0;
  uint64_t bytesMeasured_ = 0;
  Clock::duration measured_{0};
  Clock::time_point lastCheck_{};
  Clock::time_point lastChange_{};
};

}  // namespace baguarun::net
