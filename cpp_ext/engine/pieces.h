// Large buckets cut into pieces that are exchanged one after the other.
#pragma once

#include <cstddef>
#include <vector>

#include "engine/bucket.h"

namespace baguarun::engine {

// The bucket itself, or where it is large pieces that follow each other in `flat`: while one is on the wire
// the next is encoded, and scratch memory is as much as pieces need, even if a single parameter fills the
// bucket.
//
// Whole stay buckets that are not encoded, and those that keep what their encoding loses: what the sums of a
// chunk owe belongs to who owns the chunk.
//
// Pieces have no momentum and nothing kept: these are of the bucket. Their index is the bucket's.
std::vector<Bucket> cutIntoPieces(const Bucket& bucket, size_t numRanks);

}  // namespace baguarun::engine
