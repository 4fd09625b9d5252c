// Memory that the ranks of one host share, so that they reduce each other's buckets where they lie. No torch.
//
// Every rank has a segment (a memfd that nothing but its open descriptors keeps alive: no name, nothing left
// behind by a crash) of the same layout: a header, two counters per bucket, the buckets. The others map it
// through /proc/<pid>/fd/<fd>, which needs the same user and the same PID namespace.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace baguarun::engine {

// A file descriptor that is closed with its owner.
class Descriptor {
 public:
  explicit Descriptor(int value = -1) : value_(value) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : value_(other.value_) { other.value_ = -1; }
  Descriptor& operator=(Descriptor&& other) noexcept;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return value_; }

 private:
  int value_;
};

// One mapping of one rank's segment.
class SharedSegment {
 public:
  // A new segment of zeros. Throws std::system_error if there is no room for it.
  static std::shared_ptr<SharedSegment> create(size_t bytes);
  // The segment that process `pid` has as descriptor `fd`. Throws std::system_error if it may not be opened.
  static std::shared_ptr<SharedSegment> open(int64_t pid, int64_t fd, size_t bytes);

  SharedSegment(Descriptor descriptor, size_t bytes);
  ~SharedSegment();
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;

  std::byte* data() const { return data_; }
  int descriptor() const { return descriptor_.get(); }

 private:
  Descriptor descriptor_;
  size_t bytes_;
  std::byte* data_;
};

// What a rank has done with a bucket.
enum class Milestone : size_t { kArrived = 0, kReduced = 1 };

// The segments of all ranks, seen from one of them.
//
// Threads: post and wait from any, abort too.
class SharedArea {
 public:
  // `sizes`: bytes of each bucket, the same on all ranks.
  explicit SharedArea(const std::vector<size_t>& sizes);

  // The first half of setting up; throws std::system_error. The caller tells the others pid and descriptor.
  void create(size_t rank, size_t numRanks);
  // The second half, once all have created: maps the segment of rank `peer`.
  void open(size_t peer, int64_t pid, int64_t descriptor);

  int descriptor() const { return segments_[rank_]->descriptor(); }
  const std::shared_ptr<SharedSegment>& ownSegment() const { return segments_[rank_]; }
  std::byte* bucket(size_t rank, size_t index) const { return segments_[rank]->data() + offsets_[index]; }

  // Says that this rank has passed `milestone` of a bucket in `round`.
  void post(Milestone milestone, size_t index, uint32_t round);
  // Waits until rank `peer` has. Throws std::runtime_error that names the peer if it ended or gave up, or
  // after `timeout`.
  void wait(Milestone milestone, size_t index, uint32_t round, size_t peer,
            std::chrono::milliseconds timeout);
  // Makes all waits of this rank fail, and the others' waits for this rank.
  void abort();

 private:
  using Counter = std::atomic<uint32_t>;

  Counter& counter(size_t rank, Milestone milestone, size_t index) const;
  Counter& gaveUp(size_t rank) const;
  void throwIfHopeless(size_t peer) const;

  std::vector<size_t> offsets_;
  size_t bytes_ = 0;
  size_t rank_ = 0;
  std::vector<std::shared_ptr<SharedSegment>> segments_;
  // Readable once the process has ended.
  std::vector<Descriptor> processes_;
  std::vector<int64_t> pids_;
};

}  // namespace baguarun::engine
