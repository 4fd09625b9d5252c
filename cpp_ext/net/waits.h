// Whether this process waits for other ranks just now, and for how long it has: told to its agent, so that
// the one worker which hangs is told from all the others, which wait for it.
#pragma once

#include <chrono>
#include <mutex>

namespace baguarun::net {

// Threads: any.
class Waits {
 public:
  using Clock = std::chrono::steady_clock;

  // One for the process, never destroyed.
  static Waits& ofProcess() {
    static auto* const waits = new Waits;
    return *waits;
  }

  // Threads that serve communication alone wait all the time: theirs do not count.
  static void ignoreThisThread() noexcept { ignored() = true; }

  bool any() const {
    const std::scoped_lock lock(mutex_);
    return numWaiting_ > 0;
  }

  // In which any thread waited, the present wait included.
  Clock::duration total() const {
    const std::scoped_lock lock(mutex_);
    return numWaiting_ > 0 ? total_ + (Clock::now() - since_) : total_;
  }

 private:
  friend class Waiting;

  static bool& ignored() noexcept {
    thread_local bool value = false;
    return value;
  }

  void begin() {
    const std::scoped_lock lock(mutex_);
    if (numWaiting_++ == 0) {
      since_ = Clock::now();
    }
  }

  void end() {
    const std::scoped_lock lock(mutex_);
    if (--numWaiting_ == 0) {
      total_ += Clock::now() - since_;
    }
  }

  mutable std::mutex mutex_;
  int numWaiting_ = 0;
  Clock::time_point since_;
  Clock::duration total_{0};
};

// This thread waits for other ranks as long as the object lives. Threads: the one that makes it.
class Waiting {
 public:
  Waiting() : counts_(!Waits::ignored()) {
    if (counts_) {
      Waits::ofProcess().begin();
    }
  }
  ~Waiting() {
    if (counts_) {
      Waits::ofProcess().end();
    }
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  const bool counts_;
};

}  // namespace baguarun::net
