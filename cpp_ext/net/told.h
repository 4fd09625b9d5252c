// An error that others have found.
#pragma once

#include "net/error.h"

namespace baguarun::net {

// An Error that is the last word: from another rank, or found out by rank 0. Threads: a value.
class Told : public Error {
 public:
  Told(const Error& error, bool isKnown) : Error(error), isKnown_(isKnown) {}
  // The others know already.
  bool isKnown() const noexcept { return isKnown_; }

 private:
  bool isKnown_;
};

}  // namespace baguarun::net
