// Two tensors that change places.
#pragma once

#include <ATen/core/Tensor.h>

namespace baguarun::engine {

// Gives each the numbers of the other, about as fast as one is copied to the other: what is kept meanwhile
// does not leave the first cache. On the CPU, dense, of one type and size, else throws std::invalid_argument;
// not overlapping.
//
// Threads: any, while nobody else uses the two.
void swapTensors(const at::Tensor& one, const at::Tensor& other);

}  // namespace baguarun::engine
