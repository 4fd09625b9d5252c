// Gradients that travel as averaged momentum (QAdam, 1-bit Adam).
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace baguarun::engine {

// What a parameter's gradient is mixed with.
struct Momentum {
  // The optimizer's tensor, read in each round; of the parameter's shape and type. Undefined: no mixing.
  at::Tensor average;
  double beta = 0;
};

// into = beta * average + (1 - beta) * gradient / lossScale, where `into` may be the gradient itself.
// Gradients are `lossScale` times too large (GradScaler); the optimizer's averages are not, nor what is sent.
void mix(const at::Tensor& gradient, const Momentum& with, double lossScale, const at::Tensor& into);

// Gives a bucket's result the scale that GradScaler will divide it by.
//
// Threads: `restore` is called by one thread at a time; fields change between rounds only.
struct ScaledResult {
  at::Tensor flat;
  double lossScale = 1;

  void restore() const;
};

// UsageFailure unless `momentum` fits the parameter, or is undefined.
void requireFit(const Momentum& momentum, const at::Tensor& parameter, const std::string& name);

}  // namespace baguarun::engine
