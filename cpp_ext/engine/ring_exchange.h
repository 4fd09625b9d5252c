// All-reduce around a ring, for large fp32 buckets. Included by host_operation.cpp only.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "codec/codec.h"
#include "engine/buffer_pool.h"
#include "engine/errors.h"
#include "engine/host_operation.h"
#include "engine/plan.h"
#include "engine/ranges.h"
#include "engine/transfers.h"

namespace baguarun::engine {

// Reduce-scatter and all-gather around a ring: each rank sends to the next and receives from the one before
// only, so that large buckets of all ranks at once fill every link without fighting for any. Chunks travel in
// segments; while one is added up the next is on its way. Partial sums travel as fp32.
class RingExchange final : public HostOperation {
 public:
  // Buckets whose size counts for more than the 2(n-1) rounds: of fp32, as partial sums travel.
  static bool suits(const Bucket& bucket, size_t numRanks) {
    return numRanks > 2 && bucket.flat.scalar_type() == at::kFloat &&
           bucket.operation.wire == codec::Wire::f32 && bucket.bytes / numRanks >= kLeastChunkBytes;
  }

  // `ranks`: those of the group that take part, this one among them. "Rank" means a place in it below.
  RingExchange(const Group& group, const Bucket& bucket, const std::vector<int>& ranks,
               std::shared_ptr<BufferPool> buffers)
      : group_(group),
        ranks_(ranks),
        rank_(placeOf(group->getRank(), ranks)),
        size_(ranks.size()),
        bucket_(bucket.index),
        scale_(bucket.operation.average ? 1.0F / static_cast<float>(size_) : 1.0F),
        flat_(bucket.flat),
        layout_(static_cast<size_t>(bucket.flat.numel()), size_),
        segments_(std::clamp(layout_.stride() / kSegmentElements, size_t{1}, kMaxSegments)),
        buffers_(std::move(buffers)) {
    for (Transfers* transfers : {&sends_, &scatterReceives_, &gatherReceives_}) {
      transfers->nameRanks(ranks);
    }
    buffers_->want((size_ - 1) * layout_.stride() * sizeof(float));
  }

  void begin(uint32_t round) override {
    round_ = round;
    scratch_ = buffers_->take();
    for (Transfers* transfers : {&sends_, &scatterReceives_, &gatherReceives_}) {
      transfers->clear();
    }
    for (size_t step = 0; step + 1 < size_; ++step) {
      forSegments(partial(step), [&](size_t first, size_t count) {
        receive(scratch(step, first), scratch_, count, Stage::kScatter, scatterReceives_);
      });
    }
    size_t arrived = 0;
    for (size_t step = 0; step + 1 < size_; ++step) {
      forSegments(chunk(rank_ + size_ - step), [&](size_t first, size_t count) {
        if (step > 0) {
          add(step - 1, first, count, arrived++, 1.0F);
        }
        send(first, count, Stage::kScatter);
      });
    }
    // A chunk's result comes back after its contribution has gone round: its place is free to receive into.
    for (size_t step = 0; step + 1 < size_; ++step) {
      forSegments(chunk(rank_ + size_ - step), [&](size_t first, size_t count) {
        receive(place(first), flat_, count, Stage::kGather, gatherReceives_);
      });
    }
    forSegments(chunk(rank_ + 1), [&](size_t first, size_t count) {
      add(size_ - 2, first, count, arrived++, scale_);
      send(first, count, Stage::kGather);
    });
  }

  void reduce() override {
    size_t arrived = 0;
    for (size_t step = 1; step + 1 < size_; ++step) {
      forSegments(chunk(rank_ + 1 + size_ - step), [&](size_t first, size_t count) {
        gatherReceives_.wait(arrived++, "receiving a result from");
        send(first, count, Stage::kGather);
      });
    }
  }

