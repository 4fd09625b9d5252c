// How far the members of a group are from each other around a ring, as all of them know it alike.
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
  // In what is said: the call is a direct one.
  static constexpr uint64_t kDirect = uint64_t{1} << 63;

  Distance(size_t numMembers, AllReduceWay wanted) : numMembers_(numMembers), wanted_(wanted) {}

  // Whether the next all-reduce of `bytes` goes directly: the same on all members.
  bool isFar(size_t bytes) const noexcept;

  // What the slowest link moves in the time of the longest trip, as agreed upon: the same on all members
  // between two calls.
  uint64_t bytesInTrip() const noexcept;

  // Whether the next call's header says what is measured then, else what was heard.
  bool measures() const noexcept { return numHeard_ == 0; }
  // `toNext`: trip and speed of the link to the next member. For calls that measure, before they say
  // anything.
  void measure(const Way& toNext) noexcept;
  // What the header of a call says, and what the one before says in the same call; one after the other.
  uint64_t say(bool isDirect) const noexcept;
  void hear(uint64_t said) noexcept;

 private:
  // Of members in a row, in units in which they go over the wire.
  struct Links {
    uint64_t trips = 0;  // of all together
    uint64_t longestTrip = 0;
    uint64_t leastRate = 0;
  };
  static Links unpacked(uint64_t said) noexcept;

  const size_t numMembers_;
  const AllReduceWay wanted_;
  Links agreed_;
  Links own_;
  // Of the own link and those behind it that have been heard of.
  Links known_;
  size_t numHeard_ = 0;
  double bytesPerSecond_ = 0;
};

}  // namespace baguarun::net
