#include "net/stream_count.h"

#include <algorithm>

namespace baguarun::net {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr microseconds kShortQueue{2'000};
constexpr microseconds kLongQueue{30'000};
// A queue that is short, or long, as often and for so long in a row counts.
constexpr int kSigns = 8;
constexpr milliseconds kSignsFor{100};
// What one stream moves and what all move are measured for so long, the latter after a change of 50 ms.
constexpr milliseconds kMeasure{200};
constexpr milliseconds kChange{50};
// Streams that are not full for long are too many.
constexpr milliseconds kLongestTrial{1'000};
// All have to move as much more than one. Not less: other senders come and go meanwhile.
constexpr double kWorthIt = 1.5;
constexpr milliseconds kSettle{500};
constexpr seconds kFirstPause{20};
constexpr seconds kLongestPause{300};

}  // namespace

bool StreamCount::observe(const Observed& observed, Clock::time_point now) {
  if (all_ == 1) {
    return false;
  }
  bool isWorthIt = false;
  switch (phase_) {
    case Phase::kOne:
      if (!observed.allFull) {
        return false;
      }
      if (isPersistent(!observed.isLimited && observed.queueing < kShortQueue, now)) {
        return go(Phase::kAll, now);
      }
      if (now < nextTrial_ || observed.measured < kMeasure) {
        return false;
      }
      rateOfOne_ = observed.bytesPerSecond;
      return go(Phase::kChange, now);
    case Phase::kChange:
      return now - since_ > kChange && go(Phase::kTrial, now);
    case Phase::kTrial:
      if (observed.measured < kMeasure && now - since_ < kLongestTrial) {
        return false;
      }
      pause_ = std::clamp<Clock::duration>(2 * pause_, kFirstPause, kLongestPause);
      nextTrial_ = now + pause_;
      isWorthIt = observed.measured >= kMeasure && observed.bytesPerSecond >= kWorthIt * rateOfOne_;
      return go(isWorthIt ? Phase::kAll : Phase::kOne, now);
    case Phase::kAll:
      return observed.allFull && isPersistent(now >= nextTrial_ && observed.queueing > kLongQueue, now) &&
             go(Phase::kOne, now);
  }
  return false;
}

bool StreamCount::isOneAlone(Clock::time_point now) const noexcept {
  return phase_ == Phase::kOne && now - since_ > kSettle;
}

bool StreamCount::go(Phase phase, Clock::time_point now) {
  phase_ = phase;
  since_ = now;
  numSigns_ = 0;
  return true;
}

bool StreamCount::isPersistent(bool isSign, Clock::time_point now) {
  if (!isSign) {
    numSigns_ = 0;
    return false;
  }
  if (numSigns_++ == 0) {
    firstSign_ = now;
  }
  return numSigns_ >= kSigns && now - firstSign_ >= kSignsFor;
}

}  // namespace baguarun::net
