// How the engine makes its buckets, and makes them again in the order that it has observed.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <cstdio>
#include <map>
#include <utility>

#include "codec/codec.h"
#include "engine/engine.h"
#include "engine/errors.h"
#include "engine/host_operation.h"
#include "engine/transfers.h"

namespace baguarun::engine {

namespace {

std::string sizeText(size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f MB", static_cast<double>(bytes) / 1e6);
  return text;
}

// The least that a coded bucket sends to each rank, where all are small. Four hosts took less time with
// messages of 260 kB (`bytegrad`), at 1 Gbit/s 3 %, with 10 ms between them 5 %; with those of 33 kB
// (`qadam_1bit`) 5 to 9 % at 100 Mbit/s, where the wire is the limit, for up to 4 % more at 1 Gbit/s and 2 to
// 8 % with 10 ms. With 16 kB (`sparse`) it is 2 to 4 % for 7 to 8 %.
constexpr size_t kLeastCodedMessageBytes = size_t{32} << 10;
// Where no more than one byte of so many of fp32 is sent, the last buckets are small: what counts is the time
// after the last gradient. `sparse` took 6 % less at 100 Mbit/s, with 10 ms between hosts 4 to 8 %, for 1 %
// more at 1 Gbit/s and 3 to 5 % with 10 ms; if two are small 2 and 4 to 7 % less, for 1 % more. `qadam_1bit`,
// which fills the wire, took 6 % more than if all were small.
constexpr size_t kFewOf = 48;
constexpr size_t kSmallAtEnd = 4;

// Codecs and the wire take turns on a bucket: the more there are, the less does one wait for the other. Those
// that are sent as they are take 13 % longer with latency if they are smaller.
PlanLimits limitsFor(const OperationSpec& operation, at::ScalarType dtype, size_t numRanks,
                     PlanLimits limits) {
  if (operation.kind == OperationKind::kScatterReduceGather && !isPlain(operation.wire, dtype)) {
    const size_t numElements = limits.smallBucketBytes / at::elementSize(dtype);
    if (codec::encodedBytes(operation.format(), numElements / numRanks) >= kLeastCodedMessageBytes) {
      limits.bucketBytes = limits.smallBucketBytes;
    } else if (codec::encodedBytes(operation.format(), numElements) <= numElements * sizeof(float) / kFewOf) {
      limits.beginsSmall = false;
      limits.smallEndBytes = kSmallAtEnd * limits.smallBucketBytes;
    }
  }
  return limits;
}

}  // namespace

void Engine::buildBuckets(std::vector<size_t> order) {
  order_ = std::move(order);
  std::vector<PlanItem> items;
  std::map<uint32_t, PlanLimits> limits;
  for (const Parameter& parameter : parameters_) {
    const auto dtype = parameter.tensor.scalar_type();
    const auto kind = static_cast<uint32_t>(dtype);
    items.push_back({parameter.tensor.nbytes(), kind});
    limits[kind] = device_.is_cpu() ? limitsFor(parameter.operation, dtype,
                                                static_cast<size_t>(group_->getSize()), settings_.limits)
                                    : settings_.limits;
  }
  // The old schedule reads the old buckets.
  schedule_.reset();
  gatherCommitted();
  buckets_.clear();
  const auto plan = planBuckets(items, order_, limits);
  for (const std::vector<size_t>& members : plan) {
    const Parameter& first = parameters_[members.front()];
    Bucket& bucket = buckets_.emplace_back();
    bucket.index = buckets_.size() - 1;
    bucket.parameters = members;
    bucket.operation = first.operation;
    requireFeedback(bucket.operation, first.tensor.scalar_type());
    bucket.shared = arena_.defined() && bucket.operation.kind == OperationKind::kScatterReduceGather &&
                    isPlain(bucket.operation.wire, first.tensor.scalar_type());
    size_t bytes = 0;
    for (const size_t index : members) {
      bytes += parameters_[index].tensor.nbytes();
    }
    bucket.bytes = bytes;
    bucket.label = std::to_string(bucket.index) + " of " + std::to_string(plan.size()) + " (" + first.name +
                   " to " + parameters_[members.back()].name + ", " + sizeText(bytes) + ")";
  }
  placeBuckets();
  schedule_ = device_.is_cpu() ? makeHostSchedule(lanes_, buckets_) : makeStreamSchedule(group_, buckets_);
  stats_.buckets = buckets_.size();
}

// Asks the group for memory that the ranks share. If some rank cannot have it, none uses it.
void Engine::joinArena() {
  if (settings_.arenaBytes == 0) {
    return;
  }
  const auto backend = group_->getBackend(device_.type());
  if (backend->supportsTensorAlloc(device_.index())) {
    try {
      arena_ = backend->allocateTensor(static_cast<long>(settings_.arenaBytes), at::kByte);
    } catch (const c10::Error& error) {
      TORCH_WARN("gradients are copied in and out of shared memory in every step, for this rank has no room ",
                 "for them there: ", textOf(error));
    }
  }
  std::vector<at::Tensor> everybody{at::full({1}, arena_.defined() ? 1 : 0, at::kInt)};
  c10d::AllreduceOptions least;
  least.reduceOp = c10d::ReduceOp::MIN;
  try {
    group_->allreduce(everybody, least)->wait();
  } catch (const std::exception& error) {
    throw CommunicationFailure(std::string("agreeing on shared memory for gradients: ") + textOf(error));
  }
  if (everybody[0].item<int32_t>() == 0) {
    arena_.reset();
  }
}

// Gives each bucket its memory and each parameter its place in it.
void Engine::placeBuckets() {
  const at::NoGradGuard noGrad;
  size_t arenaUsed = 0;
  for (Bucket& bucket : buckets_) {
    const at::Tensor& first = parameters_[bucket.parameters.front()].tensor;
    const auto options = first.options().requires_grad(false);
    const auto numElements = static_cast<int64_t>(bucket.bytes / first.element_size());
    if (bucket.shared) {
      TORCH_CHECK(arenaUsed + bucket.bytes <= arena_.nbytes(), "an arena of ", arena_.nbytes(),
                  " bytes does not hold bucket ", bucket.label);
      // Gradients that the user keeps keep the memory.
      bucket.flat = at::from_blob(
          arena_.mutable_data_ptr<uint8_t>() + arenaUsed, {numElements}, [arena = arena_](void* /*data*/) {},
          options);
      arenaUsed += alignedBytes(bucket.bytes);
    } else {
      // Each number is a parameter's, which backward stores or sets to zero before it is sent.
      bucket.flat = at::empty({numElements}, options);
    }
    size_t offset = 0;
    for (const size_t index : bucket.parameters) {
      Parameter& parameter = parameters_[index];
      parameter.bucket = bucket.index;
      parameter.view = gradientView(bucket.flat, parameter.tensor, offset);
      parameter.given = parameter.view.detach();
      offset += static_cast<size_t>(parameter.tensor.numel());
    }
    placeResiduals(bucket);
    placeLowRank(bucket);
    keepResiduals(bucket);
    if (parameters_[bucket.parameters.front()].momentum.average.defined()) {
      bucket.momentum = std::make_shared<MomentumResult>();
      bucket.momentum->flat = bucket.flat;
      bucket.momentum->lossScale = lossScale_;
    }
  }
}

// Residuals go with their parameters into the new bucket.
void Engine::placeResiduals(Bucket& bucket) {
  const bool feeds = bucket.operation.errorFeedback;
  if (feeds) {
    const auto fp32 = bucket.flat.options().dtype(at::kFloat);
    bucket.residual = at::zeros({bucket.flat.numel()}, fp32);
  }
  int64_t offset = 0;
  for (const size_t index : bucket.parameters) {
    Parameter& parameter = parameters_[index];
    const int64_t length = parameter.tensor.numel();
    const at::Tensor before = std::move(parameter.residual);
    parameter.residual = feeds ? bucket.residual.narrow(0, offset, length) : at::Tensor();
    if (feeds && before.defined()) {
      parameter.residual.copy_(before);
    }
    offset += length;
  }
}

// Before the arena is dealt out anew: gradients that lie in it would be overwritten by others.
void Engine::moveGradientsOut() {
  if (!arena_.defined()) {
    return;
  }
  const auto* begin = arena_.const_data_ptr<uint8_t>();
  for (Parameter& parameter : parameters_) {
    at::Tensor& gradient = parameter.tensor.mutable_grad();
    if (gradient.defined() && gradient.layout() == at::kStrided) {
      const auto* data = static_cast<const uint8_t*>(gradient.const_data_ptr());
      if (data >= begin && data < begin + arena_.nbytes()) {
        gradient = gradient.clone();
      }
    }
  }
}

void Engine::adoptObservedOrder() {
  const at::NoGradGuard noGrad;
  orderAdopted_ = true;
  const std::vector<size_t> agreed = orderOfRankZero(observedOrder_);
  moveGradientsOut();
  buildBuckets(agreed);
}

std::vector<size_t> Engine::orderOfRankZero(const std::vector<size_t>& mine) {
  std::vector<int64_t> numbers(mine.begin(), mine.end());
  numbers.push_back(orderAdopted_ ? 1 : 0);
  std::vector<at::Tensor> order{at::tensor(numbers, at::kLong).to(device_)};
  c10d::BroadcastOptions fromRankZero;
  fromRankZero.rootRank = 0;
  try {
    group_->broadcast(order, fromRankZero)->wait();
  } catch (const std::exception& error) {
    throw CommunicationFailure(std::string("agreeing on the order of buckets with rank 0: ") + textOf(error));
  }
  const at::Tensor agreed = order[0].cpu();
  const int64_t* values = agreed.const_data_ptr<int64_t>();
  const int64_t* const last = values + agreed.numel() - 1;
  // All or none: the next order is agreed on by all.
  orderAdopted_ = *last != 0;
  return {values, last};
}

}  // namespace baguarun::engine
