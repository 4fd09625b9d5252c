// How the ranks of a shared segment wait for each other, and how all of them learn of the first failure.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "net/error.h"
#include "net/shm_segment.h"

namespace baguarun::net {

// A count that one rank raises and the others wait for. Lives in the segment, zero at first.
struct alignas(128) ShmFlag {
  std::atomic<uint64_t> value;
  std::atomic<uint32_t> numWaiters;  // who died in its wait stays: that costs a call
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// The first failure of the group, and what each rank had to say about the one that it found. Lives in the
// segment, zero at first.
struct alignas(128) ShmState {
  std::atomic<uint64_t> failure;
};
struct alignas(128) ShmReason {
  char text[512];
};

enum class ShmFailure : uint8_t { kNone, kAborted, kDied, kLeft, kTimeout, kMismatch, kTold };

// What a rank does beside waiting for `peer`. True: it has something under way, call again soon. It may
// throw.
using ShmHook = std::function<bool(int peer)>;

// Waits on flags for one rank. A wait spins briefly where every rank can have a CPU of its own, yields a few
// times and then sleeps in the kernel, in slices after which it looks for failures.
// Threads: any; one per flag waited for.
class ShmWaiter {
 public:
  ShmWaiter(std::shared_ptr<ShmSegment> segment, int rank, ShmState* state, ShmReason* reasons,
            ShmFlag* left);

  // Threads: before the first wait.
  void setHook(ShmHook hook) { hook_ = std::move(hook); }

  // Raises `flag` to `value` and wakes whoever sleeps on it.
  void post(ShmFlag& flag, uint64_t value) noexcept;

  // Returns once `flag` is at least `value`; `peer` is the rank who raises it. Throws Error: kRemote where
  // the peer ended or left or another rank gave up, kTimeout, kAborted, kUsage where the ranks' calls do not
  // match.
  void wait(ShmFlag& flag, uint64_t value, int peer, Clock::time_point deadline) {
    for (int i = 0; i < spins_; ++i) {
      if (flag.value.load(std::memory_order_acquire) >= value) {
        return;
      }
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    waitLonger(flag, value, peer, deadline);
  }

  // Throws where the group has failed.
  void checkFailure() const {
    if (state_->failure.load() != 0) {
      throwFailure();
    }
  }

  // Records a failure, the first one counts, and throws it.
  [[noreturn]] void fail(ShmFailure failure, int culprit, const std::string& reason = "") noexcept(false);

  // Only records it. Threads: any.
  void record(ShmFailure failure, int culprit, const std::string& reason = "") noexcept;

  // Hands on a failure of the ranks elsewhere, in its own words.
  void record(const Error& error) noexcept;

 private:
  // True: other ranks were let run, and `flag` has come to `value`.
  bool yieldsReach(const ShmFlag& flag, uint64_t value) noexcept;
  void waitLonger(ShmFlag& flag, uint64_t value, int peer, Clock::time_point deadline);
  void checkPeer(const ShmFlag& flag, uint64_t value, int peer);
  [[noreturn]] void throwFailure() const;

  const std::shared_ptr<ShmSegment> segment_;
  const int rank_;
  ShmState* const state_;
  ShmReason* const reasons_;
  ShmFlag* const left_;
  const int spins_;
  std::atomic<int> waitsWithoutYield_{0};
  ShmHook hook_;
  std::mutex recording_;
};

}  // namespace baguarun::net
