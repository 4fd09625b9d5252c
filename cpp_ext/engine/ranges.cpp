#include "engine/ranges.h"

#include <algorithm>
#include <mutex>

namespace baguarun::engine {

namespace {

// What the calling thread works for.
thread_local BucketTimes* currentBucket = nullptr;

// The name that the profiler shows.
std::string profiledName(const char* name, int64_t peer) {
  std::string text = std::string("baguarun::") + name;
  return peer < 0 ? text : text + " rank " + std::to_string(peer);
}

// Rows for what is in flight at once: each takes the first free one.
class Lanes {
 public:
  static Lanes& ofProcess() {
    static auto* const lanes = new Lanes();
    return *lanes;
  }

  size_t take(TimelineEvent& event) {
    const std::scoped_lock lock(mutex_);
    const auto free = std::ranges::find(taken_, false);
    const auto lane = static_cast<size_t>(free - taken_.begin());
    if (free == taken_.end()) {
      taken_.push_back(true);
      tracks_.push_back(Timeline::ofProcess().newTrack());
      labels_.push_back(std::make_shared<const std::string>("in flight " + std::to_string(lane)));
    }
    taken_[lane] = true;
    event.track = tracks_[lane];
    event.label = labels_[lane];
    return lane;
  }

  void giveBack(size_t lane) {
    const std::scoped_lock lock(mutex_);
    taken_[lane] = false;
  }

 private:
  std::mutex mutex_;
  std::vector<bool> taken_;
  std::vector<uint32_t> tracks_;
  std::vector<TimelineLabel> labels_;
};

}  // namespace

Span::Span(const char* name, const char* category, int64_t bytes, int64_t peer) {
  if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
    function_.emplace(std::move(*callbacks));
    function_->before(profiledName(name, peer));
  }
  if (Timeline::isOn()) {
    event_.name = name;
    event_.category = category;
    event_.bytes = bytes;
    event_.peer = peer;
    if (currentBucket != nullptr) {
      event_.label = currentBucket->label;
      event_.round = currentBucket->round;
    }
    event_.startNs = Timeline::nowNs();
  }
}

void Span::countCpu() {
  if (event_.startNs != 0) {
    event_.cpuNs = Timeline::cpuNs();
  }
}

Span::~Span() {
  if (event_.startNs != 0) {
    event_.endNs = Timeline::nowNs();
    if (event_.cpuNs >= 0) {
      event_.cpuNs = Timeline::cpuNs() - event_.cpuNs;
    }
    Timeline::ofProcess().record(std::move(event_));
  }
}

WireSpan::WireSpan(const char* name, int64_t peer) : span_(name, "wire", -1, peer) { markPosted(); }

WireSpan::~WireSpan() {
  if (Timeline::isOn() && currentBucket != nullptr) {
    currentBucket->arrivedNs = Timeline::nowNs();
  }
}

void markPosted() {
  if (Timeline::isOn() && currentBucket != nullptr && currentBucket->postedNs == 0) {
    int64_t never = 0;
    currentBucket->postedNs.compare_exchange_strong(never, Timeline::nowNs());
  }
}

StageSpan::StageSpan(BucketTimes& bucket, const char* name)
    : state_(bucket.giver ? std::optional<at::ThreadLocalStateGuard>(std::in_place, *bucket.giver)
                          : std::nullopt),
      outer_(currentBucket) {
  currentBucket = &bucket;
  span_.emplace(name, "stage", bucket.bytes);
}

StageSpan::~StageSpan() {
  span_.reset();
  currentBucket = outer_;
}

void BucketTracks::add(const std::string& label, uint64_t bytes, uint64_t sentBytes) {
  BucketTimes& bucket = buckets_.emplace_back();
  bucket.label = std::make_shared<const std::string>(label);
  bucket.bytes = static_cast<int64_t>(bytes);
  bucket.sentBytes = static_cast<int64_t>(sentBytes);
  bucket.track = Timeline::ofProcess().newTrack();
}

void BucketTracks::stored(size_t index) {
  if (Timeline::isOn() && buckets_[index].firstGradientNs == 0) {
    buckets_[index].firstGradientNs = Timeline::nowNs();
    roundStartNs_ = roundStartNs_ == 0 ? buckets_[index].firstGradientNs : roundStartNs_;
  }
}

void BucketTracks::full(size_t index, uint32_t round) {
  BucketTimes& bucket = buckets_[index];
  bucket.round = round_ = round;
  if (at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
    bucket.giver = std::make_shared<const at::ThreadLocalState>();
  }
  if (Timeline::isOn()) {
    bucket.fullNs = Timeline::nowNs();
    Timeline::ofProcess().record({.name = "full",
                                  .category = "compute",
                                  .startNs = bucket.fullNs,
                                  .endNs = bucket.fullNs,
                                  .bytes = bucket.bytes,
                                  .round = round,
                                  .label = bucket.label});
  }
}

void BucketTracks::final(size_t index) {
  BucketTimes& bucket = buckets_[index];
  bucket.giver.reset();
  if (Timeline::isOn() && bucket.fullNs != 0) {
    const auto show = [&bucket](const char* name, const char* category, int64_t start, int64_t end,
                                int64_t bytes) {
      if (start != 0 && end > start) {
        Timeline::ofProcess().record({.name = name,
                                      .category = category,
                                      .startNs = start,
                                      .endNs = end,
                                      .bytes = bytes,
                                      .round = bucket.round,
                                      .track = bucket.track,
                                      .label = bucket.label});
      }
    };
    const int64_t begin = bucket.firstGradientNs != 0 ? bucket.firstGradientNs : bucket.fullNs;
    show("bucket", "bucket", begin, Timeline::nowNs(), bucket.bytes);
    show("filling", "compute", bucket.firstGradientNs, bucket.fullNs, bucket.bytes);
    show("on the wire", "wire", bucket.postedNs, bucket.arrivedNs, bucket.sentBytes);
  }
  bucket.firstGradientNs = bucket.fullNs = 0;
  bucket.postedNs = bucket.arrivedNs = 0;
}

void BucketTracks::endRound() {
  if (Timeline::isOn() && roundStartNs_ != 0) {
    Timeline::ofProcess().record({.name = "backward",
                                  .category = "compute",
                                  .startNs = roundStartNs_,
                                  .endNs = Timeline::nowNs(),
                                  .round = round_});
  }
  roundStartNs_ = 0;
  for (BucketTimes& bucket : buckets_) {
    // A backward that raised leaves some half full.
    bucket.firstGradientNs = 0;
  }
}

Flight::Flight(const char* name, const char* category, int64_t bytes) {
  if (Timeline::isOn()) {
    lane_ = Lanes::ofProcess().take(event_);
    event_.name = name;
    event_.category = category;
    event_.bytes = bytes;
    event_.startNs = Timeline::nowNs();
  }
}

void Flight::end() {
  if (event_.startNs == 0) {
    return;
  }
  event_.endNs = Timeline::nowNs();
  Timeline::ofProcess().record(event_);
  Lanes::ofProcess().giveBack(lane_);
  event_.startNs = 0;
}

}  // namespace baguarun::engine
