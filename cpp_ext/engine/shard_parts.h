// How a shard travels inside a node. Included by rail_exchange.h only.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>

#include "engine/bucket.h"

namespace baguarun::engine {

// Cuts a shard into parts that are sent and summed up one after the other. Its owner has room for a few of
// each rank's, whatever the size of the shard, and sums one up while the next ones come. A shard for which
// there is room as a whole is one part.
class ShardParts {
 public:
  // So many are under way at once from each rank.
  static constexpr size_t kAtOnce = 2;

  explicit ShardParts(size_t shardBytes)
      : shardBytes_(shardBytes), stride_(shardBytes <= kAtOnce * kPartBytes ? shardBytes : kPartBytes) {}

  size_t count() const { return shardBytes_ == 0 ? 0 : (shardBytes_ + stride_ - 1) / stride_; }

  // Of what one rank sends.
  size_t roomBytes() const { return alignedBytes(stride_) * std::min(count(), kAtOnce); }

  size_t begin(size_t part) const { return part * stride_; }
  size_t bytes(size_t part) const { return std::min(stride_, shardBytes_ - begin(part)); }

  // Where in the room of a rank it arrives.
  size_t placeOf(size_t part) const { return part % kAtOnce * alignedBytes(stride_); }

  // `shard`: bytes.
  at::Tensor slice(const at::Tensor& shard, size_t part) const {
    return shard.narrow(0, static_cast<int64_t>(begin(part)), static_cast<int64_t>(bytes(part)));
  }

 private:
  // Large enough for a message of its own, small enough to stay in a cache of some megabytes.
  static constexpr size_t kPartBytes = size_t{1} << 20;

  const size_t shardBytes_;
  const size_t stride_;
};

}  // namespace baguarun::engine
