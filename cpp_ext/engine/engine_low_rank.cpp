// What the engine keeps for low-rank compression: by parameter, whatever bucket that is in.
#include "engine/engine.h"

namespace baguarun::engine {

void Engine::placeLowRank(Bucket& bucket) {
  if (bucket.operation.kind != OperationKind::kPowerSgd) {
    return;
  }
  for (const size_t index : bucket.parameters) {
    bucket.lowRank.matrices.push_back(parameters_[index].lowRank);
  }
  bucket.lowRank.firstRound = firstCompressedRound_;
}

void Engine::compressAfter(uint32_t rounds) {
  const std::scoped_lock lock(mutex_);
  *firstCompressedRound_ = round_ + 1 + rounds;
}

std::vector<std::pair<at::Tensor, at::Tensor>> Engine::lowRankTensors() {
  const std::scoped_lock lock(mutex_);
  std::vector<std::pair<at::Tensor, at::Tensor>> found;
  for (const Parameter& parameter : parameters_) {
    if (parameter.lowRank.rank > 0) {
      found.emplace_back(parameter.lowRank.residual, parameter.lowRank.vectors);
    }
  }
  return found;
}

}  // namespace baguarun::engine
