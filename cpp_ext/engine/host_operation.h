// What happens to one CPU bucket, cut into stages so that stages of different buckets overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "engine/bucket.h"
#include "engine/buffer_pool.h"
#include "engine/schedule.h"

namespace baguarun::engine {

// Threads: begin, reduce, the stages between and complete are called in this order, each by its own thread,
// never two at a time.
class HostOperation {
 public:
  virtual ~HostOperation() = default;

  // Hands this rank's contribution to the network and returns.
  virtual void begin(uint32_t round) = 0;
  // True if begin() costs so little that it runs where the bucket became full, on the thread of autograd.
  virtual bool beginsAtOnce() const { return false; }
  // Waits for the others' contributions to this rank's chunk, reduces, sends the result.
  virtual void reduce() = 0;
  // For an operation whose ranks answer each other more than once: how many stages follow reduce(), and one
  // of them. A stage waits once, so that however long the way is buckets wait at the same time.
  virtual size_t numStagesBetween() const { return 0; }
  virtual void between(size_t /*stage*/) {}
  // Waits for all results; the bucket is final when it returns.
  virtual void complete() = 0;
  // After complete(): true if no number that this rank has in the bucket is infinite or NaN, false if one may
  // be.
  virtual bool isKnownFinite() const { return false; }
  // Ends the waits of the other threads with an error. May be called at any time.
  virtual void abort() = 0;

  // Bytes sent by this rank in one round.
  virtual uint64_t bytesPerRound() const = 0;
};

// `buffers` are those of one schedule; every operation of it is made before the first one begins. `queued`,
// the same for all of them and on all ranks: the group's own collectives start where the operation begins,
// not in its reduce().
std::unique_ptr<HostOperation> makeHostOperation(const Group& group, const Bucket& bucket,
                                                 const Buffers& buffers, bool queued);

// MAX all-reduce of `flags` in place.
std::unique_ptr<HostOperation> makeHostFlags(const Group& group, const at::Tensor& flags);

}  // namespace baguarun::engine
