#include "engine/stream_operation.h"

#include <ATen/ATen.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "engine/low_rank_stream.h"
#include "engine/plan.h"

namespace baguarun::engine {

namespace {

// torch 2.13 renamed two collectives and deprecated the old names; these take whichever this torch has.
template <typename Pg>
auto gatherInto(Pg& group, at::Tensor& output, at::Tensor& input) {
  if constexpr (requires { group.all_gather_single(output, input); }) {
    return group.all_gather_single(output, input);
  } else {
    return group._allgather_base(output, input);
  }
}

template <typename Pg>
auto exchange(Pg& group, at::Tensor& output, at::Tensor& input) {
  std::vector<int64_t> equalParts;
  if constexpr (requires { group.all_to_all_single(output, input, equalParts, equalParts); }) {
    return group.all_to_all_single(output, input, equalParts, equalParts);
  } else {
    return group.alltoall_base(output, input, equalParts, equalParts);
  }
}

class StreamReduce final : public StreamOperation {
 public:
  StreamReduce(const Group& group, const at::Tensor& tensor, c10d::ReduceOp::RedOpType operation)
      : group_(group), tensors_{tensor} {
    options_.reduceOp = operation;
  }

  void enqueue(c10::Stream /*stream*/, uint32_t /*round*/) override {
    group_->allreduce(tensors_, options_)->wait();
  }

  uint64_t bytesPerRound() const override {
    const auto ranks = static_cast<uint64_t>(group_->getSize());
    return 2 * (ranks - 1) * tensors_[0].nbytes() / ranks;
  }

 private:
  const Group group_;
  std::vector<at::Tensor> tensors_;
  c10d::AllreduceOptions options_;
};

// Encode the chunks, all-to-all, reduce the own chunk, all-gather, decode all. Every chunk has the size of
// the largest, as the collectives want equal parts. With error feedback the own chunk is not encoded, and
// what all-to-all brings of it is not read.
class StreamExchange final : public StreamOperation {
 public:
  StreamExchange(const Group& group, const Bucket& bucket)
      : group_(group),
        rank_(static_cast<size_t>(group->getRank())),
        size_(static_cast<size_t>(group->getSize())),
        format_(bucket.operation.format()),
        dtype_(codecType(bucket.flat.scalar_type())),
        scale_(bucket.operation.average ? 1.0F / static_cast<float>(size_) : 1.0F),
        layout_(static_cast<size_t>(bucket.flat.numel()), size_),
        chunkBytes_(codec::encodedBytes(format_, layout_.stride())),
        flat_(bucket.flat),
        residual_(bucket.residual) {
    const auto bytes = bucket.flat.options().dtype(at::kByte);
    const auto total = static_cast<int64_t>(chunkBytes_ * size_);
    outgoing_ = at::zeros({total}, bytes);
    incoming_ = at::zeros({total}, bytes);
    own_ = outgoing_.narrow(0, static_cast<int64_t>(chunkBytes_ * rank_), static_cast<int64_t>(chunkBytes_));
    for (size_t peer = 0; peer < size_; ++peer) {
      if (peer != rank_ || !residual_.defined()) {
        sources_.push_back(chunk(incoming_, peer));
      }
    }
  }

  void enqueue(c10::Stream stream, uint32_t /*round*/) override {
    const codec::Exec exec{codec::Device::cuda, stream.native_handle()};
    for (size_t peer = 0; peer < size_; ++peer) {
      if (peer != rank_ || !residual_.defined()) {
        encodeChunk(exec, peer);
      }
    }
    exchange(*group_, incoming_, outgoing_)->wait();
    reduceChunk(exec);
    gatherInto(*group_, incoming_, own_)->wait();
    for (size_t peer = 0; peer < size_; ++peer) {
      decodeChunk(exec, peer);
    }
  }

  uint64_t bytesPerRound() const override { return 2 * (size_ - 1) * chunkBytes_; }

 private:
  void* chunk(const at::Tensor& buffer, size_t rank) const {
    return static_cast<char*>(buffer.data_ptr()) + rank * chunkBytes_;
  }

