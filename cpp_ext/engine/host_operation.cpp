#include "engine/host_operation.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <array>
#include <mutex>
#include <stdexcept>
#include <system_error>

#include "engine/errors.h"
#include "engine/peer_exchange.h"
#include "engine/ring_exchange.h"
#include "engine/shared_exchange.h"
#include "engine/transfers.h"

namespace baguarun::engine {

namespace {

// Every rank's four numbers, in rank order.
std::vector<std::array<int64_t, 4>> gatherNumbers(const Group& group, const std::array<int64_t, 4>& mine) {
  const auto options = at::TensorOptions().dtype(at::kLong);
  std::vector<at::Tensor> input{at::tensor(at::ArrayRef<int64_t>(mine), options)};
  std::vector<std::vector<at::Tensor>> output(1);
  for (int rank = 0; rank < group->getSize(); ++rank) {
    output[0].push_back(at::zeros({4}, options));
  }
  group->allgather(output, input)->wait();
  std::vector<std::array<int64_t, 4>> found;
  for (const at::Tensor& numbers : output[0]) {
    const int64_t* values = numbers.const_data_ptr<int64_t>();
    found.push_back({values[0], values[1], values[2], values[3]});
  }
  return found;
}

bool isBaguanet(const Group& group) {
  return group->getBackend(c10::DeviceType::CPU)->getBackendName() == "baguanet";
}

// The backend's own all-reduce: for types that have no codec, and on a backend whose all-reduce is good.
class WholeReduce final : public HostOperation {
 public:
  WholeReduce(const Group& group, const at::Tensor& tensor, c10d::ReduceOp::RedOpType operation,
              double divisor)
      : group_(group), canAbort_(isBaguanet(group)), tensors_{tensor}, divisor_(divisor) {
    options_.reduceOp = operation;
    options_.asyncOp = true;
  }

  void begin(uint32_t /*round*/) override {
    const std::scoped_lock lock(mutex_);
    work_ = group_->allreduce(tensors_, options_);
  }

  void reduce() override {}

  void complete() override {
    work_->wait();
    if (divisor_ != 1.0) {
      tensors_[0].div_(divisor_);
    }
  }

  // A collective of Gloo cannot be interrupted; it ends by the group's timeout.
  void abort() override {
    const std::scoped_lock lock(mutex_);
    if (canAbort_ && work_ && !work_->isCompleted()) {
      group_->getBackend(c10::DeviceType::CPU)->abort();
    }
  }

  uint64_t bytesPerRound() const override {
    const auto ranks = static_cast<uint64_t>(group_->getSize());
    return 2 * (ranks - 1) * tensors_[0].nbytes() / ranks;
  }

 private:
  const Group group_;
  const bool canAbort_;
  std::vector<at::Tensor> tensors_;
  const double divisor_;
  c10d::AllreduceOptions options_;
  std::mutex mutex_;
  Work work_;
};

}  // namespace

std::unique_ptr<HostOperation> makeHostOperation(const Group& group, const Bucket& bucket) {
  if (bucket.index >= kMaxBuckets) {
    throw UsageFailure("the plan has more than " + std::to_string(kMaxBuckets) +
                       " buckets; want a larger bucket_cap_mb");
  }
  switch (bucket.operation.kind) {
    case OperationKind::kScatterReduceGather:
      if (bucket.flat.scalar_type() == at::kFloat && bucket.operation.wire == codec::Wire::f32 &&
          isBaguanet(group)) {
        const auto kind = bucket.operation.average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
        return std::make_unique<WholeReduce>(group, bucket.flat, kind, 1.0);
      }
      if (RingExchange::suits(bucket, static_cast<size_t>(group->getSize()))) {
        return std::make_unique<RingExchange>(group, bucket);
      }
      return std::make_unique<PeerExchange>(group, bucket);
    case OperationKind::kAllReduce: {
      const double divisor = bucket.operation.average ? group->getSize() : 1.0;
      return std::make_unique<WholeReduce>(group, bucket.flat, c10d::ReduceOp::SUM, divisor);
    }
  }
  throw std::logic_error("unknown kind of operation");
}

bool canShare(const OperationSpec& operation, at::ScalarType dtype) {
  return operation.kind == OperationKind::kScatterReduceGather && isPlain(operation.wire, dtype);
}

std::shared_ptr<SharedArea> joinSharedArea(const Group& group, const std::vector<size_t>& sizes) {
  const auto rank = static_cast<size_t>(group->getRank());
  const auto size = static_cast<size_t>(group->getSize());
  auto area = std::make_shared<SharedArea>(sizes);
  // Both halves end with an exchange, so that all ranks come to the same answer.
  std::array<int64_t, 4> mine{0, getpid(), -1, 0};
  try {
    area->create(rank, size);
    mine = {1, getpid(), area->descriptor(), 0};
  } catch (const std::system_error& error) {
    TORCH_WARN("gradients go through the network stack although all ranks are on one host: ", error.what());
  }
  bool everybody = true;
  const auto created = gatherNumbers(group, mine);
  for (size_t peer = 0; peer < size; ++peer) {
    everybody = everybody && created[peer][0] == 1;
  }
  mine = {everybody ? 1 : 0, 0, 0, 0};
  for (size_t peer = 0; everybody && peer < size; ++peer) {
    try {
      if (peer != rank) {
        area->open(peer, created[peer][1], created[peer][2]);
      }
    } catch (const std::system_error& error) {
      TORCH_WARN("gradients go through the network stack although all ranks are on one host: ", error.what());
      mine[0] = 0;
    }
  }
  for (const auto& opened : gatherNumbers(group, mine)) {
    everybody = everybody && opened[0] == 1;
  }
  return everybody ? area : nullptr;
}

std::unique_ptr<HostOperation> makeSharedOperation(const Group& group, const Bucket& bucket,
                                                   std::shared_ptr<SharedArea> area,
                                                   std::chrono::milliseconds timeout) {
  return std::make_unique<SharedExchange>(group, bucket, std::move(area), timeout);
}

std::unique_ptr<HostOperation> makeHostFlags(const Group& group, const at::Tensor& flags) {
  return std::make_unique<WholeReduce>(group, flags, c10d::ReduceOp::MAX, 1.0);
}

}  // namespace baguarun::engine
