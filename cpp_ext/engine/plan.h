// Which gradients share a bucket, and in which order buckets go out. No torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace baguarun::engine {

struct PlanItem {
  size_t sizeBytes;
  // Only items of one kind (dtype) share a bucket.
  uint32_t kind;
};

struct PlanLimits {
  size_t bucketBytes;
  size_t smallBucketBytes;
  // Whether the first bucket of a kind is small, so that communication starts early.
  bool beginsSmall = true;
  // Buckets are small where no more than this is left of their kind, so that the last ones are soon done.
  size_t smallEndBytes = 0;
};

// Packs items in the order in which their gradients become ready (`order`, a permutation of the items). A
// bucket closes when it has reached its kind's limit, or the one of small buckets. Buckets are sorted by the
// position of their last item: the order in which they become full.
std::vector<std::vector<size_t>> planBuckets(const std::vector<PlanItem>& items,
                                             const std::vector<size_t>& order,
                                             const std::map<uint32_t, PlanLimits>& limits);

// How one bucket is dealt out to ranks: equal chunks of `stride` elements, the last ones short or empty.
class ChunkLayout {
 public:
  ChunkLayout(size_t numElements, size_t numRanks);

  size_t begin(size_t rank) const;
  size_t numElements(size_t rank) const;
  size_t stride() const { return stride_; }

 private:
  size_t numElements_;
  size_t stride_;
};

}  // namespace baguarun::engine