  void* place(size_t rank) const {
    return static_cast<char*>(flat_.data_ptr()) + layout_.begin(rank) * flat_.element_size();
  }

  float* owed(size_t rank) const { return residual_.data_ptr<float>() + layout_.begin(rank); }

  void encodeChunk(codec::Exec exec, size_t peer) {
    const size_t numElements = layout_.numElements(peer);
    if (numElements == 0) {
      return;
    }
    if (residual_.defined()) {
      codec::encodeWithResidual(exec, format_, dtype_, place(peer), owed(peer), numElements,
                                chunk(outgoing_, peer));
    } else {
      codec::encode(exec, format_, dtype_, place(peer), numElements, chunk(outgoing_, peer));
    }
  }

  void decodeChunk(codec::Exec exec, size_t peer) {
    const size_t numElements = layout_.numElements(peer);
    const void* const result = chunk(incoming_, peer);
    if (numElements == 0) {
      return;
    }
    if (residual_.defined()) {
      codec::reduceDecode(exec, format_, dtype_, &result, 1, scale_, numElements, place(peer));
    } else {
      codec::decode(exec, format_, dtype_, result, numElements, place(peer));
    }
  }

  void reduceChunk(codec::Exec exec) {
    const size_t numElements = layout_.numElements(rank_);
    if (numElements == 0) {
      return;
    }
    void* const result = chunk(outgoing_, rank_);
    if (residual_.defined()) {
      codec::encodeSumWithResidual(exec, format_, dtype_, place(rank_), sources_.data(), sources_.size(),
                                   owed(rank_), numElements, result);
    } else {
      codec::reduceEncode(exec, format_, sources_.data(), size_, scale_, numElements, result);
    }
  }

  const Group group_;
  const size_t rank_;
  const size_t size_;
  const codec::Format format_;
  const codec::DType dtype_;
  const float scale_;
  const ChunkLayout layout_;
  const size_t chunkBytes_;
  const at::Tensor flat_;
  const at::Tensor residual_;
  at::Tensor outgoing_;
  at::Tensor incoming_;
  at::Tensor own_;
  std::vector<const void*> sources_;
};

// The exchange by rail of rails.h: every rank sends each owner of its node that owner's shard, owners sum in
// fp32 and exchange between nodes, and broadcast the results in their node.
//
// Collectives of three communicators, one after the other on the caller's stream and so in one order on all
// ranks.
class StreamRailExchange final : public StreamOperation {
 public:
  explicit StreamRailExchange(const Bucket& bucket)
      : rails_(bucket.operation.rails),
        place_(static_cast<size_t>(rails_->nodeGroup->getRank())),
        dtype_(codecType(bucket.flat.scalar_type())),
        scale_(bucket.operation.average
                   ? static_cast<float>(rails_->numNodes) / static_cast<float>(rails_->numRanks)
                   : 1.0F),
        layout_(static_cast<size_t>(bucket.flat.numel()), rails_->numRails) {
    const size_t size = rails_->node.size();
    for (size_t place = 0; place < size; ++place) {
      shards_.push_back(bucket.flat.narrow(0, place < rails_->numRails ? begin(place) : 0,
                                           place < rails_->numRails ? numElements(place) : 0));
    }
    const at::Tensor& own = shards_[place_];
    for (size_t place = 0; place < size; ++place) {
      contributions_.push_back(at::zeros_like(own));
      sources_.push_back(contributions_.back().data_ptr());
    }
    if (own.numel() > 0) {
      sum_ = dtype_ == codec::DType::f32 ? own : at::zeros_like(own, own.options().dtype(at::kFloat));
      Bucket between = bucket;
      between.flat = sum_;
      between.operation.rails = nullptr;
      if (between.residual.defined()) {
        between.residual = bucket.residual.narrow(0, begin(place_), numElements(place_));
      }
      between_ = std::make_unique<StreamExchange>(rails_->railGroup, between);
    }
  }

