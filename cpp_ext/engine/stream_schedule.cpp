#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "engine/errors.h"
#include "engine/ranges.h"
#include "engine/schedule.h"
#include "engine/stream_operation.h"

namespace baguarun::engine {

namespace {

// Makes `stream` the current one of its device, and that the current device, for as long as it lives.
class StreamScope {
 public:
  StreamScope(const c10::impl::VirtualGuardImpl& device, c10::Stream stream)
      : guard_(stream.device()), device_(device), previous_(device.exchangeStream(stream)) {}
  ~StreamScope() { device_.exchangeStream(previous_); }
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  const c10::DeviceGuard guard_;
  const c10::impl::VirtualGuardImpl& device_;
  c10::Stream previous_;
};

// All operations of the plan on one communication stream, in launch order. The host never waits.
class StreamSchedule final : public Schedule {
 public:
  StreamSchedule(const Group& group, const std::vector<Bucket>& buckets)
      : group_(group),
        device_(buckets.front().flat.device()),
        impl_(device_.type()),
        stream_(impl_.getStreamFromGlobalPool(device_, /*isHighPriority=*/true)),
        ready_(device_.type()),
        finished_(device_.type()),
        writers_(buckets.size()) {
    for (const Bucket& bucket : buckets) {
      operations_.push_back(makeStreamOperation(group, bucket));
      momenta_.push_back(bucket.momentum);
      kept_.push_back(bucket.kept);
      labels_.push_back("bucket " + bucket.label);
      tracks_.add(labels_.back(), bucket.bytes, operations_.back()->bytesPerRound());
    }
    // The last place belongs to the flags.
    tracks_.add("agreement on used parameters", 0, 0);
    // The buffers made above were filled on the current stream.
    follow(impl_.getStream(device_));
  }

  // What was launched and never finished (the World is given up) may still be at memory that goes now.
  ~StreamSchedule() override {
    try {
      finished_.record(stream_);
      finished_.block(impl_.getStream(device_));
    } catch (const std::exception&) {
      // The device is beyond use, and so is the memory.
    }
  }

  void stored(size_t index) override {
    tracks_.stored(index);
    std::vector<c10::Stream>& writers = writers_[index];
    const c10::Stream current = impl_.getStream(device_);
    if (std::find(writers.begin(), writers.end(), current) == writers.end()) {
      writers.push_back(current);
    }
  }

  void launch(size_t index, uint32_t round) override {
    tracks_.full(index, round);
    for (const c10::Stream writer : writers_[index]) {
      follow(writer);
    }
    writers_[index].clear();
    run(index, round, labels_[index], *operations_[index], momenta_[index].get(), kept_[index].get());
  }

  void launchFlags(const at::Tensor& flags, uint32_t round) override {
    tracks_.full(operations_.size(), round);
    const auto reduce = makeStreamReduce(group_, flags, c10d::ReduceOp::MAX);
    follow(impl_.getStream(device_));
    run(operations_.size(), round, "agreement on used parameters", *reduce);
  }

  void finish() override {
    tracks_.endRound();
    finished_.record(stream_);
    finished_.block(impl_.getStream(device_));
    throwIfFailed();
  }

  void synchronize() override {
    finished_.synchronize();
    throwIfFailed();
    if (group_->getBackend(device_.type())->getError() != c10d::ErrorType::SUCCESS) {
      throw CommunicationFailure("the process group was aborted, or one of its collectives failed");
    }
  }

  uint64_t bytesPerRound() const override {
    uint64_t bytes = 0;
    for (const auto& operation : operations_) {
      bytes += operation->bytesPerRound();
    }
    return bytes;
  }

 private:
  void throwIfFailed() const {
    if (!failure_.empty()) {
      throw CommunicationFailure(failure_);
    }
  }

  // The communication stream waits for what `stream` has been given so far.
  void follow(c10::Stream stream) {
    ready_.record(stream);
    ready_.block(stream_);
  }

  void run(size_t index, uint32_t round, const std::string& label, StreamOperation& operation,
           MomentumResult* momentum = nullptr, KeptResiduals* kept = nullptr) {
    if (!failure_.empty()) {
      return;
    }
    const StreamScope scope(impl_, stream_);
    try {
      // The host's part. When the device is at it, torch.profiler shows below this span.
      const StageSpan span(tracks_[index], "enqueue");
      if (kept != nullptr) {
        kept->beforeWrite();
      }
      operation.enqueue(stream_, round);
      if (momentum != nullptr) {
        momentum->finish();
      }
    } catch (const std::exception& error) {
      failure_ = label + ": " + error.what();
    }
    tracks_.final(index);
  }

  const Group group_;
  const c10::Device device_;
  const c10::impl::VirtualGuardImpl impl_;
  const c10::Stream stream_;
  c10::Event ready_;
  c10::Event finished_;
  std::vector<std::unique_ptr<StreamOperation>> operations_;
  // Per bucket; null: no momentum travels.
  std::vector<std::shared_ptr<MomentumResult>> momenta_;
  // Per bucket; null: nothing to keep.
  std::vector<std::shared_ptr<KeptResiduals>> kept_;
  std::vector<std::string> labels_;
  BucketTracks tracks_;
  // Per bucket: the streams that wrote gradients into it in this round.
  std::vector<std::vector<c10::Stream>> writers_;
  std::string failure_;
};

}  // namespace

std::unique_ptr<Schedule> makeStreamSchedule(const Group& group, const std::vector<Bucket>& buckets) {
  return std::make_unique<StreamSchedule>(group, buckets);
}

}  // namespace baguarun::engine
