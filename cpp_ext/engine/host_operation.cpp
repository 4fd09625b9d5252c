#include "engine/host_operation.h"

#include <ATen/ATen.h>

#include <mutex>
#include <stdexcept>

#include "engine/errors.h"
#include "engine/low_rank_exchange.h"
#include "engine/rail_exchange.h"
#include "engine/ranges.h"
#include "engine/transfers.h"

namespace baguarun::engine {

namespace {

bool isBaguanet(const Group& group) {
  return group->getBackend(c10::DeviceType::CPU)->getBackendName() == "baguanet";
}

// Bytes that a rank sends in an all-reduce of `tensor`, whatever the way.
uint64_t bytesOf(const Group& group, const at::Tensor& tensor) {
  const auto ranks = static_cast<uint64_t>(group->getSize());
  return 2 * (ranks - 1) * tensor.nbytes() / ranks;
}

// The backend's own all-reduce. One of Gloo's cannot be interrupted; it ends by the group's timeout.
class WholeReduce final : public HostOperation {
 public:
  WholeReduce(const Group& group, const at::Tensor& tensor, c10d::ReduceOp::RedOpType operation,
              double divisor)
      : group_(group), tensors_{tensor}, divisor_(divisor) {
    options_.reduceOp = operation;
    options_.asyncOp = true;
  }

  void begin(uint32_t /*round*/) override {
    markPosted();
    work_ = group_->allreduce(tensors_, options_);
  }

  void reduce() override {}

  void complete() override {
    {
      const WireSpan span("all-reduce");
      work_->wait();
    }
    if (divisor_ != 1.0) {
      tensors_[0].div_(divisor_);
    }
  }

  void abort() override {}

  uint64_t bytesPerRound() const override { return bytesOf(group_, tensors_[0]); }

 private:
  const Group group_;
  std::vector<at::Tensor> tensors_;
  const double divisor_;
  c10d::AllreduceOptions options_;
  Work work_;
};

// The all-reduce of baguanet, on the thread that reduces: the group's own thread would be one more to wake.
// In shared memory nothing is copied. If `queued`, the group's queue has it as soon as the bucket is full:
// between hosts the group sends on ahead what it finds there.
class DirectReduce final : public HostOperation {
 public:
  DirectReduce(const Group& group, const at::Tensor& tensor, bool queued, c10d::ReduceOp::RedOpType operation,
               double divisor)
      : group_(group), tensors_{tensor}, divisor_(divisor) {
    options_.reduceOp = operation;
    options_.asyncOp = queued;
  }

  void begin(uint32_t /*round*/) override {
    if (options_.asyncOp) {
      markPosted();
      start();
    }
  }

  bool beginsAtOnce() const override { return true; }

  void reduce() override {
    {
      const WireSpan span("all-reduce");
      if (!options_.asyncOp) {
        start();
      }
      work_->wait();
    }
    const std::scoped_lock lock(mutex_);
    running_ = false;
  }

  void complete() override {
    if (divisor_ != 1.0) {
      tensors_[0].div_(divisor_);
    }
  }

  // Ends the group, too: no rank can be left out of a collective.
  void abort() override {
    const std::scoped_lock lock(mutex_);
    aborted_ = true;
    if (running_) {
      group_->getBackend(c10::DeviceType::CPU)->abort();
    }
  }

  uint64_t bytesPerRound() const override { return bytesOf(group_, tensors_[0]); }

 private:
  void start() {
    {
      const std::scoped_lock lock(mutex_);
      if (aborted_) {
        throw CommunicationFailure("aborted");
      }
      running_ = true;
    }
    work_ = group_->allreduce(tensors_, options_);
  }

