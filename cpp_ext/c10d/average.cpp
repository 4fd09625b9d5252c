#include "c10d/average.h"

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>

#include "c10d/reduction.h"
#include "c10d/tensors.h"
#include "net/waits.h"

namespace baguarun::backend {

// Shared with the transport's thread, which may come to it after the average is gone.
class Average::Progress {
 public:
  void advance(int64_t count) {
    const std::scoped_lock lock(mutex_);
    count_ = count;
    changed_.notify_all();
  }

  void end() {
    const std::scoped_lock lock(mutex_);
    hasEnded_ = true;
    changed_.notify_all();
  }

  // False: it has ended before.
  bool waitFor(int64_t count) {
    std::unique_lock lock(mutex_);
    const auto isOver = [&] { return hasEnded_ || count_ >= count; };
    if (!isOver()) {
      const net::Waiting waiting;
      changed_.wait(lock, isOver);
    }
    return !hasEnded_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t count_ = 0;
  bool hasEnded_ = false;
};

namespace {

Started startAverage(BaguanetBackend& group, const at::Tensor& from, const at::Tensor& into,
                     std::function<void(int64_t count)> arrived) {
  checkTensor(from);
  checkAlike({into}, from);
  TORCH_CHECK_VALUE(isPlain(from) && isPlain(into),
                    "baguanet: found tensors with gaps; want contiguous ones");
  const Reduction reduction(::c10d::ReduceOp::AVG, from);
  const size_t count = reduction.count(from);
  const size_t perElement = from.is_complex() ? 2 : 1;
  std::optional<Collective::AllReduce> inPlace;
  if (from.const_data_ptr() == into.const_data_ptr()) {
    inPlace = {.data = into.mutable_data_ptr(), .count = count, .dtype = reduction.dtype, .op = reduction.op};
  }
  return group.start(
      "all_reduce",
      [=, arrived = std::move(arrived)](net::Communicator& communicator, Clock::time_point deadline) {
        communicator.allReduceInto(
            from.const_data_ptr(), into.mutable_data_ptr(), count, reduction.dtype, reduction.op, deadline,
            [&](size_t numArrived) { arrived(static_cast<int64_t>(numArrived / perElement)); });
      },
      inPlace);
}

}  // namespace

Average::Average(BaguanetBackend& group, const at::Tensor& from, const at::Tensor& into)
    : size_(into.numel()),
      progress_(std::make_shared<Progress>()),
      started_(startAverage(group, from, into,
                            [progress = progress_](int64_t count) { progress->advance(count); })) {
  // Not after the end: what is called then costs the group a thread.
  started_.collective().beforeDone([progress = progress_] { progress->end(); });
}

bool Average::isDone() const { return started_.collective().isDone(); }

void Average::wait(int64_t count) {
  TORCH_CHECK_VALUE(0 <= count && count <= size_, "baguanet: found count=", count,
                    "; want 0 <= count <= ", size_);
  // All are there at the end only: until then the group may still read `from`.
  if (count == size_ || started_.isForked() || !progress_->waitFor(count)) {
    started_.wait();
  }
}

}  // namespace baguarun::backend
