#include "net/scale.h"

#include <algorithm>
#include <array>

#include "net/error.h"
#include "net/reduce_loops.h"

namespace baguarun::net {

namespace {

void divideHalves(Dtype dtype, uint16_t* data, size_t count, float divisor) {
  std::array<float, 1024> tile;
  for (size_t i = 0; i < count; i += tile.size()) {
    const size_t n = std::min(tile.size(), count - i);
    widen(dtype, data + i, tile.data(), n);
    loops::divide(tile.data(), divisor, n);
    narrow(dtype, tile.data(), data + i, n);
  }
}

}  // namespace

void divide(Dtype dtype, void* data, size_t count, int divisor) {
  switch (dtype) {
    case Dtype::kFloat64:
      return loops::divide(static_cast<double*>(data), static_cast<double>(divisor), count);
    case Dtype::kFloat32:
      return loops::divide(static_cast<float*>(data), static_cast<float>(divisor), count);
    case Dtype::kFloat16:
    case Dtype::kBFloat16:
      return divideHalves(dtype, static_cast<uint16_t*>(data), count, static_cast<float>(divisor));
    case Dtype::kInt8:
    case Dtype::kInt16:
    case Dtype::kInt32:
    case Dtype::kInt64:
    case Dtype::kUint8:
    case Dtype::kBool:
      break;
  }
  NET_CHECK(false);
}

void widen(Dtype dtype, const void* from, float* to, size_t count) {
  NET_CHECK(dtype == Dtype::kFloat16 || dtype == Dtype::kBFloat16);
  const auto* halves = static_cast<const uint16_t*>(from);
  dtype == Dtype::kFloat16 ? loops::fromFloat16(halves, to, count) : loops::fromBFloat16(halves, to, count);
}

void narrow(Dtype dtype, const float* from, void* to, size_t count) {
  NET_CHECK(dtype == Dtype::kFloat16 || dtype == Dtype::kBFloat16);
  auto* halves = static_cast<uint16_t*>(to);
  dtype == Dtype::kFloat16 ? loops::toFloat16(from, halves, count) : loops::toBFloat16(from, halves, count);
}

}  // namespace baguarun::net
