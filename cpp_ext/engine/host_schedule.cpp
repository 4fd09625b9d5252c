#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "engine/errors.h"
#include "engine/host_operation.h"
#include "engine/pieces.h"
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

// One piece's way through the stages, and what is done to its bucket before the first of them sends anything
// and after the last one has arrived.
struct Task {
  // Shared with who aborts it, for flags have another one in every round.
  std::shared_ptr<HostOperation> operation;
  size_t bucket = 0;
  bool isLast = true;
  // Of the bucket, for its first and its last piece; null: nothing.
  std::shared_ptr<KeptResiduals> kept = nullptr;
  std::shared_ptr<MomentumResult> momentum = nullptr;

  bool beginsAtOnce() const { return !kept && operation->beginsAtOnce(); }
};

// Pieces of buckets pass through a thread per stage: while piece p waits for the others, p+1 is encoded and
// sent, and p-1 decoded.
class HostSchedule final : public Schedule {
 public:
  HostSchedule(Lanes lanes, const std::vector<Bucket>& buckets) : lanes_(std::move(lanes)), round_(0) {
    const Buffers buffers;
    // What no rank shares memory for waits long for others, and the group may begin it while it does.
    const bool queued = std::ranges::none_of(buckets, &Bucket::shared);
    size_t numPieces = 0;
    for (const Bucket& bucket : buckets) {
      firstTask_.push_back(tasks_.size());
      uint64_t sentBytes = 0;
      for (Bucket& piece : cutIntoPieces(bucket, static_cast<size_t>(lanes_[0]->getSize()))) {
        // By which its messages are told from others'.
        piece.index = numPieces++;
        const Group& lane = lanes_[piece.index % lanes_.size()];
        tasks_.push_back({.operation = makeHostOperation(lane, piece, buffers, queued),
                          .bucket = labels_.size(),
                          .isLast = false});
        sentBytes += tasks_.back().operation->bytesPerRound();
      }
      tasks_[firstTask_.back()].kept = bucket.kept;
      tasks_.back().momentum = bucket.momentum;
      tasks_.back().isLast = true;
      labels_.push_back("bucket " + bucket.label);
      tracks_.add(labels_.back(), bucket.bytes, sentBytes);
    }
    beginsAtOnce_ = std::ranges::all_of(tasks_, &Task::beginsAtOnce);
    // The last place belongs to the flags.
    firstTask_.push_back(tasks_.size());
    tasks_.push_back({.operation = nullptr, .bucket = labels_.size()});
    firstTask_.push_back(tasks_.size());
    labels_.emplace_back("agreement on used parameters");
    tracks_.add(labels_.back(), 0, 0);
    makeStages();
  }

  ~HostSchedule() override {
    fail("the engine is being destroyed");
    // The giver before the taker.
    for (auto& stage : stages_) {
      stage.reset();
    }
  }

  void stored(size_t index) override { tracks_.stored(index); }

  void launch(size_t index, uint32_t round) override {
    const size_t first = firstTask_[index];
    const size_t end = firstTask_[index + 1];
    {
      const std::scoped_lock lock(mutex_);
      round_ = round;
      launched_ += end - first;
    }
    tracks_.full(index, round);
    for (size_t task = first; task < end; ++task) {
      if (beginsAtOnce_) {
        run(kBegin, task);
      } else {
        stages_[kBegin]->push(task);
      }
    }
    if (!beginsAtOnce_) {
      // Where backward has no core to spare it would compute on first, while the wire waits.
      std::this_thread::yield();
    }
  }

  void launchFlags(const at::Tensor& flags, uint32_t round) override {
    {
      const std::scoped_lock lock(mutex_);
      tasks_.back().operation = makeHostFlags(lanes_[0], flags);
    }
    launch(tasks_.back().bucket, round);
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
    for (const Task& task : tasks_) {
      bytes += task.operation ? task.operation->bytesPerRound() : 0;
    }
    return bytes;
  }

 private:
  static constexpr size_t kBegin = 0;
  static constexpr size_t kReduce = 1;

