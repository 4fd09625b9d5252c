// What a communicator broke with, shared by all that act for it.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>

#include "net/error.h"

namespace baguarun::net {

// Threads: any.
class Verdict {
 public:
  // The first error counts. False: there was one already.
  bool set(const Error& error) {
    const std::lock_guard lock(mutex_);
    if (error_.has_value()) {
      return false;
    }
    error_ = error;
    isBroken_.store(true);
    return true;
  }

  bool isBroken() const noexcept { return isBroken_.load(); }

  std::optional<Error> get() const {
    const std::lock_guard lock(mutex_);
    return error_;
  }

  void check() const {
    if (isBroken()) {
      throw *get();
    }
  }

  // As check(), once nobody drives any more: what a message's buffer holds then changes no more.
  void checkAtRest() const {
    if (isBroken() && !isDriven_.load()) {
      throw *get();
    }
  }

  // While somebody drives.
  class Drive {
   public:
    explicit Drive(Verdict& verdict) : verdict_(verdict) { verdict_.isDriven_.store(true); }
    ~Drive() { verdict_.isDriven_.store(false); }
    Drive(const Drive&) = delete;
    Drive& operator=(const Drive&) = delete;

   private:
    Verdict& verdict_;
  };

 private:
  mutable std::mutex mutex_;
  std::optional<Error> error_;
  std::atomic<bool> isBroken_{false};
  std::atomic<bool> isDriven_{false};
};

}  // namespace baguarun::net
