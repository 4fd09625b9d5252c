#include "c10d/average.h"

#include <condition_variable>
#include <mutex>
#include <utility>

#include "c10d/reduction.h"
#include "c10d/tensors.h"
#include "net/waits.h"

namespace baguarun::backend {

namespace {

constexpr const char* kName = "all_reduce";

}  // namespace

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

Average::Average(c10::intrusive_ptr<BaguanetBackend> group, const at::Tensor& from, const at::Tensor& into)
    : group_(std::move(group)), size_(into.numel()), progress_(std::make_shared<Progress>()) {
  checkTensor(from);
  checkAlike({into}, from);
  TORCH_CHECK_VALUE(isPlain(from) && isPlain(into),
                    "baguanet: found tensors with gaps; want contiguous ones");
  const Reduction reduction(::c10d::ReduceOp::AVG, from);
  collective_ = group_->start(
      kName, [=, progress = progress_](net::Communicator& communicator, Clock::time_point deadline) {
        communicator.allReduceInto(from.const_data_ptr(), into.mutable_data_ptr(), reduction.count(from),
                                   reduction.dtype, reduction.op, deadline,
                                   [&](size_t count) { progress->advance(static_cast<int64_t>(count)); });
      });
  collective_->onDone([progress = progress_] { progress->end(); });
}

bool Average::isDone() const { return collective_->isDone(); }

void Average::wait(int64_t count) {
  TORCH_CHECK_VALUE(0 <= count && count <= size_, "baguanet: found count=", count,
                    "; want 0 <= count <= ", size_);
  // All are there at the end only: until then the group may still read `from`.
  if (count == size_ || !progress_->waitFor(count)) {
    group_->wait(kName, *collective_);
  }
}

}  // namespace baguarun::backend