  void enqueue(c10::Stream stream, uint32_t round) override {
    const codec::Exec exec{codec::Device::cuda, stream.native_handle()};
    rails_->nodeGroup->alltoall(contributions_, shards_)->wait();
    if (between_) {
      const size_t count = layout_.numElements(place_);
      codec::reduceDecode(exec, plainWire(dtype_), codec::DType::f32, sources_.data(), sources_.size(),
                          scale_, count, sum_.data_ptr());
      between_->enqueue(stream, round);
      if (dtype_ != codec::DType::f32) {
        codec::encode(exec, plainWire(dtype_), codec::DType::f32, sum_.data_ptr(), count,
                      shards_[place_].data_ptr());
      }
    }
    for (size_t owner = 0; owner < rails_->numRails; ++owner) {
      if (shards_[owner].numel() > 0) {
        std::vector<at::Tensor> result{shards_[owner]};
        c10d::BroadcastOptions fromOwner;
        fromOwner.rootRank = static_cast<int64_t>(owner);
        rails_->nodeGroup->broadcast(result, fromOwner)->wait();
      }
    }
  }

  uint64_t bytesPerRound() const override {
    uint64_t bytes = between_ ? between_->bytesPerRound() : 0;
    for (size_t place = 0; place < shards_.size(); ++place) {
      bytes += place == place_ ? 0 : shards_[place].nbytes() + shards_[place_].nbytes();
    }
    return bytes;
  }

 private:
  int64_t begin(size_t rail) const { return static_cast<int64_t>(layout_.begin(rail)); }
  int64_t numElements(size_t rail) const { return static_cast<int64_t>(layout_.numElements(rail)); }

  const std::shared_ptr<const Rails> rails_;
  const size_t place_;
  const codec::DType dtype_;
  const float scale_;
  const ChunkLayout layout_;
  // By place: the slice of the bucket that it owns, empty for those that own nothing.
  std::vector<at::Tensor> shards_;
  std::vector<at::Tensor> contributions_;
  std::vector<const void*> sources_;
  at::Tensor sum_;
  // Absent where this rank owns nothing.
  std::unique_ptr<StreamExchange> between_;
};

std::unique_ptr<StreamOperation> makeAverage(const Group& group, const at::Tensor& tensor) {
  return std::make_unique<StreamReduce>(group, tensor, c10d::ReduceOp::AVG);
}

std::unique_ptr<StreamOperation> makeVectors(const Group& group, const Bucket& vectors) {
  if (!vectors.operation.rails) {
    return makeAverage(group, vectors.flat);
  }
  return std::make_unique<StreamRailExchange>(vectors);
}

std::unique_ptr<StreamOperation> makeLowRank(const Group& group, const Bucket& bucket) {
  const auto buffer = [&](size_t elements) {
    return at::zeros({static_cast<int64_t>(elements)}, bucket.flat.options().dtype(at::kFloat));
  };
  const at::Tensor first = buffer(bucket.lowRank.firstElements());
  const at::Tensor second = buffer(bucket.lowRank.secondElements());
  StreamLowRank::Exchanges exchanges{makeAverage(group, bucket.flat),
                                     makeVectors(group, vectorsOf(bucket, first, bucket.index)), nullptr};
  if (second.numel() > 0) {
    exchanges.second = makeVectors(group, vectorsOf(bucket, second, bucket.index));
  }
  return std::make_unique<StreamLowRank>(bucket.flat, bucket.lowRank, first, second, std::move(exchanges));
}

}  // namespace

std::unique_ptr<StreamOperation> makeStreamReduce(const Group& group, const at::Tensor& tensor,
                                                  c10d::ReduceOp::RedOpType operation) {
  return std::make_unique<StreamReduce>(group, tensor, operation);
}

std::unique_ptr<StreamOperation> makeStreamOperation(const Group& group, const Bucket& bucket) {
  switch (bucket.operation.kind) {
    case OperationKind::kScatterReduceGather:
      if (bucket.operation.rails) {
        return std::make_unique<StreamRailExchange>(bucket);
      }
      return std::make_unique<StreamExchange>(group, bucket);
    case OperationKind::kPowerSgd:
      return makeLowRank(group, bucket);
    case OperationKind::kAllReduce:
      return makeStreamReduce(group, bucket.flat,
                              bucket.operation.average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM);
  }
  throw std::logic_error("unknown kind of operation");
}

}  // namespace baguarun::engine
