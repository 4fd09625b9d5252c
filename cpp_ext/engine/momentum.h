// Gradients that travel as averaged momentum (QAdam, 1-bit Adam).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
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

// What a bucket of momentum has become.
//
// Threads: in each round `begin`, where anybody is to know more than `finish` finds, then `finish`; all else
// between rounds.
struct MomentumResult {
  at::Tensor flat;
  double lossScale = 1;

  // Nothing of the result has come yet, and nobody has a reason to write to the bucket before all has.
  void begin() { begun_ = flat._version(); }
  // Multiplies the result by the scale that GradScaler will divide it by. On the CPU without one, looks for
  // numbers that are not finite, while other buckets are still under way and no optimizer waits yet; unless
  // whoever wrote them knows.
  void finish(bool areKnownFinite = false);
  // True: no number is infinite or NaN, and nobody has written to the result since, as far as torch's version
  // counter tells. False: one is, or nobody knows.
  bool isKnownFinite() const;

 private:
  // Goes through memory once.
  bool lookAtAll() const;

  // Of torch's version counter.
  uint32_t begun_ = 0;
  uint32_t version_ = 0;
  bool wasFinite_ = false;
};

// UsageFailure unless `momentum` fits the parameter, or is undefined.
void requireFit(const Momentum& momentum, const at::Tensor& parameter, const std::string& name);

}  // namespace baguarun::engine
