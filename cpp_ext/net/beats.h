// When to give a sign of life, and who has given none for too long. No links, no clock of its own.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "net/socket.h"

namespace baguarun::net {

// Silence is counted in time in which this rank listened: one that was stopped, or computed for long without
// a look at its links, does not blame the others for it. Threads: one at a time.
class Beats {
 public:
  // A peer may be silent for `timeout`; 0: for ever, and there are no beats.
  Beats(Clock::duration timeout, int size, Clock::time_point now)
      : timeout_(timeout), heardAt_(static_cast<size_t>(size)), next_(now), lookedAt_(now) {}

  bool areOn() const noexcept { return timeout_ > Clock::duration(0); }
  Clock::duration interval() const noexcept { return timeout_ / 4; }
  Clock::time_point next() const noexcept { return next_; }

  // To be called at every look at the links, after what had come was heard. True: a beat is due.
  bool look(Clock::time_point now) {
    listened_ += std::min(std::max(now - lookedAt_, Clock::duration(0)), 2 * interval());
    lookedAt_ = now;
    if (now < next_) {
      return false;
    }
    next_ = now + interval();
    return true;
  }
  void hear(int rank) { heardAt_[static_cast<size_t>(rank)] = listened_; }
  // One that never spoke is not silent: it may still be waiting for others to join.
  bool isSilent(int rank) const {
    const auto& heardAt = heardAt_[static_cast<size_t>(rank)];
    return heardAt.has_value() && listened_ - *heardAt > timeout_;
  }

 private:
  Clock::duration timeout_;
  Clock::duration listened_{};
  // In time listened.
  std::vector<std::optional<Clock::duration>> heardAt_;
  Clock::time_point next_;
  Clock::time_point lookedAt_;
};

}  // namespace baguarun::net
