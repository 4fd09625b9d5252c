// A bucket: one flat buffer that holds the gradients of several parameters, and what is done with it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "engine/kept_residuals.h"
#include "engine/low_rank.h"
#include "engine/momentum.h"
#include "engine/rails.h"

namespace baguarun::engine {

enum class OperationKind {
  // The backend's own all-reduce, in the gradient's type.
  kAllReduce,
  // Every rank receives its chunk from all others, reduces it in rank order in fp32 (with error feedback, its
  // own part first), and sends the result to all.
  kScatterReduceGather,
  // Matrices as the products of a few vectors, with error feedback (low_rank_exchange.h).
  kPowerSgd,
};

// What is done with a bucket. An algorithm in Python chooses one per dtype.
struct OperationSpec {
  OperationKind kind = OperationKind::kAllReduce;
  // What travels; read by kScatterReduceGather only.
  codec::Wire wire = codec::Wire::f32;
  // Divide the sum by the number of ranks.
  bool average = true;
  // Wire::topk: how many of each 2048 numbers travel.
  uint32_t keep = codec::Format(codec::Wire::topk).keep;
  // What an encoding loses is added to the next round's numbers, on the sender's and on the reducer's side.
  bool errorFeedback = false;
  // kPowerSgd: pairs of vectors per matrix.
  size_t matrixRank = 0;
  // Exchange by rail; null: among all ranks at once. Not read by kAllReduce.
  std::shared_ptr<const Rails> rails = nullptr;

  codec::Format format() const { return {wire, keep, 0}; }
};

// Buckets in shared memory begin at multiples of this.
inline constexpr size_t kBucketAlignBytes = 64;

// `bytes` rounded up to that.
constexpr size_t alignedBytes(size_t bytes) {
  return (bytes + kBucketAlignBytes - 1) / kBucketAlignBytes * kBucketAlignBytes;
}

struct Bucket {
  size_t index = 0;
  // Names of the first and last parameter and the size, for messages.
  std::string label;
  size_t bytes = 0;
  // One-dimensional; every gradient is a view of it. Parameters are packed without gaps.
  at::Tensor flat;
  // `flat` lies in memory that the ranks share, on every rank.
  bool shared = false;
  OperationSpec operation;
  // With error feedback, fp32: what this rank still owes, for every number, in the units of gradients: in its
  // own chunk what the result lacks, elsewhere what its contributions do. Else undefined.
  at::Tensor residual;
  // The residuals of its parameters, of the above and of low-rank compression, in the parameters' order; null
  // where there are none.
  std::shared_ptr<KeptResiduals> kept;
  // What is done to the result of momentum; null: no momentum travels.
  std::shared_ptr<MomentumResult> momentum;
  // kPowerSgd only.
  LowRankBucket lowRank;
  std::vector<size_t> parameters;
  // Gradients still missing in this round.
  size_t pending = 0;
};

// For the average of `vectors`, an fp32 buffer of its own, that goes the way of `bucket`: by rail or among
// all. `index` tells its messages from others'.
Bucket vectorsOf(const Bucket& bucket, const at::Tensor& vectors, size_t index);

// True if c10d bytes of this dtype and wire are the gradient itself: nothing to encode.
bool isPlain(codec::Wire wire, at::ScalarType dtype);

// UsageFailure if error feedback is asked for where nothing is lost.
void requireFeedback(const OperationSpec& operation, at::ScalarType dtype);

// The codec's word for a dtype; UsageFailure for a dtype that is not coded (float64, integers).
codec::DType codecType(at::ScalarType dtype);

// The wire that carries numbers of `dtype` as they are.
codec::Wire plainWire(codec::DType dtype);

// The place of `parameter`'s gradient in `flat` at `offset`, with the parameter's strides if it is dense.
at::Tensor gradientView(const at::Tensor& flat, const at::Tensor& parameter, size_t offset);

// True if `gradient` is the numbers at `view`, as they lie there.
bool isAt(const at::Tensor& gradient, const at::Tensor& view);

}  // namespace baguarun::engine