  void complete() override {
    for (size_t i = 0; i < gatherReceives_.size(); ++i) {
      gatherReceives_.wait(i, "receiving a result from");
    }
    for (size_t i = 0; i < sends_.size(); ++i) {
      sends_.wait(i, "sending to");
    }
    buffers_->give(std::move(scratch_));
  }

  void abort() override {
    buffers_->abort();
    for (Transfers* transfers : {&sends_, &scatterReceives_, &gatherReceives_}) {
      transfers->abort();
    }
  }

  uint64_t bytesPerRound() const override {
    const size_t all = layout_.begin(size_);
    const size_t kept = layout_.numElements((rank_ + 1) % size_) + layout_.numElements((rank_ + 2) % size_);
    return (2 * all - kept) * sizeof(float);
  }

 private:
  static constexpr size_t kSegmentElements = size_t{512} << 10;
  static constexpr size_t kMaxSegments = 8;
  static constexpr size_t kLeastChunkBytes = size_t{128} << 10;

  struct Range {
    size_t first;
    size_t count;
  };

  Range chunk(size_t number) const {
    return {layout_.begin(number % size_), layout_.numElements(number % size_)};
  }

  // The chunk whose partial sum arrives in `step`.
  Range partial(size_t step) const { return chunk(rank_ + size_ - step - 1); }

  template <typename Run>
  void forSegments(Range range, const Run& run) const {
    for (size_t segment = 0; segment < segments_; ++segment) {
      const size_t begin = range.count * segment / segments_;
      const size_t end = range.count * (segment + 1) / segments_;
      run(range.first + begin, end - begin);
    }
  }

  float* place(size_t first) const { return static_cast<float*>(flat_.data_ptr()) + first; }

  // Where the partial sum of elements from `first` on arrives in `step`.
  float* scratch(size_t step, size_t first) const {
    return static_cast<float*>(scratch_.data_ptr()) + step * layout_.stride() + (first - partial(step).first);
  }

  void add(size_t step, size_t first, size_t count, size_t position, float scale) {
    scatterReceives_.wait(position, "receiving a partial sum from");
    const std::array<const void*, 2> sources{scratch(step, first), place(first)};
    const Span span("add", "codec", static_cast<int64_t>(count * sizeof(float)));
    codec::reduceEncode({codec::Device::cpu, nullptr}, codec::Wire::f32, sources.data(), sources.size(),
                        scale, count, place(first));
  }

  // It keeps `owner`, which `data` is in: who moves a message that was given up may be at it for a while.
  static at::Tensor bytesAt(float* data, size_t count, const at::Tensor& owner) {
    return at::from_blob(
        data, {static_cast<int64_t>(count * sizeof(float))}, [owner](void* /*data*/) {},
        at::TensorOptions().dtype(at::kByte));
  }

  void send(size_t first, size_t count, Stage stage) {
    const size_t next = (rank_ + 1) % size_;
    std::vector<at::Tensor> tensors{bytesAt(place(first), count, flat_)};
    markPosted();
    sends_.add(sendMessage(group_, tensors, ranks_[next], messageTag(round_, bucket_, stage)), next);
  }

  void receive(float* into, const at::Tensor& owner, size_t count, Stage stage, Transfers& transfers) {
    const size_t previous = (rank_ + size_ - 1) % size_;
    std::vector<at::Tensor> tensors{bytesAt(into, count, owner)};
    transfers.add(group_->recv(tensors, ranks_[previous], messageTag(round_, bucket_, stage)), previous);
  }

  const Group group_;
  const std::vector<int> ranks_;
  const size_t rank_;
  const size_t size_;
  const size_t bucket_;
  const float scale_;
  const at::Tensor flat_;
  const ChunkLayout layout_;
  const size_t segments_;
  const std::shared_ptr<BufferPool> buffers_;
  uint32_t round_ = 0;
  // The partial sums of all steps; from the pool while a round is under way.
  at::Tensor scratch_;
  Transfers sends_;
  Transfers scatterReceives_;
  Transfers gatherReceives_;
};

}  // namespace baguarun::engine
