// A tensor's average over the ranks of a group, which can be used as far as it has come.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>

#include "c10d/backend.h"

namespace baguarun::backend {

// One all-reduce of the group. torch's replaces what it is given, so that who wants to keep that copies it
// first, and ends as a whole.
//
// Threads: one.
class Average {
 public:
  // Starts to write the average of the ranks' `from` to `into`, which may be the same; `from` is not to
  // change before the end. Both are kept. Throws as the group's collectives.
  Average(BaguanetBackend& group, const at::Tensor& from, const at::Tensor& into);

  // Whether it has ended, well or not. Does not block.
  bool isDone() const;
  // Returns when the first `count` elements are there; they are the caller's then, those of `from`, too.
  // Throws what the all-reduce failed with.
  void wait(int64_t count);

 private:
  class Progress;

  const int64_t size_;
  const std::shared_ptr<Progress> progress_;
  const Started started_;
};

}  // namespace baguarun::backend
