#include "engine/low_rank.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace baguarun::engine {

namespace {

// Below this share of its length, what is left of a vector after projection is rounding.
constexpr double kDependent = 1e-5;

double dot(const float* left, const float* right, size_t length) {
  double sum = 0;
  for (size_t i = 0; i < length; ++i) {
    sum += static_cast<double>(left[i]) * static_cast<double>(right[i]);
  }
  return sum;
}

}  // namespace

size_t LowRankBucket::firstElements() const {
  size_t sum = 0;
  for (const LowRankMatrix& matrix : matrices) {
    sum += matrix.rank > 0 ? matrix.rank * matrix.rows : matrix.numElements;
  }
  return sum;
}

size_t LowRankBucket::secondElements() const {
  size_t sum = 0;
  for (const LowRankMatrix& matrix : matrices) {
    sum += matrix.rank * matrix.columns;
  }
  return sum;
}

LowRankMatrix makeLowRankMatrix(const at::Tensor& parameter, size_t rank) {
  LowRankMatrix matrix;
  matrix.numElements = static_cast<size_t>(parameter.numel());
  if (parameter.dim() < 2 || matrix.numElements == 0) {
    return matrix;
  }
  int64_t outermost = 0;
  if (parameter.is_non_overlapping_and_dense()) {
    for (int64_t dim = 1; dim < parameter.dim(); ++dim) {
      if (parameter.stride(dim) > parameter.stride(outermost)) {
        outermost = dim;
      }
    }
  }
  matrix.rows = static_cast<size_t>(parameter.size(outermost));
  matrix.columns = matrix.numElements / matrix.rows;
  const size_t pairs = std::min({rank, matrix.rows, matrix.columns});
  if ((matrix.rows + matrix.columns) * pairs >= matrix.numElements) {
    return matrix;
  }
  matrix.rank = pairs;
  const auto options = parameter.options().dtype(at::kFloat).requires_grad(false);
  matrix.residual = at::zeros({static_cast<int64_t>(matrix.numElements)}, options);
  matrix.vectors = at::zeros({static_cast<int64_t>(pairs), static_cast<int64_t>(matrix.columns)}, options);
  return matrix;
}

void orthogonalise(float* vectors, size_t rank, size_t length) {
  for (size_t which = 0; which < rank; ++which) {
    float* vector = vectors + which * length;
    const double before = std::sqrt(dot(vector, vector, length));
    // Twice: the first pass leaves rounding errors that count if the vector nearly depends on the others.
    for (int pass = 0; pass < 2; ++pass) {
      for (size_t other = 0; other < which; ++other) {
        const float* base = vectors + other * length;
        const auto share = static_cast<float>(dot(vector, base, length));
        for (size_t i = 0; i < length; ++i) {
          vector[i] -= share * base[i];
        }
      }
    }
    const double after = std::sqrt(dot(vector, vector, length));
    // In fp64: the inverse of what is tiny is no fp32 number.
    const double scale = after > kDependent * before ? 1 / after : 0.0;
    for (size_t i = 0; i < length; ++i) {
      vector[i] = static_cast<float>(vector[i] * scale);
    }
  }
}

}  // namespace baguarun::engine
