// Where things lie in a ShmGroup's segment: flags, headers, the ring of slots, rings of pairs, arenas.
#pragma once

#include <cstddef>
#include <cstdint>

#include "net/shm_group.h"

namespace baguarun::net {

// What a rank says about its call beside the first step's data. What the others compare is in one cache line.
struct alignas(64) ShmGroup::Header {
  static constexpr uint64_t kPrivate = ~uint64_t{0};

  Call call;
  uint64_t offset;  // of the data in the segment; kPrivate: elsewhere
  CallTrail asked;  // what `call` is a part of, if it is

  bool matches(const Header& other) const {
    return call == other.call && asked == other.asked && (offset == kPrivate) == (other.offset == kPrivate);
  }
  std::string text() const;
};

// One packet from a rank to another.
struct ShmGroup::Cell {
  // So many may be under way from one rank to another: who waits for a core does not stop the other at once.
  static constexpr uint64_t kCount = 16;

  alignas(64) std::byte data[kPacketBytes];
};

struct ShmGroup::Layout {
  static constexpr uint64_t kSlots = 5;
  static constexpr size_t kSlotBytes = 512 << 10;

  Layout(std::byte* base, int size, size_t arenaBytes);

  struct Pair {
    ShmFlag* sent;  // cells written
    ShmFlag* read;  // cells read
    Cell* cells;
  };
  Pair pair(int from, int to) const;

  ShmState* state;
  ShmReason* reasons;
  ShmFlag* left;
  ShmFlag* sleeping;
  ShmFlag* ready;
  ShmFlag* done;
  ShmFlag* pairFlags;
  Header* headers;
  std::byte* slots;
  Cell* cells;
  std::byte* arenas;
  std::byte* end;
  int size;
};

}  // namespace baguarun::net