  void makeStages() {
    size_t numBetween = 0;
    for (const Task& task : tasks_) {
      numBetween = std::max(numBetween, task.operation ? task.operation->numStagesBetween() : 0);
    }
    const auto make = [this](const char* name) {
      const size_t stage = stages_.size();
      stages_.push_back(
          std::make_unique<StageThread>(name, [this, stage](size_t task) { run(stage, task); }));
    };
    make("bagua-begin");
    make("bagua-reduce");
    for (size_t stage = 0; stage < numBetween; ++stage) {
      make("bagua-between");
    }
    make("bagua-complete");
  }

  void run(size_t stage, size_t task) {
    const bool isLast = stage + 1 == stages_.size();
    if (stage == kBegin) {
      runBegin(task);
    } else if (stage == kReduce) {
      guarded(task, "reduce", [&] { tasks_[task].operation->reduce(); });
    } else if (isLast) {
      runComplete(task);
    } else if (const size_t between = stage - kReduce - 1;
               between < tasks_[task].operation->numStagesBetween()) {
      guarded(task, "between", [&] { tasks_[task].operation->between(between); });
    }
    if (!isLast) {
      stages_[stage + 1]->push(task);
    }
  }

  void runBegin(size_t task) {
    uint32_t round = 0;
    {
      const std::scoped_lock lock(mutex_);
      round = round_;
    }
    guarded(task, "begin", [&] { begin(task, round); });
  }

  void begin(size_t task, uint32_t round) {
    if (tasks_[task].kept) {
      tasks_[task].kept->beforeWrite();
    }
    const size_t bucket = tasks_[task].bucket;
    const auto& momentum = tasks_[firstTask_[bucket + 1] - 1].momentum;
    if (momentum && task == firstTask_[bucket]) {
      momentum->begin();
    }
    tasks_[task].operation->begin(round);
  }

  void runComplete(size_t task) {
    guarded(task, "complete", [&] { complete(task); });
    if (tasks_[task].isLast) {
      tracks_.final(tasks_[task].bucket);
    }
    const std::scoped_lock lock(mutex_);
    if (++completed_ == launched_) {
      done_.notify_all();
    }
  }

  void complete(size_t task) {
    tasks_[task].operation->complete();
    if (tasks_[task].momentum) {
      bool finite = true;
      for (size_t piece = firstTask_[tasks_[task].bucket]; piece <= task; ++piece) {
        finite = finite && tasks_[piece].operation->isKnownFinite();
      }
      tasks_[task].momentum->finish(finite);
    }
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
      const StageSpan span(tracks_[tasks_[task].bucket], stage);
      run();
    } catch (const std::exception& error) {
      fail(labels_[tasks_[task].bucket] + ": " + textOf(error));
    }
  }

  void fail(const std::string& message) {
    std::vector<std::shared_ptr<HostOperation>> operations;
    {
      const std::scoped_lock lock(mutex_);
      if (!failure_.empty()) {
        return;
      }
      failure_ = message;
      for (const Task& task : tasks_) {
        operations.push_back(task.operation);
      }
    }
    for (const auto& operation : operations) {
      if (operation) {
        operation->abort();
      }
    }
  }

  const Lanes lanes_;
  std::vector<Task> tasks_;
  // Of each bucket, and where the tasks end.
  std::vector<size_t> firstTask_;
  std::vector<std::string> labels_;
  BucketTracks tracks_;
  std::mutex mutex_;
  std::condition_variable done_;
  uint32_t round_;
  size_t launched_ = 0;
  size_t completed_ = 0;
  std::string failure_;
  // No task needs the thread that begins them. All or none, so that they stay in order.
  bool beginsAtOnce_ = false;
  // In the order in which tasks pass through them.
  std::vector<std::unique_ptr<StageThread>> stages_;
};

}  // namespace

std::unique_ptr<Schedule> makeHostSchedule(Lanes lanes, const std::vector<Bucket>& buckets) {
  return std::make_unique<HostSchedule>(std::move(lanes), buckets);
}

}  // namespace baguarun::engine
