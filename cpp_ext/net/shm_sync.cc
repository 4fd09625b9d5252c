#include "net/shm_sync.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <utility>

#include "net/told.h"

namespace baguarun::net {

namespace {

// About 20 µs: longer than a hand-over between two CPUs, too short to be seen in a waiting rank's CPU time.
constexpr int kSpins = 500;
// With more ranks than CPUs the one we wait for may want this one.
constexpr int kYields = 5;
// Whoever ran for so long meanwhile is none of ours but computes: to yield is to give one's turns away to it.
constexpr std::chrono::milliseconds kLongYield{1};
// So often, then, to sleep at once.
constexpr int kWaitsWithoutYield = 100;
// A sleeping rank looks for failures this often: within 100 ms of abort(), at little CPU.
constexpr std::chrono::nanoseconds kBusySlice = std::chrono::milliseconds(1);
constexpr std::chrono::nanoseconds kSlice = std::chrono::milliseconds(70);

// How long to sleep at once.
timespec sliceUntil(Clock::time_point deadline, bool isBusy) {
  const auto left = std::max(deadline - Clock::now(), Clock::duration(0));
  return {.tv_sec = 0, .tv_nsec = std::min<Clock::duration>(left, isBusy ? kBusySlice : kSlice).count()};
}

// The kernel compares 32 bits: the low half of the count.
uint32_t* futexWord(std::atomic<uint64_t>& value) {
  static_assert(std::endian::native == std::endian::little);
  return reinterpret_cast<uint32_t*>(&value);
}

struct Verdict {
  ShmFailure failure;
  int culprit;
  int reporter;
};

uint64_t pack(Verdict verdict) {
  return uint64_t{1} << 63 | static_cast<uint64_t>(verdict.failure) << 32 |
         static_cast<uint64_t>(verdict.culprit) << 16 | static_cast<uint64_t>(verdict.reporter);
}

Verdict unpack(uint64_t word) {
  return {static_cast<ShmFailure>((word >> 32) & 0xff), static_cast<int>((word >> 16) & 0xffff),
          static_cast<int>(word & 0xffff)};
}

}  // namespace

ShmWaiter::ShmWaiter(std::shared_ptr<ShmSegment> segment, int rank, ShmState* state, ShmReason* reasons,
                     ShmFlag* left)
    : segment_(std::move(segment)),
      rank_(rank),
      state_(state),
      reasons_(reasons),
      left_(left),
      spins_(segment_->size() <= segment_->usableCpus() ? kSpins : 1) {}

void ShmWaiter::post(ShmFlag& flag, uint64_t value) noexcept {
  // Sequentially consistent, as in waitLonger(): either we see the waiter or it sees the value.
  flag.value.store(value);
  if (flag.numWaiters.load() != 0) {
    syscall(SYS_futex, futexWord(flag.value), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

bool ShmWaiter::yieldsReach(const ShmFlag& flag, uint64_t value) noexcept {
  if (waitsWithoutYield_.load(std::memory_order_relaxed) > 0) {
    waitsWithoutYield_.fetch_sub(1, std::memory_order_relaxed);
    return false;
  }
  auto began = Clock::now();
  for (int i = 0; i < kYields; ++i) {
    sched_yield();
    if (flag.value.load(std::memory_order_acquire) >= value) {
      return true;
    }
    const auto ended = Clock::now();
    if (ended - began > kLongYield) {
      waitsWithoutYield_.store(kWaitsWithoutYield, std::memory_order_relaxed);
      return false;
    }
    began = ended;
  }
  return false;
}

void ShmWaiter::waitLonger(ShmFlag& flag, uint64_t value, int peer, Clock::time_point deadline) {
  if (yieldsReach(flag, value)) {
    return;
  }
  for (;;) {
    if (state_->failure.load() != 0) {
      // What the peer did before it gave up, to enter another World say, counts.
      if (flag.value.load() >= value) {
        return;
      }
      throwFailure();
    }
    const timespec slice = sliceUntil(deadline, hook_ && hook_(peer));
    // Only who waits takes it back: a post may look late, when somebody already waits for the next value.
    flag.numWaiters.fetch_add(1);
    const uint64_t seen = flag.value.load();
    if (seen < value) {
      // Woken, interrupted, overtaken or at the slice's end: the value alone decides.
      syscall(SYS_futex, futexWord(flag.value), FUTEX_WAIT, static_cast<uint32_t>(seen), &slice, nullptr, 0);
    }
    flag.numWaiters.fetch_sub(1);
    if (flag.value.load() >= value) {
      return;
    }
    checkPeer(flag, value, peer);
    if (Clock::now() >= deadline) {
      fail(ShmFailure::kTimeout, peer);
    }
  }
}

void ShmWaiter::checkPeer(const ShmFlag& flag, uint64_t value, int peer) {
  ShmFailure failure = ShmFailure::kNone;
  if (left_[peer].value.load() != 0) {
    failure = ShmFailure::kLeft;
  } else if (const Fd& pidfd = segment_->peer(peer).pidfd) {
    pollfd entry{.fd = pidfd.get(), .events = POLLIN, .revents = 0};
    if (poll(&entry, 1, 0) == 1) {
      failure = ShmFailure::kDied;
    }
  }
  // What it did before it went counts.
  if (failure != ShmFailure::kNone && flag.value.load() < value) {
    fail(failure, peer);
  }
}

void ShmWaiter::record(ShmFailure failure, int culprit, const std::string& reason) noexcept {
  // Each rank writes its own reason, once, and before the others can look for it.
  const std::lock_guard lock(recording_);
  if (state_->failure.load() == 0) {
    reason.copy(reasons_[rank_].text, sizeof(ShmReason::text) - 1);
    uint64_t none = 0;
    state_->failure.compare_exchange_strong(none, pack({failure, culprit, rank_}));
  }
}

void ShmWaiter::record(const Error& error) noexcept {
  record(ShmFailure::kTold, static_cast<int>(error.fault()), error.peer() + "\n" + error.message());
}

void ShmWaiter::fail(ShmFailure failure, int culprit, const std::string& reason) {
  record(failure, culprit, reason);
  throwFailure();
}

void ShmWaiter::throwFailure() const {
  const Verdict verdict = unpack(state_->failure.load());
  const bool isOurs = verdict.reporter == rank_;
  const std::string reason = reasons_[verdict.reporter].text;
  if (verdict.failure == ShmFailure::kTold) {
    // Ranks of other hosts may not know yet.
    const size_t end = reason.find('\n');
    throw Told(Error(static_cast<Fault>(verdict.culprit), reason.substr(0, end), reason.substr(end + 1)),
               false);
  }
  const std::string culprit = segment_->peerName(verdict.culprit);
  const std::string found = isOurs ? "" : " (found by " + segment_->peerName(verdict.reporter) + ")";
  switch (verdict.failure) {
    case ShmFailure::kAborted:
      throw isOurs ? Error(Fault::kAborted, "", "the shared-memory group was aborted" + reason)
                   : Error(Fault::kRemote, culprit, "aborted the shared-memory group" + reason);
    case ShmFailure::kDied:
      throw Error(Fault::kRemote, culprit, "its process has ended" + found);
    case ShmFailure::kLeft:
      throw Error(Fault::kRemote, culprit, "has left the shared-memory group" + found);
    case ShmFailure::kTimeout:
      throw Error(isOurs ? Fault::kTimeout : Fault::kRemote, culprit, "did not take part in time" + found);
    case ShmFailure::kMismatch:
      throw Error(Fault::kUsage, culprit, reason + found);
    case ShmFailure::kTold:
    case ShmFailure::kNone:
      break;
  }
  NET_CHECK(false);
  std::abort();
}

}  // namespace baguarun::net
