// Low-rank compression of gradients on an accelerator. Included by stream_operation.cpp only.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "engine/low_rank.h"
#include "engine/stream_operation.h"

namespace baguarun::engine {

// PowerSGD as in low_rank_exchange.h, in operations of torch's that are enqueued: whether numbers are finite,
// too, is decided on the device.
//
// All ranks get the same bits if their GPUs are of one kind: what follows the exchanges of P and Q is left to
// torch's kernels, which may sum up in another order on another kind. Autocast leaves them alone; TF32, where
// it is allowed for matrix products, is used for these, too.
class StreamLowRank final : public StreamOperation {
 public:
  // As LowRankExchange::Exchanges.
  struct Exchanges {
    std::unique_ptr<StreamOperation> whole;
    std::unique_ptr<StreamOperation> first;
    std::unique_ptr<StreamOperation> second;
  };

  // `firstBuffer` and `secondBuffer`: float32, of what LowRankBucket says. `second` is null if there is no
  // matrix to compress.
  StreamLowRank(const at::Tensor& flat, LowRankBucket bucket, const at::Tensor& firstBuffer,
                const at::Tensor& secondBuffer, Exchanges exchanges)
      : firstRound_(std::move(bucket.firstRound)), exchanges_(std::move(exchanges)) {
    int64_t begin = 0;
    int64_t first = 0;
    int64_t second = 0;
    for (LowRankMatrix& matrix : bucket.matrices) {
      const auto count = static_cast<int64_t>(matrix.numElements);
      const at::Tensor gradient = flat.narrow(0, begin, count);
      begin += count;
      if (matrix.rank == 0) {
        whole_.push_back({gradient, firstBuffer.narrow(0, first, count)});
        first += count;
        continue;
      }
      const auto rank = static_cast<int64_t>(matrix.rank);
      const auto rows = static_cast<int64_t>(matrix.rows);
      const auto columns = static_cast<int64_t>(matrix.columns);
      compressed_.push_back({gradient.view({rows, columns}),
                             matrix.residual.view({rows, columns}),
                             matrix.vectors,
                             firstBuffer.narrow(0, first, rank * rows).view({rank, rows}),
                             secondBuffer.narrow(0, second, rank * columns).view({rank, columns}),
                             {}});
      first += rank * rows;
      second += rank * columns;
    }
  }

  void enqueue(c10::Stream stream, uint32_t round) override {
    compresses_ = round >= firstRound_->load();
    if (!compresses_) {
      exchanges_.whole->enqueue(stream, round);
      return;
    }
    const at::NoGradGuard noGrad;
    // A backward inside of torch.autocast would multiply in 16 bits, where Q may overflow.
    const c10::impl::ExcludeDispatchKeyGuard noAutocast(c10::autocast_dispatch_keyset);
    for (const Whole& each : whole_) {
      each.sent.copy_(each.gradient);
    }
    for (Compressed& each : compressed_) {
      multiplyByVectors(each);
    }
    exchanges_.first->enqueue(stream, round);
    if (exchanges_.second) {
      for (Compressed& each : compressed_) {
        multiplyByFirst(each);
      }
      exchanges_.second->enqueue(stream, round);
    }
    for (const Whole& each : whole_) {
      each.gradient.copy_(each.sent);
    }
    for (Compressed& each : compressed_) {
      decompress(each);
    }
  }

  uint64_t bytesPerRound() const override {
    if (!compresses_) {
      return exchanges_.whole->bytesPerRound();
    }
    return exchanges_.first->bytesPerRound() + (exchanges_.second ? exchanges_.second->bytesPerRound() : 0);
  }

 private:
  struct Whole {
    at::Tensor gradient;
    at::Tensor sent;
  };

  // Views. Vectors lie one behind the other, so P and Q are transposed.
  struct Compressed {
    at::Tensor gradient;
    at::Tensor residual;
    at::Tensor vectors;
    at::Tensor p;
    at::Tensor q;
    // Of the round under way: the gradient is in the residual.
    at::Tensor added;
  };

  // As on the CPU: below 2^96, so that no product becomes infinite. NaN is not.
  static at::Tensor isFinite(const at::Tensor& numbers) {
    return at::linalg_vector_norm(numbers, std::numeric_limits<double>::infinity()).lt(0x1p96);
  }

  static void spoilUnless(const at::Tensor& condition, at::Tensor& numbers) {
    numbers.masked_fill_(condition.logical_not(), std::numeric_limits<double>::quiet_NaN());
  }

  // The residual becomes the matrix to send, unless that is not finite.
  static void multiplyByVectors(Compressed& each) {
    const at::Tensor sum = each.residual + each.gradient.to(at::kFloat);
    each.added = isFinite(sum);
    each.residual.copy_(at::where(each.added, sum, each.residual));
    at::mm_out(each.p, each.vectors, each.residual.t());
    spoilUnless(each.added, each.p);
  }

  // P has come from all.
  static void multiplyByFirst(Compressed& each) {
    const at::Tensor finite = isFinite(each.p);
    orthogonalise(each.p);
    at::mm_out(each.q, each.p, each.residual);
    spoilUnless(finite, each.q);
  }

  // As the one of low_rank.h.
  static void orthogonalise(at::Tensor& vectors) {
    constexpr double kDependent = 1e-5;
    const at::Tensor wide = vectors.to(at::kDouble);
    for (int64_t which = 0; which < wide.size(0); ++which) {
      at::Tensor vector = wide.select(0, which);
      const at::Tensor before = at::linalg_vector_norm(vector);
      for (int pass = 0; which > 0 && pass < 2; ++pass) {
        const at::Tensor bases = wide.narrow(0, 0, which);
        vector.sub_(at::mv(bases.t(), at::mv(bases, vector)));
      }
      const at::Tensor after = at::linalg_vector_norm(vector);
      vector.mul_(at::where(after.gt(before * kDependent), after.reciprocal(), at::zeros_like(after)));
    }
    vectors.copy_(wide);
  }

  // Q has come from all: the gradient becomes P Q', the residual what that lacks; the next round begins with
  // this one's Q, but for vectors of zeros. If some rank's numbers are not finite, the gradient is NaN and
  // the rest stays what it was (the residual to rounding).
  static void decompress(Compressed& each) {
    const at::Tensor finite = isFinite(each.q);
    const at::Tensor product = at::mm(each.p.t(), each.q);
    const at::Tensor kept =
        at::where(each.added, each.residual - each.gradient.to(at::kFloat), each.residual);
    each.residual.copy_(at::where(finite, each.residual - product, kept));
    each.gradient.copy_(product);
    spoilUnless(finite, each.gradient);
    const at::Tensor lives = each.q.ne(0).any(1, /*keepdim=*/true).logical_and(finite);
    each.vectors.copy_(at::where(lives, each.q, each.vectors));
    each.added.reset();
  }

  const std::shared_ptr<const std::atomic<uint32_t>> firstRound_;
  const Exchanges exchanges_;
  std::vector<Whole> whole_;
  std::vector<Compressed> compressed_;
  bool compresses_ = false;
};

}  // namespace baguarun::engine
