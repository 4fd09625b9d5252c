// What a rank calls, as the others must call it too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "net/reduce.h"

namespace baguarun::net {

enum class CallKind : uint8_t {
  kNone,
  kBarrier,
  kAllReduce,
  kReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kGather,
  kScatter,
  kAllToAll,
};

// Goes over the wire as it is. Threads: a value.
struct Call {
  uint64_t sequence = 0;  // of the group's calls
  uint64_t count = 0;     // elements for reductions, else bytes
  uint32_t root = 0;
  CallKind kind = CallKind::kNone;
  Dtype dtype = Dtype::kUint8;
  ReduceOp op = ReduceOp::kSum;
  uint8_t reserved = 0;

  bool operator==(const Call& other) const = default;
  // "all-reduce SUM of 100 fp32 as call 7".
  std::string text() const;
};
static_assert(sizeof(Call) == 24);

}  // namespace baguarun::net
