#include "net/stream_count.h"

#include <algorithm>
#include <utility>

namespace baguarun::net {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr microseconds kShortQueue{2'000};
constexpr microseconds kQueue{5'000};
constexpr microseconds kLongQueue{30'000};
// A queue that is short, there, or long, as often and for so long in a row counts.
constexpr int kSigns = 8;
constexpr milliseconds kSignsFor{100};
// What one stream moves and what those on trial move are measured for so long, the latter after a change.
constexpr milliseconds kMeasure{200};
constexpr milliseconds kChange{50};
// Streams that are not full for so long are too many.
constexpr milliseconds kLongestTrial{1'000};
// Those on trial have to move as much more than one.
constexpr double kWorthIt = 1.5;
// As often in a row. Where four hosts exchange at 100 Mbit/s, what a link moves in 0.2 s varies with what the
// others do: after one proof some of the twelve links kept all streams, took from the rest, and steps were
// longer by a tenth.
constexpr int kProofs = 2;
constexpr milliseconds kSettle{500};
// All are in use for as long before one is looked at again.
constexpr seconds kFirstStay{20};
// From a trial to the next one. The second one is soon, as the begin of a training may mislead.
constexpr seconds kFirstPause{60};
constexpr seconds kLongestPause{300};
constexpr int kPauseGrowth = 5;
// A window is halved for every 200 ms and a trip of rest, and doubles with every trip afterwards.
constexpr milliseconds kLongRest{800};
constexpr milliseconds kLongTrip{1};
constexpr int kTripsToResume = 6;
// As much from one look to the next counts as time with something to send; beyond it is a rest.
constexpr seconds kLongestGap{1};

bool isHeldBack(const StreamCount::Observed& observed) {
  return !observed.isLimited && (observed.areHeldByBuffers || observed.queueing < kShortQueue);
}

}  // namespace

bool StreamCount::observe(const Observed& observed, Clock::time_point now) {
  if (all_ == 1 || isResuming_) {
    return false;
  }
  const auto before = std::exchange(lastObserved_, now);
  const auto elapsed = before == Clock::time_point{} ? Clock::duration::zero() : now - before;
  sending_ += std::min<Clock::duration>(elapsed, kLongestGap);
  if (elapsed > kLongestGap && since_ != Clock::time_point{}) {
    // A rest is no part of a phase.
    since_ += elapsed - kChange;
  }
  const bool isMeasured = observed.measured >= kMeasure;
  const bool isLate = now - since_ > kLongestTrial;
  switch (phase_) {
    case Phase::kOne:
      if (!observed.allFull) {
        return false;
      }
      if (isPersistent(isHeldBack(observed), now)) {
        return go(Phase::kAll, now);
      }
      if (!isSettled(now)) {
        return true;
      }
      // Less would show how its window grows.
      if (sending_ < std::max<Clock::duration>(nextTrial_, kSettle) || !isMeasured) {
        return false;
      }
      rateOfOne_ = observed.bytesPerSecond;
      onTrial_ = pause_ == Clock::duration::zero() || allHelped_ ? all_ : std::min<size_t>(all_, 2);
      numProofs_ = 0;
      pause_ = std::clamp<Clock::duration>(kPauseGrowth * pause_, kFirstPause, kLongestPause);
      return go(Phase::kChange, now);
    case Phase::kChange:
      return now - since_ > kChange && go(Phase::kTrial, now);
    case Phase::kTrial:
      if (!isMeasured && !isLate) {
        return false;
      }
      nextTrial_ = sending_ + pause_;
      rateOnTrial_ = observed.bytesPerSecond;
      return goIf(isMeasured && rateOnTrial_ >= kWorthIt * rateOfOne_, Phase::kChangeBack, now);
    case Phase::kChangeBack:
      return now - since_ > kChange && go(Phase::kProof, now);
    case Phase::kProof:
      if (!isMeasured && !isLate) {
        return false;
      }
      rateOfOne_ = observed.bytesPerSecond;
      ++numProofs_;
      return goIf(isMeasured && rateOnTrial_ >= kWorthIt * rateOfOne_,
                  numProofs_ < kProofs ? Phase::kChange : Phase::kAll, now);
    case Phase::kAll: {
      if (!observed.allFull) {
        return false;
      }
      const bool isLong = sending_ >= nextTrial_ && observed.queueing > kLongQueue;
      // Others that keep the queue short would have us wait for a long one for ever.
      const bool isDue =
          now - since_ > std::max<Clock::duration>(stay_, kFirstStay) && observed.queueing > kQueue;
      if (!isPersistent(isLong || isDue, now)) {
        return false;
      }
      if (isDue) {
        stay_ = std::clamp<Clock::duration>(2 * stay_, kFirstStay, kLongestPause);
      }
      return go(Phase::kOne, now);
    }
  }
  return false;
}

bool StreamCount::isLongRest(Clock::duration rest) noexcept { return rest >= kLongRest; }

void StreamCount::resume(Clock::duration trip, Clock::time_point now) noexcept {
  if (all_ > 1 && phase_ == Phase::kOne && trip >= kLongTrip) {
    isResuming_ = true;
    resumesUntil_ = now + kTripsToResume * trip;
  }
}

bool StreamCount::endResuming(Clock::time_point now) noexcept {
  return isResuming_ && now >= resumesUntil_ && std::exchange(isResuming_, false);
}

Buffering StreamCount::buffering(Clock::time_point now) const noexcept {
  if (phase_ == Phase::kAll) {
    return Buffering::kFree;
  }
  return phase_ == Phase::kOne && !isResuming_ && isSettled(now) ? Buffering::kByQueue : Buffering::kAsItIs;
}

// What all have left in the queue is gone.
bool StreamCount::isSettled(Clock::time_point now) const noexcept {
  return since_ == Clock::time_point{} || now - since_ > kSettle;
}

// On, or back to one stream: those that were tried were not worth it.
bool StreamCount::goIf(bool isWorthIt, Phase phase, Clock::time_point now) {
  allHelped_ = allHelped_ && isWorthIt;
  return go(isWorthIt ? phase : Phase::kOne, now);
}

bool StreamCount::go(Phase phase, Clock::time_point now) {
  allHelped_ = allHelped_ || phase == Phase::kAll;
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
