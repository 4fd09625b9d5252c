// How a ShmGroup's operations go through their steps. Internal to the group's sources.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

#include "net/error.h"
#include "net/shm_layout.h"

namespace baguarun::net {

namespace shm {

inline void copyBytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0 && to != from) {
    std::memcpy(to, from, bytes);
  }
}

inline size_t stepsFor(size_t bytes, size_t chunk) {
  return std::max<size_t>(1, (bytes + chunk - 1) / chunk);
}

// What step `k` moves of `bytes` in chunks.
struct Piece {
  size_t offset;
  size_t bytes;
  Piece(size_t k, size_t chunk, size_t total)
      : offset(std::min(k * chunk, total)), bytes(std::min(chunk, total - offset)) {}
};

inline const std::byte* bytesOf(const void* data) { return static_cast<const std::byte*>(data); }
inline std::byte* bytesOf(void* data) { return static_cast<std::byte*>(data); }

// Checked here so that the hot operations may multiply.
inline size_t totalBytes(size_t count, Dtype dtype) {
  const size_t each = elementBytes(dtype);
  if (count > (size_t{1} << 62) / each) {
    throw Error(Fault::kUsage, "", "count " + std::to_string(count) + ": more than memory can hold");
  }
  return count * each;
}

}  // namespace shm

template <class CopyIn, class CopyOut>
void ShmGroup::exchange(const Header& call, size_t steps, CopyIn copyIn, CopyOut copyOut) {
  const uint64_t first = beginOperation();
  header(first, rank_) = call;
  for (size_t k = 0; k <= steps; ++k) {
    if (k < steps) {
      copyIn(k, shm::bytesOf(slot(first + k, rank_)));
      postReady(first + k);
    }
    if (k > 0) {
      const uint64_t step = first + k - 1;
      waitReady(step);
      if (k == 1) {
        verify(step);
      }
      copyOut(k - 1, step);
    }
  }
  step_ += steps;
  ++sequence_;
}

}  // namespace baguarun::net
