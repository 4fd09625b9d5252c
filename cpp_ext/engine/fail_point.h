// For tests: this process dies in the middle of an exchange.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace baguarun::engine {

// Asleep, and no more than a look at a number, until a test wakes it. Threads: any.
class FailPoint {
 public:
  static FailPoint& ofProcess();

  // The process is killed by SIGKILL where an exchange would send message number `numSends` + 1, counted from
  // here, after those before it have left.
  void failAfterSends(int64_t numSends);

  void beforeSend();
  void afterSend(const c10::intrusive_ptr<::c10d::Work>& work);

 private:
  static constexpr int64_t kAsleep = -1;

  // Sends that may still happen.
  std::atomic<int64_t> left_{kAsleep};
  std::mutex mutex_;
  std::vector<c10::intrusive_ptr<::c10d::Work>> sent_;
};

// Sends a message of an exchange.
c10::intrusive_ptr<::c10d::Work> sendMessage(const c10::intrusive_ptr<::c10d::ProcessGroup>& group,
                                             std::vector<at::Tensor>& tensors, int rank, int tag);

}  // namespace baguarun::engine
