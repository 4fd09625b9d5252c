// What happens to one bucket on an accelerator.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "engine/bucket.h"
#include "engine/schedule.h"

namespace baguarun::engine {

// Everything that happens to one bucket, enqueued on the current stream; c10d's waits are waits of that
// stream.
class StreamOperation {
 public:
  virtual ~StreamOperation() = default;
  // `stream` is the current one.
  virtual void enqueue(c10::Stream stream, uint32_t round) = 0;
  // Bytes sent by this rank in one round.
  virtual uint64_t bytesPerRound() const = 0;
};

std::unique_ptr<StreamOperation> makeStreamOperation(const Group& group, const Bucket& bucket);

// The backend's own all-reduce of `tensor`, in place.
std::unique_ptr<StreamOperation> makeStreamReduce(const Group& group, const at::Tensor& tensor,
                                                  c10d::ReduceOp::RedOpType operation);

}  // namespace baguarun::engine
