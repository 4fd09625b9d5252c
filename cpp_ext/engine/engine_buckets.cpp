// How the engine makes its buckets, and makes them again in the order that it has observed.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstdio>

#include "engine/engine.h"
#include "engine/errors.h"
#include "engine/host_operation.h"

namespace baguarun::engine {

namespace {

std::string sizeText(size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f MB", static_cast<double>(bytes) / 1e6);
  return text;
}

}  // namespace

void Engine::buildBuckets(const std::vector<size_t>& order) {
  std::vector<PlanItem> items;
  for (const Parameter& parameter : parameters_) {
    items.push_back({parameter.tensor.nbytes(), static_cast<uint32_t>(parameter.tensor.scalar_type())});
  }
  // The old schedule reads the old buckets.
  schedule_.reset();
  buckets_.clear();
  const auto plan = planBuckets(items, order, settings_.limits);
  for (const std::vector<size_t>& members : plan) {
    const Parameter& first = parameters_[members.front()];
    Bucket& bucket = buckets_.emplace_back();
    bucket.index = buckets_.size() - 1;
    bucket.parameters = members;
    bucket.operation = first.operation;
    bucket.shared =
        settings_.shareMemory && device_.is_cpu() && canShare(bucket.operation, first.tensor.scalar_type());
    size_t bytes = 0;
    for (const size_t index : members) {
      bytes += parameters_[index].tensor.nbytes();
    }
    bucket.bytes = bytes;
    bucket.label = std::to_string(bucket.index) + " of " + std::to_string(plan.size()) + " (" + first.name +
                   " to " + parameters_[members.back()].name + ", " + sizeText(bytes) + ")";
  }
  placeBuckets();
  schedule_ = device_.is_cpu() ? makeHostSchedule(group_, buckets_, area_, settings_.timeout)
                               : makeStreamSchedule(group_, buckets_);
  stats_.buckets = buckets_.size();
}

// Gives each bucket its memory and each parameter its place in it.
void Engine::placeBuckets() {
  const at::NoGradGuard noGrad;
  std::vector<size_t> sharedBytes;
  for (const Bucket& bucket : buckets_) {
    sharedBytes.push_back(bucket.shared ? bucket.bytes : 0);
  }
  const bool anyShared =
      std::any_of(buckets_.begin(), buckets_.end(), [](const Bucket& bucket) { return bucket.shared; });
  area_ = anyShared ? joinSharedArea(group_, sharedBytes) : nullptr;
  for (Bucket& bucket : buckets_) {
    bucket.shared = bucket.shared && area_ != nullptr;
    const at::Tensor& first = parameters_[bucket.parameters.front()].tensor;
    const auto options = first.options().requires_grad(false);
    const auto numElements = static_cast<int64_t>(bucket.bytes / first.element_size());
    if (bucket.shared) {
      // Gradients that the user keeps keep the memory.
      bucket.flat = at::from_blob(
          area_->bucket(static_cast<size_t>(group_->getRank()), bucket.index), {numElements},
          [segment = area_->ownSegment()](void* /*data*/) {}, options);
    } else {
      bucket.flat = at::zeros({numElements}, options);
    }
    size_t offset = 0;
    for (const size_t index : bucket.parameters) {
      Parameter& parameter = parameters_[index];
      parameter.bucket = bucket.index;
      parameter.view = gradientView(bucket.flat, parameter.tensor, offset);
      offset += static_cast<size_t>(parameter.tensor.numel());
    }
  }
}

void Engine::adoptObservedOrder() {
  const at::NoGradGuard noGrad;
  orderAdopted_ = true;
  const std::vector<int64_t> observed(observedOrder_.begin(), observedOrder_.end());
  std::vector<at::Tensor> order{at::tensor(observed, at::kLong).to(device_)};
  c10d::BroadcastOptions fromRankZero;
  fromRankZero.rootRank = 0;
  try {
    group_->broadcast(order, fromRankZero)->wait();
  } catch (const std::exception& error) {
    throw CommunicationFailure(std::string("agreeing on the order of buckets with rank 0: ") + error.what());
  }
  const at::Tensor agreed = order[0].cpu();
  const int64_t* values = agreed.const_data_ptr<int64_t>();
  buildBuckets(std::vector<size_t>(values, values + agreed.numel()));
}

}  // namespace baguarun::engine
