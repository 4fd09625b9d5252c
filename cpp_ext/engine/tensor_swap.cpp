#include "engine/tensor_swap.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <stdexcept>

namespace baguarun::engine {

void swapTensors(const at::Tensor& one, const at::Tensor& other) {
  if (!one.is_cpu() || !other.is_cpu() || !one.is_contiguous() || !other.is_contiguous() ||
      one.scalar_type() != other.scalar_type() || one.numel() != other.numel()) {
    throw std::invalid_argument(
        "these tensors cannot change places: want dense ones on the CPU, of one type and size");
  }
  auto* mine = static_cast<std::byte*>(one.data_ptr());
  auto* its = static_cast<std::byte*>(other.data_ptr());
  // Stays in the first cache.
  alignas(64) std::array<std::byte, 4096> kept;
  for (size_t left = one.nbytes(); left > 0;) {
    const size_t part = std::min(left, kept.size());
    std::memcpy(kept.data(), mine, part);
    std::memcpy(mine, its, part);
    std::memcpy(its, kept.data(), part);
    mine += part;
    its += part;
    left -= part;
  }
}

}  // namespace baguarun::engine
