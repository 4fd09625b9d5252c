#include "engine/plan.h"

#include <algorithm>
#include <map>

namespace baguarun::engine {

namespace {

// Chunks begin at multiples of this, so that vector loads are aligned wherever the bucket is.
constexpr size_t kChunkAlignElements = 16;

struct OpenBucket {
  std::vector<size_t> items;
  size_t bytes = 0;
  size_t lastPosition = 0;
};

}  // namespace

std::vector<std::vector<size_t>> planBuckets(const std::vector<PlanItem>& items,
                                             const std::vector<size_t>& order,
                                             const std::map<uint32_t, PlanLimits>& limits) {
  std::map<uint32_t, OpenBucket> open;
  std::map<uint32_t, size_t> closedOfKind;
  std::map<uint32_t, size_t> leftOfKind;
  for (const PlanItem& item : items) {
    leftOfKind[item.kind] += item.sizeBytes;
  }
  std::vector<OpenBucket> closed;
  const auto close = [&](uint32_t kind, OpenBucket& bucket) {
    ++closedOfKind[kind];
    closed.push_back(std::move(bucket));
    bucket = OpenBucket{};
  };
  for (size_t position = 0; position < order.size(); ++position) {
    const PlanItem& item = items[order[position]];
    OpenBucket& bucket = open[item.kind];
    bucket.items.push_back(order[position]);
    bucket.bytes += item.sizeBytes;
    bucket.lastPosition = position;
    const PlanLimits& own = limits.at(item.kind);
    size_t& left = leftOfKind[item.kind];
    const bool atEnd = own.smallEndBytes > 0 && left <= own.smallEndBytes;
    const bool small = atEnd || (own.beginsSmall && closedOfKind[item.kind] == 0);
    left -= item.sizeBytes;
    if (bucket.bytes >= (small ? own.smallBucketBytes : own.bucketBytes)) {
      close(item.kind, bucket);
    }
  }
  for (auto& [kind, bucket] : open) {
    if (!bucket.items.empty()) {
      close(kind, bucket);
    }
  }
  std::sort(closed.begin(), closed.end(), [](const OpenBucket& left, const OpenBucket& right) {
    return left.lastPosition < right.lastPosition;
  });
  std::vector<std::vector<size_t>> plan;
  plan.reserve(closed.size());
  for (OpenBucket& bucket : closed) {
    plan.push_back(std::move(bucket.items));
  }
  return plan;
}

ChunkLayout::ChunkLayout(size_t numElements, size_t numRanks) : numElements_(numElements) {
  const size_t share = (numElements + numRanks - 1) / numRanks;
  stride_ = (share + kChunkAlignElements - 1) / kChunkAlignElements * kChunkAlignElements;
}

size_t ChunkLayout::begin(size_t rank) const { return std::min(rank * stride_, numElements_); }

size_t ChunkLayout::numElements(size_t rank) const { return begin(rank + 1) - begin(rank); }

}  // namespace baguarun::engine
