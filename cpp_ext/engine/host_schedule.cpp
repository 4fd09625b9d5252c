#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "engine/errors.h"
#include "engine/host_operation.h"
#include "engine/ranges.h"
#include "engine/schedule.h"
#include "net/waits.h"

namespace baguarun::engine {

namespace {

// One thread that takes tasks in the order in which they were given.
//
// Threads: push and stop from anywhere; `work` runs on the own thread and must not throw.
class StageThread {
 public:
  StageThread(const char* name, std::function<void(size_t)> work)
      : work_(std::move(work)), thread_([this, name] { run(name); }) {}

  ~StageThread() {
    {
      const std::scoped_lock lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

  StageThread(const StageThread&) = delete;
  StageThread& operator=(const StageThread&) = delete;

  void push(size_t task) {
    {
      const std::scoped_lock lock(mutex_);
      tasks_.push_back(task);
    }
    wake_.notify_one();
  }

 private:
  void run(const char* name) {
    pthread_setname_np(pthread_self(), name);
    net::Waits::ignoreThisThread();
    for (;;) {
      size_t task = 0;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
        if (tasks_.empty()) {
          return;
        }
        task = tasks_.front();
        tasks_.pop_front();
      }
      work_(task);
    }
  }

  std::function<void(size_t)> work_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<size_t> tasks_;
  bool stopping_ = false;
  // Last: it runs from the moment it is made.
  std::thread thread_;
};

// Before another operation sends the bucket: mixes momentum into it, and has what is owed kept.
class Prepared final : public HostOperation {
 public:
  Prepared(const Bucket& bucket, std::unique_ptr<HostOperation> exchange)
      : momentum_(bucket.momentum), kept_(bucket.kept), exchange_(std::move(exchange)) {}

  void begin(uint32_t round) override {
    if (kept_) {
      kept_->beforeWrite();
    }
    if (momentum_) {
      momentum_->mix();
    }
    exchange_->begin(round);
  }

  void reduce() override { exchange_->reduce(); }

  void complete() override {
    exchange_->complete();
    if (momentum_) {
      momentum_->restore();
    }
  }

  void abort() override { exchange_->abort(); }

  uint64_t bytesPerRound() const override { return exchange_->bytesPerRound(); }

 private:
  const std::shared_ptr<const MomentumStep> momentum_;
  const std::shared_ptr<KeptResiduals> kept_;
  const std::unique_ptr<HostOperation> exchange_;
};

std::unique_ptr<HostOperation> operationOn(const Group& group, const Bucket& bucket, const Buffers& buffers) {
  auto exchange = makeHostOperation(group, bucket, buffers);
  if (!bucket.momentum && !bucket.kept) {
    return exchange;
  }
  return std::make_unique<Prepared>(bucket, std::move(exchange));
}

// Buckets pass through three threads: while bucket b waits for the others, b+1 is encoded and sent, and b-1
// decoded.
class HostSchedule final : public Schedule {
 public:
  HostSchedule(const Group& group, const std::vector<Bucket>& buckets)
      : group_(group),
        round_(0),
        complete_("bagua-complete", [this](size_t task) { runComplete(task); }),
        reduce_("bagua-reduce", [this](size_t task) { runReduce(task); }),
        begin_("bagua-begin", [this](size_t task) { runBegin(task); }) {
    const Buffers buffers;
    for (const Bucket& bucket : buckets) {
      operations_.push_back(operationOn(group, bucket, buffers));
      labels_.push_back("bucket " + bucket.label);
      tracks_.add(labels_.back(), bucket.bytes, operations_.back()->bytesPerRound());
    }
    beginsAtOnce_ = std::ranges::all_of(operations_, &HostOperation::beginsAtOnce);
    // The last place belongs to the flags.
    operations_.emplace_back();
    labels_.emplace_back("agreement on used parameters");
    tracks_.add(labels_.back(), 0, 0);
  }

  ~HostSchedule() override { fail("the engine is being destroyed"); }

  void stored(size_t index) override { tracks_.stored(index); }

  void launch(size_t index, uint32_t round) override {
    {
      const std::scoped_lock lock(mutex_);
      round_ = round;
      ++launched_;
    }
    tracks_.full(index, round);
    if (beginsAtOnce_) {
      runBegin(index);
    } else {
      begin_.push(index);
    }
  }

  void launchFlags(const at::Tensor& flags, uint32_t round) override {
    operations_.back() = makeHostFlags(group_, flags);
    launch(operations_.size() - 1, round);
  }

  void finish() override {
    {
      const Span span("wait for communication", "wait");
      const net::Waiting waiting;
      std::unique_lock lock(mutex_);
      done_.wait(lock, [this] { return completed_ == launched_; });
    }
    tracks_.endRound();
    synchronize();
  }

  // finish() has waited.
  void synchronize() override {
    const std::scoped_lock lock(mutex_);
    if (!failure_.empty()) {
      throw CommunicationFailure(failure_);
    }
  }

  uint64_t bytesPerRound() const override {
    uint64_t bytes = 0;
    for (const auto& operation : operations_) {
      bytes += operation ? operation->bytesPerRound() : 0;
    }
    return bytes;
  }

 private:
  void runBegin(size_t task) {
    uint32_t round = 0;
    {
      const std::scoped_lock lock(mutex_);
      round = round_;
    }
    guarded(task, "begin", [&] { operations_[task]->begin(round); });
    reduce_.push(task);
  }

  void runReduce(size_t task) {
    guarded(task, "reduce", [&] { operations_[task]->reduce(); });
    complete_.push(task);
  }

  void runComplete(size_t task) {
    guarded(task, "complete", [&] { operations_[task]->complete(); });
    tracks_.final(task);
    {
      const std::scoped_lock lock(mutex_);
      ++completed_;
    }
    done_.notify_all();
  }

  // Runs a stage unless something failed before; the first failure is kept and ends the waits of the other
  // stages.
  template <typename Run>
  void guarded(size_t task, const char* stage, const Run& run) {
    {
      const std::scoped_lock lock(mutex_);
      if (!failure_.empty()) {
        return;
      }
    }
    try {
      const StageSpan span(tracks_[task], stage);
      run();
    } catch (const std::exception& error) {
      fail(labels_[task] + ": " + textOf(error));
    }
  }

  void fail(const std::string& message) {
    {
      const std::scoped_lock lock(mutex_);
      if (!failure_.empty()) {
        return;
      }
      failure_ = message;
    }
    for (const auto& operation : operations_) {
      if (operation) {
        operation->abort();
      }
    }
  }

  const Group group_;
  std::vector<std::unique_ptr<HostOperation>> operations_;
  std::vector<std::string> labels_;
  BucketTracks tracks_;
  std::mutex mutex_;
  std::condition_variable done_;
  uint32_t round_;
  size_t launched_ = 0;
  size_t completed_ = 0;
  std::string failure_;
  // No bucket needs the thread that begins them. All or none, so that they stay in order.
  bool beginsAtOnce_ = false;
  // Destroyed first, the giver before the taker.
  StageThread complete_;
  StageThread reduce_;
  StageThread begin_;
};

}  // namespace

std::unique_ptr<Schedule> makeHostSchedule(const Group& group, const std::vector<Bucket>& buckets) {
  return std::make_unique<HostSchedule>(group, buckets);
}

}  // namespace baguarun::engine
