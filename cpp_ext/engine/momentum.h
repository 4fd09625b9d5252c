// A bucket that travels as averaged momentum instead of a gradient (QAdam, 1-bit Adam).
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace baguarun::engine {

// What a parameter's gradient is mixed with.
struct Momentum {
  // The optimizer's tensor, read in each round; of the parameter's shape and type. Undefined: no mixing.
  at::Tensor average;
  double beta = 0;
};

// Turns gradients into momentum before their bucket is sent, where they lie.
//
// Threads: mix and restore are called by one thread at a time; fields change between rounds only.
struct MomentumStep {
  struct Piece {
    at::Tensor gradient;
    Momentum with;
  };

  at::Tensor flat;
  std::vector<Piece> pieces;
  // Gradients are so many times too large (GradScaler); the optimizer's averages are not, nor what is sent.
  double lossScale = 1;

  // gradient = beta * average + (1 - beta) * gradient / lossScale.
  void mix() const;
  // The result as GradScaler wants it, which will divide it.
  void restore() const;
};

// UsageFailure unless `momentum` fits the parameter, or is undefined.
void requireFit(const Momentum& momentum, const at::Tensor& parameter, const std::string& name);

}  // namespace baguarun::engine
