#include "net/backlog.h"

#include <linux/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

namespace baguarun::net {

namespace {

using std::chrono::microseconds;

constexpr std::chrono::milliseconds kCheckEvery{5};
// Between two moments at which a stream is full, no more apart, it was full.
constexpr std::chrono::milliseconds kStaysFull{50};
// Further apart it was busy, if it rested no longer: of a slow line a third of a buffer, after which the
// kernel takes more, is worth a quarter of a second. The kernel counts in ticks, of 10 ms at most.
constexpr std::chrono::milliseconds kNoRest{20};
// Longer is an outage.
constexpr std::chrono::seconds kLongestFill{1};
// Checks that "lately" goes back, and the time that shares and what arrives are averaged over: several
// senders' bytes come through one line in turns.
constexpr int kMemory = 16;
constexpr std::chrono::milliseconds kRateMemory{80};
// Held for a larger share of the time than this. By the kernel's count one stream with 4 MB, its most by
// default, was for 0.56 to 0.61 of it where 1 Gbit/s go 10 ms far, and four of them for 0.01.
constexpr double kHeld = 0.2;
// The queue beyond which a limit is set, what it is set for, and the queue below which it may grow. The way
// back has its queues, too: half of it may be there. On a long way there must be more of it: what several
// senders have under way piles up now in front of one line and now of another, which run dry in turn if most
// of it is on the way. Of 4 ranks that all exchange with all at 100 Mbit/s and 20 ms, lines were busy for
// 0.81 of the time with these queues alone, for 0.92 with two trips more.
constexpr microseconds kLongQueue{30'000};
constexpr microseconds kWantedQueue{20'000};
constexpr microseconds kShortQueue{18'000};
constexpr int kQueuedTrips = 2;
// How often it may grow by a quarter.
constexpr std::chrono::milliseconds kGrowEvery{200};
// Less would leave a line of 100 Mbit/s idle whenever our thread waits 15 ms for its turn. There an exchange
// has three streams under way at once, and more of each would overflow a queue of 50 ms.
constexpr uint32_t kLeastBytes = 192 << 10;
// Above it the kernel decides again. What fills half a line of 1 Gbit/s must fit with its queue: neighbours
// who each had half of it took 182 ms for what takes 162 (where net.core.wmem_max grants it).
constexpr uint32_t kMostBytes = 2 << 20;

#ifndef SO_BUF_LOCK
constexpr int SO_BUF_LOCK = 72;  // Linux 5.14
#endif

}  // namespace

void Backlog::onFull(int fd, Buffering buffering, Clock::time_point now) {
  if (now - lastCheck_ < kCheckEvery) {
    return;
  }
  const auto elapsed = now - std::exchange(lastCheck_, now);
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) {
    return;
  }
  const uint64_t arrived = info.tcpi_bytes_acked - std::exchange(bytesArrived_, info.tcpi_bytes_acked);
  const uint64_t busyTime = info.tcpi_busy_time - info.tcpi_rwnd_limited;
  const microseconds busy(busyTime - std::exchange(busyTime_, busyTime));
  if (elapsed < kStaysFull) {
    bytesMeasured_ += arrived;
    measured_ += elapsed;
  }
  const microseconds held(info.tcpi_sndbuf_limited -
                          std::exchange(heldTime_, uint64_t{info.tcpi_sndbuf_limited}));
  if (elapsed < kLongestFill && elapsed - busy < kNoRest) {
    averageRate(arrived, elapsed);
    averageHeld(held, elapsed);
  }
  const microseconds shortest(info.tcpi_min_rtt);
  const microseconds trip(std::max(info.tcpi_rtt, info.tcpi_min_rtt));
  const microseconds queueing = trip - shortest;
  queueing_ += (queueing - queueing_) / kMemory;
  shortestTrip_ = shortest;
  if (buffering == Buffering::kAsItIs) {
    return;
  }
  const microseconds further = kQueuedTrips * shortest;
  if (buffering == Buffering::kFree) {
    if (limit_ != 0) {
      setLimit(fd, 0);
    }
  } else if (queueing > kLongQueue + further && rate_ > 0) {
    // Not by what is under way now: of a stream that has just begun again that is little, and the trip is
    // still that of a full line.
    const auto wanted = static_cast<uint64_t>(
        rate_ * std::chrono::duration<double>(shortest + kWantedQueue + further).count());
    const auto limit = static_cast<uint32_t>(std::clamp<uint64_t>(wanted, kLeastBytes, kMostBytes));
    if (limit_ == 0 || limit < limit_) {
      setLimit(fd, limit);
      lastChange_ = now;
    }
  } else if (limit_ != 0 && queueing_ < kShortQueue + further && now - lastChange_ > kGrowEvery) {
    setLimit(fd, limit_ < kMostBytes ? limit_ + limit_ / 4 : 0);
    lastChange_ = now;
  }
}

void Backlog::averageRate(uint64_t arrived, Clock::duration elapsed) noexcept {
  const double rate = static_cast<double>(arrived) / std::chrono::duration<double>(elapsed).count();
  const double weight = std::chrono::duration<double>(elapsed) / kRateMemory;
  rate_ = rate_ > 0 ? rate_ + (rate - rate_) * std::min(weight, 1.0) : rate;
}

void Backlog::averageHeld(microseconds held, Clock::duration elapsed) noexcept {
  const double share = std::chrono::duration<double>(held) / elapsed;
  const double weight = std::chrono::duration<double>(elapsed) / kRateMemory;
  heldShare_ += (share - heldShare_) * std::min(weight, 1.0);
}

// Where the queue takes longer than the way, a larger buffer would only make it longer.
bool Backlog::isHeldByBuffer() const noexcept {
  return limit_ == 0 && heldShare_ > kHeld && queueing_ < shortestTrip_;
}

double Backlog::bytesPerSecond() const noexcept {
  const double seconds = std::chrono::duration<double>(measured_).count();
  return seconds > 0 ? static_cast<double>(bytesMeasured_) / seconds : 0;
}

void Backlog::measure() noexcept {
  bytesMeasured_ = 0;
  measured_ = {};
}

// A limit is for what the way holds and for what may queue. A stream that something else holds back needs
// only the first, at least half of it to move half as much.
uint32_t Backlog::limitOfEach(size_t numStreams) const noexcept {
  const double onTheWay = static_cast<double>(limit_) * static_cast<double>(shortestTrip_.count()) /
                          static_cast<double>(((1 + kQueuedTrips) * shortestTrip_ + kWantedQueue).count());
  return std::max(static_cast<uint32_t>(limit_ / numStreams), static_cast<uint32_t>(onTheWay / 2));
}

// What cannot be set is left: a limit is a help, not a need. The kernel doubles the number, for its own
// overhead, and cuts what is above net.core.wmem_max without a word. That is 208 KiB on many machines: a
// stream of which more has to be under way would be held back by it.
void Backlog::setLimit(int fd, uint32_t limit) {
  const auto unlock = [fd] {
    const int unlocked = 0;
    return setsockopt(fd, SOL_SOCKET, SO_BUF_LOCK, &unlocked, sizeof(unlocked)) == 0;
  };
  // Before Linux 5.14 a limit stays for good, so none is set there.
  limit_ = unlock() && limit <= most_ ? limit : 0;
  if (limit_ == 0) {
    return;
  }
  const int bytes = static_cast<int>(limit / 2);
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
  int granted = 0;
  socklen_t size = sizeof(granted);
  if (getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &granted, &size) != 0 || granted >= int64_t{2} * bytes) {
    return;
  }
  most_ = static_cast<uint32_t>(granted);
  limit_ = 0;
  unlock();
}

Way wayOf(int fd) noexcept {
  tcp_info info{};
  socklen_t size = sizeof(info);
  // The kernel's word for no trip is the largest number.
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 || info.tcpi_min_rtt == UINT32_MAX) {
    return {};
  }
  return {.shortestTrip = microseconds(info.tcpi_min_rtt), .bytesPerSecond = info.tcpi_delivery_rate};
}

}  // namespace baguarun::net
