// An optimizer's step with momentum that has come in place of a gradient, on the CPU (QAdam).
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace baguarun::engine {

// One parameter's: tensors of one shape and type. None of them shares memory with another.
struct MomentumUpdate {
  at::Tensor parameter;
  at::Tensor momentum;
  // The optimizer's own copy, which the next gradient is mixed with.
  at::Tensor average;
  at::Tensor denominator;
  // Minus the learning rate, corrected.
  double size = 0;
  // How much of the parameter is momentum as well (L2 regularisation).
  double decay = 0;
};

// average = momentum + decay * parameter; parameter += size * average / denominator, with the roundings of
// addcdiv. Returns whether all of the average is finite; if not, it is in what was written.
//
// fp32 goes through memory once: 20 bytes per number, of which the average's go past the caches, since nobody
// reads them before the next backward. What else there is takes torch's ways.
//
// Threads: any, one at a time for one parameter; runs on torch's.
bool update(const std::vector<MomentumUpdate>& updates);

// Whether no number is infinite or NaN, of tensors of floating point on the CPU.
bool allFinite(const std::vector<at::Tensor>& tensors);

}  // namespace baguarun::engine
