#include "engine/fail_point.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>

namespace baguarun::engine {

namespace {

// For messages that nobody receives.
constexpr std::chrono::milliseconds kPatience{10'000};

}  // namespace

FailPoint& FailPoint::ofProcess() {
  static auto* const only = new FailPoint();
  return *only;
}

void FailPoint::failAfterSends(int64_t numSends) { left_ = numSends; }

void FailPoint::beforeSend() {
  int64_t left = left_;
  while (left > 0) {
    if (left_.compare_exchange_weak(left, left - 1)) {
      return;
    }
  }
  if (left == kAsleep) {
    return;
  }
  std::vector<c10::intrusive_ptr<::c10d::Work>> sent;
  {
    const std::scoped_lock lock(mutex_);
    sent.swap(sent_);
  }
  for (const auto& work : sent) {
    try {
      work->wait(kPatience);
    } catch (const std::exception&) {
      // It has left in vain.
      continue;
    }
  }
  kill(getpid(), SIGKILL);
}

void FailPoint::afterSend(const c10::intrusive_ptr<::c10d::Work>& work) {
  if (left_ == kAsleep) {
    return;
  }
  const std::scoped_lock lock(mutex_);
  sent_.push_back(work);
}

c10::intrusive_ptr<::c10d::Work> sendMessage(const c10::intrusive_ptr<::c10d::ProcessGroup>& group,
                                             std::vector<at::Tensor>& tensors, int rank, int tag) {
  FailPoint::ofProcess().beforeSend();
  auto work = group->send(tensors, rank, tag);
  FailPoint::ofProcess().afterSend(work);
  return work;
}

}  // namespace baguarun::engine
