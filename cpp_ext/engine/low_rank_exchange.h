// Low-rank compression of gradients: PowerSGD. Included by host_operation.cpp only.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "codec/codec.h"
#include "engine/errors.h"
#include "engine/host_operation.h"
#include "engine/low_rank.h"

namespace baguarun::engine {

// PowerSGD (Vogels et al., arXiv 1905.13727, algorithms 1 and 2) with error feedback and warm start. Per
// matrix M, with the residual already in it: P = M Q, averaged and made orthogonal; Q = M'P, averaged; the
// gradient becomes P Q', the residual M - P Q'. Two exchanges one after the other, of messages, so that
// buckets overlap and cannot cross; gradients that are no matrices, or too small to gain, travel with the
// first.
//
// All ranks get the same bits, whatever their CPUs: what they all compute is written out below, in one order;
// only P and Q before their exchanges come from a library. If a number of a matrix is not finite on some
// rank, its gradient is NaN on all, and residual and Q stay what they were (the residual to rounding).
class LowRankExchange final : public HostOperation {
 public:
  // `whole` averages the bucket in full, before the first compressed round; `first` and `second` average
  // `vectors` of the sizes below.
  struct Exchanges {
    std::unique_ptr<HostOperation> whole;
    std::unique_ptr<HostOperation> first;
    std::unique_ptr<HostOperation> second;
  };

  // `second` is null if there is no matrix to compress.
  LowRankExchange(const at::Tensor& flat, LowRankBucket bucket, at::Tensor firstBuffer,
                  at::Tensor secondBuffer, Exchanges exchanges)
      : bucket_(std::move(bucket)),
        dtype_(codecType(flat.scalar_type())),
        elementSize_(flat.element_size()),
        flat_(flat),
        firstBuffer_(std::move(firstBuffer)),
        secondBuffer_(std::move(secondBuffer)),
        exchanges_(std::move(exchanges)),
        added_(bucket_.matrices.size()) {
    size_t most = 0;
    for (const LowRankMatrix& matrix : bucket_.matrices) {
      most = std::max(most, matrix.rank > 0 ? matrix.numElements : 0);
    }
    scratch_.resize(most);
  }

  void begin(uint32_t round) override {
    round_ = round;
    compresses_ = round >= bucket_.firstRound->load();
    if (!compresses_) {
      exchanges_.whole->begin(round);
      return;
    }
    const at::NoGradGuard noGrad;
    forAll([this](size_t index, const LowRankMatrix& matrix, const Place& place) {
      if (matrix.rank == 0) {
        load(place.flat, matrix.numElements, place.first);
        return;
      }
      added_[index] = addGradient(matrix, place.flat);
      at::Tensor p = firstOf(matrix, place);
      if (added_[index]) {
        at::mm_out(p, matrix.vectors, matrixOf(matrix).t());
      } else {
        p.fill_(std::numeric_limits<float>::quiet_NaN());
      }
    });
    exchanges_.first->begin(round);
  }

  void reduce() override {
    if (!compresses_) {
      exchanges_.whole->reduce();
      return;
    }
    exchanges_.first->reduce();
  }

  size_t numStagesBetween() const override { return exchanges_.second ? 2 : 0; }

  void between(size_t stage) override {
    if (!compresses_) {
      return;
    }
    if (stage == 0) {
      beginSecond();
    } else {
      exchanges_.second->reduce();
    }
  }

  void complete() override {
    if (!compresses_) {
      exchanges_.whole->complete();
      return;
    }
    (exchanges_.second ? exchanges_.second : exchanges_.first)->complete();
    forAll([this](size_t index, const LowRankMatrix& matrix, const Place& place) {
      if (matrix.rank == 0) {
        store(place.first, matrix.numElements, place.flat);
      } else if (isFinite(place.second, matrix.rank * matrix.columns)) {
        multiply(matrix, place);
        warmStart(matrix, place.second);
      } else {
        giveUp(index, matrix, place.flat);
      }
    });
  }

  void abort() override {
    for (const auto* exchange : {&exchanges_.whole, &exchanges_.first, &exchanges_.second}) {
      if (*exchange) {
        (*exchange)->abort();
      }
    }
  }

  uint64_t bytesPerRound() const override {
    if (!compresses_) {
      return exchanges_.whole->bytesPerRound();
    }
    return exchanges_.first->bytesPerRound() + (exchanges_.second ? exchanges_.second->bytesPerRound() : 0);
  }

 private:
  static constexpr codec::Exec kHost{codec::Device::cpu, nullptr};

  // Where a gradient lies in the bucket, and its vectors in the two buffers.
  struct Place {
    void* flat;
    float* first;
    float* second;
  };

  // P has come from all.
  void beginSecond() {
    exchanges_.first->complete();
    const at::NoGradGuard noGrad;
    forAll([this](size_t /*index*/, const LowRankMatrix& matrix, const Place& place) {
      if (matrix.rank > 0) {
        at::Tensor q = secondOf(matrix, place);
        if (isFinite(place.first, matrix.rank * matrix.rows)) {
          orthogonalise(place.first, matrix.rank, matrix.rows);
          at::mm_out(q, firstOf(matrix, place), matrixOf(matrix));
        } else {
          q.fill_(std::numeric_limits<float>::quiet_NaN());
        }
      }
    });
    exchanges_.second->begin(round_);
  }

