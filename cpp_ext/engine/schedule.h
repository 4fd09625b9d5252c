// When and where the operations of one plan run.
#pragma once

#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "engine/bucket.h"

namespace baguarun::engine {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Groups of the same ranks in the same order, at least one: pieces take turns at them. Between hosts that are
// far apart the window of a connection is the limit, and a group of Gloo has one between two ranks.
using Lanes = std::vector<Group>;

// Runs one operation per bucket and one that agrees on the used parameters.
//
// Threads: all calls come from autograd or the caller of the engine, one at a time.
class Schedule {
 public:
  virtual ~Schedule() = default;

  // A gradient of bucket `index` has been written by the caller's current stream.
  virtual void stored(size_t index) = 0;

  // Starts the operation of bucket `index`. Every rank launches the same indices in the same order in each
  // `round`.
  virtual void launch(size_t index, uint32_t round) = 0;

  // Starts a MAX all-reduce of `flags` (int32, on the group's device), after all buckets launched so far.
  virtual void launchFlags(const at::Tensor& flags, uint32_t round) = 0;

  // Makes the caller wait for all that was launched: the calling thread on CPU, its current stream on an
  // accelerator. Throws CommunicationFailure, now and on every later call, if anything failed.
  virtual void finish() = 0;

  // After finish(): the calling thread waits, on an accelerator too. Throws as finish().
  virtual void synchronize() = 0;

  // Bytes that one launch of every bucket sends from this rank.
  virtual uint64_t bytesPerRound() const = 0;
};

// For CPU buckets: stages on communication threads.
std::unique_ptr<Schedule> makeHostSchedule(Lanes lanes, const std::vector<Bucket>& buckets);

// For buckets of an accelerator: one communication stream, events, no host wait.
std::unique_ptr<Schedule> makeStreamSchedule(const Group& group, const std::vector<Bucket>& buckets);

}  // namespace baguarun::engine
