// Collectives among ranks that are joined by links, one or more per host.
//
// All-reduce up to 64 KiB: recursive doubling, log2(n) rounds for any number n of ranks. Above: a ring, each
// rank sending and receiving 2(n-1)/n of the data in segments that are sent on as soon as they are reduced;
// or, where the way is long for the speed of the wire (distance.h), the same bytes directly to who sums up
// and from there to all, two messages that follow each other in place of 2(n-1). When a rank has nothing left
// to send it begins with the next one, if that is known. Reduce-scatter and all-gather are halves of the ring
// (small all-gathers go straight to everybody), broadcast and reduce are binomial trees and pipelined chains,
// gather, scatter and all-to-all go straight. Every element's reduction is finished on one rank, or by all in
// the same order: the same bits everywhere.
//
// Partial sums travel in the type of the data. So a ring rounds 16-bit floats once per rank; the communicator
// gives small ones as fp32.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "net/distance.h"
#include "net/wire_call.h"

namespace baguarun::net {

// What a reduction does: `divisor` above 1 divides the end result.
struct Reduction {
  Dtype dtype;
  ReduceOp op;
  int divisor = 1;
};

// Threads: one at a time.
class WireGroup {
 public:
  static constexpr size_t kSmallBytes = 64 << 10;

  // Among `members` (ranks), of which this is `members[place]`. All operations: roots are places.
  WireGroup(WireContext& context, std::vector<int> members, size_t place);
  ~WireGroup();
  WireGroup(const WireGroup&) = delete;
  WireGroup& operator=(const WireGroup&) = delete;

  size_t size() const noexcept { return members_.size(); }
  size_t place() const noexcept { return place_; }
  const std::vector<int>& members() const noexcept { return members_; }
  // Of the slowest link, as the all-reduces so far have found: the same on all members between two of them.
  uint64_t bytesInTrip() const noexcept { return distance_.bytesInTrip(); }

  // What comes after an all-reduce: data of the same type of element or another, as its trail says.
  using FindNext = std::function<std::optional<WireContext::Ahead>()>;

  // The reduction of `in` to `out`, which may be the same. `findNext` is called at least once, when nobody
  // needs this rank's thread for the present one any more, and may wait for ranks of the same host there.
  // What it has found must be reduced next.
  void allReduce(const CallTrail& trail, const void* in, void* out, size_t count, Reduction reduction,
                 const FindNext& findNext);
  void reduce(const Call& call, void* data, size_t count, Reduction reduction, size_t root);
  // `in`, one block of `count` elements per member, is overwritten with partial results.
  void reduceScatter(const Call& call, void* in, void* out, size_t count, Reduction reduction);
  void allGather(const Call& call, const void* in, void* out, size_t bytes);
  void broadcast(const Call& call, void* data, size_t bytes, size_t root);
  void gather(const Call& call, const void* in, void* out, size_t bytes, size_t root);
  void scatter(const Call& call, const void* in, void* out, size_t bytes, size_t root);
  void allToAllV(const Call& call, const void* in, std::span<const size_t> sendBytes, void* out,
                 std::span<const size_t> recvBytes);
  void barrier(const Call& call);

 private:
  // Blocks around the ring; see ring().
  struct Ring {
    const std::byte* in;  // what this rank contributes
    std::byte* data;      // sums, and what is received; may be `in`
    size_t blockBytes;    // of each but perhaps the last
    size_t totalBytes;
    size_t shift;        // how far the blocks are turned
    size_t reduceSteps;  // then the blocks are handed on as they are
    size_t steps;
    Reduction reduction;

    // What this rank contributes to `place` of the data.
    const std::byte* contribution(std::span<const std::byte> place) const {
      return in + (place.data() - data);
    }
  };
  struct Segments;
  struct Begun;
  class Direct;

  Ring ringOf(const void* in, void* data, size_t count, Reduction reduction) const;
  std::unique_ptr<Begun> begin(const WireContext::Ahead& ahead, const Ring& ring);
  void ring(WireCall& call, const Ring& ring, Begun* begun = nullptr, const FindNext* findNext = nullptr);
  Way measuredWay() const;
  void hear(Begun& begun);
  void beginNext(Begun& present, const FindNext& findNext);
  void doubling(WireCall& call, std::byte* data, size_t count, Reduction reduction);
  // `out` may be either.
  void combine(const Reduction& reduction, std::byte* out, const std::byte* first, const std::byte* second,
               size_t count);

  WireContext& context_;
  const std::vector<int> members_;
  const size_t place_;
  Distance distance_;
  bool wasDirect_ = false;  // the last one of which distance_ knows
  // The next all-reduce, of which this rank has sent what it can.
  std::unique_ptr<Begun> begun_;
};

}  // namespace baguarun::net
