// Which ranks an exchange by rail runs between.
#pragma once

#include <cstddef>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace baguarun::engine {

// One rank's place in a job whose ranks live on several nodes. A bucket is dealt out in as many shards as the
// smallest node has ranks; shard i belongs to the i-th rank of every node, and the owners of one shard are a
// rail. Ranks beyond own nothing: they give their gradients to the owners of their node and get the results.
struct Rails {
  // Ranks of this rank's node in the engine's group, in order; the first `numRails` own a shard.
  std::vector<int> node;
  // The owners of this rank's shard, one per node in the order of nodes; empty if it owns none.
  std::vector<int> rail;
  size_t numRails = 0;
  size_t numNodes = 0;
  // In all.
  size_t numRanks = 0;
  // On an accelerator: the ranks of `node`, and those of `rail` or this one alone. Null on the CPU, where
  // messages need the engine's group only.
  c10::intrusive_ptr<c10d::ProcessGroup> nodeGroup = nullptr;
  c10::intrusive_ptr<c10d::ProcessGroup> railGroup = nullptr;
};

}  // namespace baguarun::engine
