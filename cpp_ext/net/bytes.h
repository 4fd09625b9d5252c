// Little-endian numbers in byte buffers.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace baguarun::net {

static_assert(std::endian::native == std::endian::little, "the wire format is written by memcpy");

template <typename Number>
void store(uint8_t* at, Number value) {
  std::memcpy(at, &value, sizeof(value));
}

template <typename Number>
Number load(const uint8_t* at) {
  Number value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

}  // namespace baguarun::net
