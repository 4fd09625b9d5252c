// Who is late: what rank 0 finds out shortly before somebody's deadline.
#pragma once

#include <functional>
#include <vector>

#include "net/call.h"
#include "net/error.h"
#include "net/socket.h"

namespace baguarun::net {

// All ranks are asked for the call that they are in. To blame are those who do not answer, else those who are
// in an earlier one; where there is no such rank, whom the asker itself waits for. Moves nothing. Threads:
// one at a time.
class Inquiry {
 public:
  // `asker` waits in `call`, and would break with `error`. Answers count until `end`.
  Inquiry(int size, int asker, const Call& call, const Error& error, Clock::time_point end);

  // `rank` is in `call`, or was in it last.
  void answer(int rank, const Call& call);

  Clock::time_point end() const noexcept { return end_; }
  // There is nothing more to wait for.
  bool isOver(Clock::time_point now) const noexcept { return now >= end_ || numSilent_ == 0; }
  // What to break with if the call does not end. `name` is what a rank is called.
  Error conclude(const std::function<std::string(int)>& name) const;

 private:
  struct Answer {
    bool isGiven = false;
    uint64_t sequence = 0;
  };

  const int asker_;
  const Call call_;
  const Error error_;
  const Clock::time_point end_;
  std::vector<Answer> answers_;
  size_t numSilent_;
};

}  // namespace baguarun::net
