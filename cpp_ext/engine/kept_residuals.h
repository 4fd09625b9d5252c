// What error feedback owed at the last commit, for steps that are abandoned and done again.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

namespace baguarun::engine {

// The residuals of one bucket. A copy is made just before they are first written after a commit, by the
// thread or on the stream that writes them, and costs as much memory as they do.
//
// Threads: beforeWrite is called by what runs the bucket's operation; all else between rounds.
class KeptResiduals {
 public:
  explicit KeptResiduals(bool enabled) : enabled_(enabled) {}

  // Undefined for a parameter without one. `committed`: a copy that the residual had before it was placed
  // here; undefined for none.
  void add(const at::Tensor& residual, at::Tensor committed);
  void enable(bool enabled) { enabled_ = enabled; }

  void beforeWrite();
  void commit() { taken_ = false; }
  void rollBack();

  // What the residual that was added as number `index` owed; undefined if nothing is kept.
  at::Tensor committed(size_t index) const;

 private:
  struct Entry {
    at::Tensor residual;
    at::Tensor copy;
  };

  bool enabled_;
  // The copies are those of the last commit; else the residuals themselves are.
  bool taken_ = false;
  std::vector<Entry> entries_;
};

}  // namespace baguarun::engine
