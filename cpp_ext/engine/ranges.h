// Spans of work on buckets, seen by the timeline and by torch.profiler alike.
//
// The profiler watches threads one by one, and follows work to another only if that thread takes over the
// state of the one that gave it the work. So a bucket carries that state from backward to its stages.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "engine/timeline.h"

namespace baguarun::engine {

// From its construction to its end, on the calling thread; belongs to the bucket of the StageSpan around it.
// If nobody watches it costs a few nanoseconds.
class Span {
 public:
  // `name` and `category` live for ever. Negative bytes or peer: none.
  Span(const char* name, const char* category, int64_t bytes = -1, int64_t peer = -1);
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  // From now on the thread's CPU time is counted, too, which takes longer than all else here.
  void countCpu();

 private:
  TimelineEvent event_;
  std::optional<at::RecordFunction> function_;
};

// A span in which bytes are on the wire, or waited for.
class WireSpan {
 public:
  explicit WireSpan(const char* name, int64_t peer = -1);
  ~WireSpan();
  WireSpan(const WireSpan&) = delete;
  WireSpan& operator=(const WireSpan&) = delete;

 private:
  const Span span_;
};

// The first bytes of the bucket are being handed to the network.
void markPosted();

// What happened to one bucket in this round; 0 for what has not, or was not watched.
struct BucketTimes {
  TimelineLabel label;
  int64_t bytes = 0;
  int64_t sentBytes = 0;
  uint32_t track = 0;
  uint32_t round = 0;
  int64_t firstGradientNs = 0;
  int64_t fullNs = 0;
  // Written by the threads of several stages, which pieces of the bucket may be in at once.
  std::atomic<int64_t> postedNs = 0;
  std::atomic<int64_t> arrivedNs = 0;
  // Of the thread that filled it, if a profiler watches that.
  std::shared_ptr<const at::ThreadLocalState> giver;
};

// One step of a bucket's way, on the thread that takes it.
class StageSpan {
 public:
  StageSpan(BucketTimes& bucket, const char* name);
  ~StageSpan();
  StageSpan(const StageSpan&) = delete;
  StageSpan& operator=(const StageSpan&) = delete;

 private:
  const std::optional<at::ThreadLocalStateGuard> state_;
  BucketTimes* const outer_;
  std::optional<Span> span_;
};

// The buckets of one schedule, each a row of the timeline: how it filled, and when it was on the wire.
//
// Threads: from full() to final() stages of a bucket may run on several threads at once; all else is for one
// thread at a time, and who hands a bucket on synchronises.
class BucketTracks {
 public:
  void add(const std::string& label, uint64_t bytes, uint64_t sentBytes);
  void stored(size_t index);
  void full(size_t index, uint32_t round);
  // The bucket is final, or its operation failed.
  void final(size_t index);
  // The round has ended; the span of its backward begins with the first gradient.
  void endRound();

  BucketTimes& operator[](size_t index) { return buckets_[index]; }

 private:
  std::deque<BucketTimes> buckets_;
  int64_t roundStartNs_ = 0;
  uint32_t round_ = 0;
};

// Something on its way while this thread does other things, on a row of its own.
//
// Threads: one at a time.
class Flight {
 public:
  // `name` and `category` live for ever.
  Flight(const char* name, const char* category, int64_t bytes);
  ~Flight() { end(); }
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;
  // It has arrived, as far as this thread can tell. Later calls do nothing.
  void end();

 private:
  TimelineEvent event_;
  size_t lane_ = 0;
};

}  // namespace baguarun::engine
