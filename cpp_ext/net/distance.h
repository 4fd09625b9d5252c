// How far the members of a group are from each other, as all of them know it alike.
//
// What one of them measures says little of the others' links, and those who take different ways through one
// collective never meet. So each tells the next one, in the header of a call, what it has measured or heard;
// after as many calls as there are others everybody has heard of everybody, and all go by that from the same
// call on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "net/backlog.h"
#include "net/env.h"

namespace baguarun::net {

// Threads: one at a time.
class Distance {
 public:
  Distance(size_t numMembers, AllReduceWay wanted) : numMembers_(numMembers), wanted_(wanted) {}

  // Whether the next all-reduce of `bytes` goes directly: the same on all members.
  bool isFar(size_t bytes) const noexcept;

  // What the next call's header says; `toNext` is measured. To be called once for each.
  uint64_t say(const Way& toNext, bool isDirect) noexcept;
  // What that of the member before says in the same call. False: it goes another way.
  bool hear(uint64_t said, bool isDirect) noexcept;

 private:
  Way measured(const Way& toNext) noexcept;

  const size_t numMembers_;
  const AllReduceWay wanted_;
  Way agreed_;
  // Of those that have been heard of since the last agreement, the worst; in how many calls.
  Way worst_;
  size_t numHeard_ = 0;
  double bytesPerSecond_ = 0;
  bool wasDirect_ = false;
};

}  // namespace baguarun::net
