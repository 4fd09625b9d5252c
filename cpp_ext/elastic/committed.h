// What a training step may change besides weights, kept as it was at the last commit.
//
// A commit comes after every step, when none of this is in a cache: each operation of torch that it calls
// costs tens of microseconds there, whatever it does. So this copies memory itself where it can.
#pragma once

#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace baguarun::elastic {

// Copies of tensors, on their own devices.
//
// Threads: one at a time.
class TensorCopies {
 public:
  // Remembers what is in `live`, in the memory of the last call's copies if these are the same tensors.
  void take(const std::vector<at::Tensor>& live);
  // Writes what was taken into `live`, as many tensors. They may be others: a module may have put another one
  // in a buffer's place. Throws std::invalid_argument.
  void putBack(const std::vector<at::Tensor>& live) const;

 private:
  struct Kept {
    at::Tensor live;
    at::Tensor copy;
  };

  bool areOf(const std::vector<at::Tensor>& live) const;

  std::vector<Kept> kept_;
};

// What is in memory of somebody else, who must live as long.
//
// Threads: one at a time.
class MemoryCopy {
 public:
  MemoryCopy(uintptr_t address, size_t bytes);
  // Whether anything has changed since the last call; true the first time.
  bool take();
  // As it was when `take` was called last; empty before.
  const std::string& bytes() const noexcept { return bytes_; }

 private:
  const char* live_;
  size_t size_;
  std::string bytes_;
};

// Where torch's generator of random numbers for the CPU stands.
//
// Threads: any, one at a time.
class CpuRandomState {
 public:
  void take();
  // Nothing before the first `take`.
  void putBack() const;

 private:
  bool isTaken_ = false;
  at::mt19937 engine_;
  std::optional<float> nextFloat_;
  std::optional<double> nextDouble_;
};

}  // namespace baguarun::elastic
