// All-reduces over rails: summed up inside the hosts, reduced between them, spread inside them.
//
// In parts: while one is between hosts, the one before is spread and the next one summed up, so that lines do
// not run empty. The next one may be of the call after this one, where that is known. Each part takes a trip
// at least, so that they are as large as the way is long for its speed.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>

#include "net/shm_group.h"
#include "net/wire_group.h"

namespace baguarun::net {

// Of one rank, on a rail of `rail`. All hosts have as many ranks. Threads: one at a time.
class RailAllReduce {
 public:
  // Whether a call is large enough: below, one rank of each host speaks for all, with fewer messages.
  static bool isFor(const Call& call) noexcept;
  // Elements at the end that are too few to be shared out among the ranks of a host: they are left as they
  // are.
  static size_t numLeft(const Call& call, int numLocal) noexcept;

  RailAllReduce(WireContext& context, ShmGroup& local, WireGroup& rail);

  // How many elements, from the first on, are as they will be.
  using Arrived = std::function<void(size_t count)>;

  // Writes the reduction of `in` of the call of `trail`, over all ranks of all hosts, to `out`, which may be
  // the same. `arrived`, if it is not empty, is called as parts come. Which call is next is asked of the
  // context; it must then be run next. Throws Error, also kUsage where another one is run.
  void run(const CallTrail& trail, const void* in, void* out, const Arrived& arrived);

 private:
  // What goes through the levels at once.
  struct Part {
    CallTrail trail;
    const std::byte* in;  // of the call
    std::byte* out;
    size_t bytes;  // of each of its parts, about
    size_t number;
    bool operator==(const Part& other) const = default;
  };
  // Where it lies in the call, and how much of it is each rank's; elements.
  struct Extent {
    size_t begin;
    size_t share;
  };

  // What the ranks of a host tell each other.
  struct Word {
    uint64_t bytesInTrip;
    bool knowsNext;
  };

  static size_t numParts(const Part& part) noexcept;
  Extent extentOf(const Part& part) const noexcept;
  size_t beginBytes(const Part& part) const noexcept;
  // This rank's share of it.
  std::byte* own(const Part& part) const noexcept;

  void sumUp(const Part& part);
  void spread(const Part& part);
  void sumUpFollower(const Part& part);
  std::optional<Part> follower(const Part& part);
  std::optional<WireContext::Ahead> nextCall();
  Word agree(const Word& mine);

  WireContext& context_;
  ShmGroup& local_;
  WireGroup& rail_;
  // Of the next call. The same on all ranks of all hosts: each rail knows its own trip only, alike on its
  // members when a call begins, and the ranks of each host take the longest.
  size_t partBytes_;
  uint64_t bytesInTrip_ = 0;  // of this rail, when this call began
  // Inside the host, before its turn.
  std::optional<Part> summedUp_;
};

}  // namespace baguarun::net