  template <typename Run>
  void forAll(const Run& run) {
    auto* flat = static_cast<char*>(flat_.data_ptr());
    auto* first = firstBuffer_.data_ptr<float>();
    auto* second = secondBuffer_.data_ptr<float>();
    for (size_t index = 0; index < bucket_.matrices.size(); ++index) {
      const LowRankMatrix& matrix = bucket_.matrices[index];
      run(index, matrix, Place{flat, first, second});
      flat += matrix.numElements * elementSize_;
      first += matrix.rank > 0 ? matrix.rank * matrix.rows : matrix.numElements;
      second += matrix.rank * matrix.columns;
    }
  }

  static at::Tensor view(float* numbers, size_t rows, size_t columns) {
    return at::from_blob(numbers, {static_cast<int64_t>(rows), static_cast<int64_t>(columns)}, at::kFloat);
  }

  // P and Q are kept transposed, so that vectors lie one behind the other.
  static at::Tensor firstOf(const LowRankMatrix& matrix, const Place& place) {
    return view(place.first, matrix.rank, matrix.rows);
  }
  static at::Tensor secondOf(const LowRankMatrix& matrix, const Place& place) {
    return view(place.second, matrix.rank, matrix.columns);
  }
  static at::Tensor matrixOf(const LowRankMatrix& matrix) {
    return view(matrix.residual.data_ptr<float>(), matrix.rows, matrix.columns);
  }

  // Whether all numbers are below 2^96: neither NaN nor Inf, nor so large that a product might become one.
  static bool isFinite(const float* numbers, size_t count) {
    uint32_t most = 0;
    for (size_t i = 0; i < count; ++i) {
      most = std::max(most, std::bit_cast<uint32_t>(numbers[i]) & 0x7fffffffU);
    }
    return most < std::bit_cast<uint32_t>(0x1p96F);
  }

  // Numbers of the bucket as fp32, and back.
  void load(const void* from, size_t count, float* to) const {
    codec::decode(kHost, plainWire(dtype_), codec::DType::f32, from, count, to);
  }
  void store(const float* from, size_t count, void* to) const {
    codec::encode(kHost, plainWire(dtype_), codec::DType::f32, from, count, to);
  }

  // The residual becomes the matrix to send. False, and no change, if that is not finite.
  bool addGradient(const LowRankMatrix& matrix, const void* gradient) {
    load(gradient, matrix.numElements, scratch_.data());
    auto* residual = matrix.residual.data_ptr<float>();
    for (size_t i = 0; i < matrix.numElements; ++i) {
      scratch_[i] += residual[i];
    }
    if (!isFinite(scratch_.data(), matrix.numElements)) {
      return false;
    }
    std::copy_n(scratch_.data(), matrix.numElements, residual);
    return true;
  }

  // The gradient becomes P Q', the residual what that lacks.
  void multiply(const LowRankMatrix& matrix, const Place& place) const {
    std::vector<float> row(matrix.columns);
    auto* residual = matrix.residual.data_ptr<float>();
    auto* gradient = static_cast<char*>(place.flat);
    for (size_t i = 0; i < matrix.rows; ++i) {
      std::fill(row.begin(), row.end(), 0.0F);
      for (size_t pair = 0; pair < matrix.rank; ++pair) {
        const float factor = place.first[pair * matrix.rows + i];
        const float* vector = place.second + pair * matrix.columns;
        for (size_t j = 0; j < matrix.columns; ++j) {
          row[j] += factor * vector[j];
        }
      }
      for (size_t j = 0; j < matrix.columns; ++j) {
        residual[i * matrix.columns + j] -= row[j];
      }
      store(row.data(), matrix.columns, gradient + i * matrix.columns * elementSize_);
    }
  }

  // The next round begins with this one's Q, but a vector that came out as zero would stay zero for ever.
  static void warmStart(const LowRankMatrix& matrix, const float* averaged) {
    auto* kept = matrix.vectors.data_ptr<float>();
    for (size_t pair = 0; pair < matrix.rank; ++pair) {
      const float* vector = averaged + pair * matrix.columns;
      if (std::any_of(vector, vector + matrix.columns, [](float number) { return number != 0.0F; })) {
        std::copy_n(vector, matrix.columns, kept + pair * matrix.columns);
      }
    }
  }

  // Some rank's numbers are not finite: whoever looks for overflow must see it.
  void giveUp(size_t index, const LowRankMatrix& matrix, void* gradient) {
    auto* residual = matrix.residual.data_ptr<float>();
    if (added_[index]) {
      std::vector<float> mine(matrix.numElements);
      load(gradient, matrix.numElements, mine.data());
      for (size_t i = 0; i < matrix.numElements; ++i) {
        residual[i] -= mine[i];
      }
    }
    const std::vector<float> none(matrix.numElements, std::numeric_limits<float>::quiet_NaN());
    store(none.data(), matrix.numElements, gradient);
  }

  const LowRankBucket bucket_;
  const codec::DType dtype_;
  const size_t elementSize_;
  const at::Tensor flat_;
  const at::Tensor firstBuffer_;
  const at::Tensor secondBuffer_;
  const Exchanges exchanges_;
  // Of begin() only.
  std::vector<float> scratch_;
  // By matrix: the gradient is in the residual.
  std::vector<char> added_;
  uint32_t round_ = 0;
  bool compresses_ = false;
};

}  // namespace baguarun::engine
