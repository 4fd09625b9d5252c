// How many of a link's streams to use: one, or all where one does not fill the line.
//
// Several streams help where something holds each of them back: a long way, loss, a limit per connection, the
// kernel's work on one core. In front of a line that one of them fills they help nobody; they only make the
// queue longer, and meet those of other senders there. A stream that is full while there is no queue, or one
// shorter than the way while its buffer is all under way, is held back. Where there is a longer queue, more
// are tried now and then, ever less often, and all are used if they move more than one did before and does
// afterwards, twice in a row: other senders come and go meanwhile. What is under way in a trial is what one
// had. The first trial is of all, whose ways may differ, and so is one after all have been in use; others are
// of two: all that were idle, with small windows, would hold up two exchanges by 0.1 s each. Rests count
// little in pauses between trials: who sends rarely would spend most of it on trials.
//
// After a rest the kernel has forgotten how much a stream may have under way, and it takes some trips until
// that has grown again. On a long way all are used meanwhile: together they may have more.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>

#include "net/backlog.h"
#include "net/socket.h"

namespace baguarun::net {

// Threads: a value, one at a time.
class StreamCount {
 public:
  enum class Phase { kOne, kChange, kTrial, kChangeBack, kProof, kAll };

  // Of the streams in use: whether all are full now and then, the shortest queueing lately, whether one has
  // its buffer limited by us, whether all have the largest that there is and could use a larger one, and what
  // they moved per second while they were full, over how long.
  struct Observed {
    bool allFull;
    std::chrono::microseconds queueing;
    bool isLimited;
    bool areHeldByBuffers;
    double bytesPerSecond;
    Clock::duration measured;
  };

  explicit StreamCount(size_t all) : all_(all) {}

  // To be called now and then while there is something to send. True: measure anew.
  bool observe(const Observed& observed, Clock::time_point now);

  static bool isLongRest(Clock::duration rest) noexcept;
  // There is something to send again after a long rest, on a way of that trip.
  void resume(Clock::duration trip, Clock::time_point now) noexcept;
  bool isResuming() const noexcept { return isResuming_; }
  // True: that is over. Measure anew.
  bool endResuming(Clock::time_point now) noexcept;

  Phase phase() const noexcept { return phase_; }

  // What streams may do with their buffers. One alone goes by the queue that it sees, once that is its own
  // and not the one that all left behind.
  Buffering buffering(Clock::time_point now) const noexcept;

  size_t used() const noexcept {
    if (isResuming_) {
      return all_;
    }
    switch (phase_) {
      case Phase::kChange:
      case Phase::kTrial:
        return onTrial_;
      case Phase::kAll:
        return all_;
      case Phase::kOne:
      case Phase::kChangeBack:
      case Phase::kProof:
        break;
    }
    return 1;
  }

 private:
  bool isSettled(Clock::time_point now) const noexcept;
  bool goIf(bool isWorthIt, Phase phase, Clock::time_point now);
  bool go(Phase phase, Clock::time_point now);
  bool isPersistent(bool isSign, Clock::time_point now);

  size_t all_;
  Phase phase_ = Phase::kOne;
  Clock::time_point since_{};
  bool isResuming_ = false;
  Clock::time_point resumesUntil_{};
  double rateOfOne_ = 0;
  double rateOnTrial_ = 0;
  size_t onTrial_ = 1;
  int numProofs_ = 0;
  // How long there has been something to send, so far and at the next trial.
  Clock::duration sending_{0};
  Clock::duration nextTrial_{0};
  Clock::time_point lastObserved_{};
  // How long trials are apart, and how long all streams are used, at least.
  Clock::duration pause_{0};
  Clock::duration stay_{0};
  bool allHelped_ = false;  // when they were used last; no trial has shown otherwise since
  // How often in a row, and since when, what was observed spoke for a change.
  int numSigns_ = 0;
  Clock::time_point firstSign_{};
};

}  // namespace baguarun::net
