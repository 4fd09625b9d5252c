// For tests: this process dies in the middle of a collective over links.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace baguarun::net {

// Asleep, and no more than a look at a number, until a test wakes it. Threads: any.
class FailPoint {
 public:
  static FailPoint& ofProcess();

  // `numMessages` messages of collectives may leave from here on, and the next one is the process's death.
  // Small ones do not count: ranks tell each other where they stand by them, at times of their own.
  void failAfter(int64_t numMessages) { left_ = numMessages; }

  // Whether a message of `bytes` is the one that must not leave.
  bool holdsBack(size_t bytes) const { return left_ == 0 && bytes > kSmallBytes; }
  void posted(size_t bytes);
  // By SIGKILL.
  [[noreturn]] static void die();

 private:
  static constexpr int64_t kAsleep = -1;
  static constexpr size_t kSmallBytes = 1024;

  std::atomic<int64_t> left_{kAsleep};
};

}  // namespace baguarun::net
