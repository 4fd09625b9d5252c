// What a rank calls, as the others must call it too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
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

// A call and what came before it. Ranks of one trail have called the same from the beginning on, so that who
// hears from some of the others directly and from the rest through them knows of all. Goes over the wire as
// it is. Threads: a value.
struct CallTrail {
  Call call;
  uint64_t past = 0;  // a digest of all calls before
  Call previous;      // of those, the last: only for texts

  bool operator==(const CallTrail& other) const { return call == other.call && past == other.past; }
  // The one with `call` next.
  CallTrail followedBy(const Call& next) const;
};
static_assert(sizeof(CallTrail) == 56);

// "calls A, where NAME calls B", said of the rank of `its` by the one of `ours`, which is called `us`.
// Nothing where no two calls of the same number differ.
std::optional<std::string> difference(const CallTrail& its, const CallTrail& ours, const std::string& us);

}  // namespace baguarun::net
