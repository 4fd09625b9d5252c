// What reductions over several levels need beside reduce(): division at the end, and 16-bit floats as fp32.
#pragma once

#include <cstddef>

#include "net/reduce.h"

namespace baguarun::net {

// Divides `count` floating-point numbers in place; 16-bit ones are rounded to nearest even.
void divide(Dtype dtype, void* data, size_t count, int divisor);

// For Dtype::kFloat16 and kBFloat16. narrow() rounds to nearest even.
void widen(Dtype dtype, const void* from, float* to, size_t count);
void narrow(Dtype dtype, const float* from, void* to, size_t count);

}  // namespace baguarun::net