  const Group group_;
  std::vector<at::Tensor> tensors_;
  const double divisor_;
  c10d::AllreduceOptions options_;
  Work work_;
  std::mutex mutex_;
  bool running_ = false;
  bool aborted_ = false;
};

std::unique_ptr<HostOperation> makeAllReduce(const Group& group, const at::Tensor& tensor, bool queued,
                                             c10d::ReduceOp::RedOpType operation, double divisor) {
  if (isBaguanet(group)) {
    return std::make_unique<DirectReduce>(group, tensor, queued, operation, divisor);
  }
  return std::make_unique<WholeReduce>(group, tensor, operation, divisor);
}

// Whether baguanet's own all-reduce gives what is asked: fp32 sums, and with 16 bits one rounding at the end,
// which it has inside a host only.
bool isWhole(const Group& group, const Bucket& bucket) {
  const at::ScalarType dtype = bucket.flat.scalar_type();
  return isBaguanet(group) && isPlain(bucket.operation.wire, dtype) && (dtype == at::kFloat || bucket.shared);
}

std::unique_ptr<HostOperation> makeVectors(const Group& group, const Bucket& vectors) {
  // Scratch of its own: whoever has the first exchange's needs the second's to get on.
  if (vectors.operation.rails) {
    return std::make_unique<RailExchange>(group, vectors, Buffers(), makeAverage);
  }
  return makeAverage(group, vectors, everybody(group), Buffers());
}

std::unique_ptr<HostOperation> makeLowRank(const Group& group, const Bucket& bucket, const Buffers& buffers,
                                           bool queued) {
  // The second exchange has the tags of a bucket that is not there.
  constexpr size_t kSecond = kMaxBuckets / 2;
  if (bucket.index >= kSecond) {
    throw UsageFailure("the plan has more than " + std::to_string(kSecond) +
                       " buckets; want a larger bucket_cap_mb");
  }
  const auto buffer = [](size_t elements) { return at::zeros({static_cast<int64_t>(elements)}, at::kFloat); };
  const at::Tensor first = buffer(bucket.lowRank.firstElements());
  const at::Tensor second = buffer(bucket.lowRank.secondElements());
  Bucket whole = bucket;
  whole.operation.kind = OperationKind::kScatterReduceGather;
  whole.operation.wire = plainWire(codecType(bucket.flat.scalar_type()));
  LowRankExchange::Exchanges exchanges{makeHostOperation(group, whole, buffers, queued),
                                       makeVectors(group, vectorsOf(bucket, first, bucket.index)), nullptr};
  if (second.numel() > 0) {
    exchanges.second = makeVectors(group, vectorsOf(bucket, second, kSecond + bucket.index));
  }
  return std::make_unique<LowRankExchange>(bucket.flat, bucket.lowRank, first, second, std::move(exchanges));
}

}  // namespace

std::unique_ptr<HostOperation> makeHostOperation(const Group& group, const Bucket& bucket,
                                                 const Buffers& buffers, bool queued) {
  if (bucket.index >= kMaxBuckets) {
    throw UsageFailure("the plan has more than " + std::to_string(kMaxBuckets) +
                       " buckets; want a larger bucket_cap_mb");
  }
  switch (bucket.operation.kind) {
    case OperationKind::kScatterReduceGather:
      if (isWhole(group, bucket)) {
        const auto kind = bucket.operation.average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
        return makeAllReduce(group, bucket.flat, queued, kind, 1.0);
      }
      if (bucket.operation.rails) {
        return std::make_unique<RailExchange>(group, bucket, buffers);
      }
      return makeExchange(group, bucket, everybody(group), buffers);
    case OperationKind::kPowerSgd:
      return makeLowRank(group, bucket, buffers, queued);
    case OperationKind::kAllReduce: {
      const double divisor = bucket.operation.average ? group->getSize() : 1.0;
      return makeAllReduce(group, bucket.flat, queued, c10d::ReduceOp::SUM, divisor);
    }
  }
  throw std::logic_error("unknown kind of operation");
}

std::unique_ptr<HostOperation> makeHostFlags(const Group& group, const at::Tensor& flags) {
  return makeAllReduce(group, flags, false, c10d::ReduceOp::MAX, 1.0);
}

}  // namespace baguarun::engine
