// How the ranks of a shared segment wait for each other, and how all of them learn of the first failure.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "net/error.h"
#include "net/shm_segment.h"

namespace baguarun::net {

// A count that one rank raises and the others wait for. Lives in the segment, zero at first.
struct alignas(128) ShmFlag {
  std::atomic<uint64_t> value;
  std::atomic<uint32_t> hasWaiters;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// The first failure of the group, and who has left it. Lives in the segment, zero at first.
struct alignas(128) ShmState {
  std::atomic<uint64_t> failure;
};

enum class ShmFailure : uint8_t { kNone, kAborted, kDied, kLeft, kTimeout, kMismatch };

// Waits on flags for one rank. A wait spins briefly where every rank can have a CPU of its own, yields a few
// times and then sleeps in the kernel, in slices after which it looks for failures.
// Threads: any; one per flag waited for.
class ShmWaiter {
 public:
  ShmWaiter(std::shared_ptr<ShmSegment> segment, int rank, std::chrono::milliseconds timeout, ShmState* state,
            ShmFlag* left);

  // Raises `flag` to `value` and wakes whoever sleeps on it.
  void post(ShmFlag& flag, uint64_t value) noexcept;

  // Returns once `flag` is at least `value`; `peer` is the rank who raises it. `start` is when the caller's
  // operation began. Throws Error: kRemote where the peer ended or left or another rank gave up, kTimeout,
  // kAborted, kUsage where the ranks' calls do not match.
  void wait(ShmFlag& flag, uint64_t value, int peer, Clock::time_point start) {
    for (int i = 0; i < spins_; ++i) {
      if (flag.value.load(std::memory_order_acquire) >= value) {
        return;
      }
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    waitLonger(flag, value, peer, start);
  }

  // Throws where the group has failed.
  void checkFailure() const {
    if (state_->failure.load(std::memory_order_acquire) != 0) {
      throwFailure();
    }
  }

  // Records a failure, the first one counts, and throws it.
  [[noreturn]] void fail(ShmFailure failure, int culprit) noexcept(false);

  // Only records it. Threads: any.
  void record(ShmFailure failure, int culprit) noexcept;

 private:
  void waitLonger(ShmFlag& flag, uint64_t value, int peer, Clock::time_point start);
  void checkPeer(const ShmFlag& flag, uint64_t value, int peer);
  [[noreturn]] void throwFailure() const;

  const std::shared_ptr<ShmSegment> segment_;
  const int rank_;
  const std::chrono::milliseconds timeout_;
  ShmState* const state_;
  ShmFlag* const left_;
  const int spins_;
};

}  // namespace baguarun::net
