// One all-reduce of a few tensors, on the way while the caller does something else: what buckets get, without
// an engine.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/bucket.h"
#include "engine/schedule.h"

namespace baguarun::engine {

// Threads: those of a schedule; all calls by one.
class TensorReduction {
 public:
  // Begins to replace `tensors`, contiguous and of one device, by what `operation` makes of them. Collective.
  // `round` tells the messages of reductions apart that are under way at once. Throws UsageFailure for what
  // cannot be sent so.
  TensorReduction(const Group& group, const std::vector<at::Tensor>& tensors, const OperationSpec& operation,
                  uint32_t round);

  // Returns when the tensors hold the result (on an accelerator: when the current stream will). Throws
  // CommunicationFailure.
  void wait() { schedule_->finish(); }

  // Bytes that this rank sends.
  uint64_t bytes() const { return schedule_->bytesPerRound(); }

 private:
  std::unique_ptr<Schedule> schedule_;
};

}  // namespace baguarun::engine
