// What low-rank compression keeps of each parameter between rounds.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace baguarun::engine {

// A gradient as it lies in memory: `rows` rows of `columns` numbers. Which dimension the rows are does not
// matter: the transposed matrix has the same rank.
struct LowRankMatrix {
  size_t numElements = 0;
  size_t rows = 0;
  size_t columns = 0;
  // How many pairs of vectors travel in its place; 0: it travels as it is.
  size_t rank = 0;
  // If rank > 0, float32, where the parameter is: what is still owed, `numElements`; and Q of the last round,
  // [rank, columns].
  at::Tensor residual;
  at::Tensor vectors;
};

// The matrices of one bucket, in its order, and the first round in which they are compressed.
struct LowRankBucket {
  std::vector<LowRankMatrix> matrices;
  std::shared_ptr<const std::atomic<uint32_t>> firstRound;

  // How many numbers travel first: all P, and the gradients that are no matrices; and then: all Q.
  size_t firstElements() const;
  size_t secondElements() const;
};

// The gradient of `parameter` with at most `rank` pairs of vectors; as it is where these would be no smaller.
LowRankMatrix makeLowRankMatrix(const at::Tensor& parameter, size_t rank);

// Makes the `rank` vectors of `length` at `vectors`, one behind the other, orthogonal and of length one, by
// Gram-Schmidt in a fixed order with sums in float64: the same input gives the same bits on every CPU, which
// a QR of LAPACK does not promise. One that depends on those before it becomes zero.
void orthogonalise(float* vectors, size_t rank, size_t length);

}  // namespace baguarun::engine
