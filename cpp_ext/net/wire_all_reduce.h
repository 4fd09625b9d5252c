// The blocks and segments of a ring, and all-reduces that go directly. Internal to WireGroup.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "net/wire_group.h"

namespace baguarun::net {

// The segments of a ring's blocks. All blocks have as many; the last block's may be short or empty.
struct WireGroup::Segments {
  // Small enough that several are under way at once, large enough to cost little each.
  static constexpr size_t kLeastBytes = 64 << 10;
  static constexpr size_t kMostBytes = 512 << 10;
  static constexpr size_t kPerBlock = 8;

  static size_t roundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

  Segments(const Ring& ring, size_t members)
      : ring(ring),
        numBlocks(members),
        bytes(std::clamp(roundUp(ring.blockBytes / kPerBlock, 4096), kLeastBytes, kMostBytes)),
        perBlock(std::max<size_t>(1, (ring.blockBytes + bytes - 1) / bytes)) {}

  std::span<std::byte> at(size_t block, size_t number) const {
    const size_t begin = std::min(block * ring.blockBytes, ring.totalBytes);
    const size_t end = std::min(begin + ring.blockBytes, ring.totalBytes);
    const size_t from = std::min(begin + number * bytes, end);
    return {ring.data + from, std::min(from + bytes, end) - from};
  }

  // Segment `number`, counted over the steps, of what the rank at `place` sends around the ring.
  std::span<std::byte> sent(size_t place, size_t number) const {
    const size_t step = number / perBlock;
    return at((place + ring.shift + 2 * numBlocks - step) % numBlocks, number % perBlock);
  }

  const Ring& ring;
  const size_t numBlocks;
  const size_t bytes;
  const size_t perBlock;
};

// An all-reduce that has set out: what needs nobody else is sent, or waits for room.
struct WireGroup::Begun {
  WireContext::Ahead ahead;
  WireCall call;
  bool isDirect;
  // Queued: segments of the ring, or how many others' contributions.
  size_t sent = 0;
  // What the header of the one before says.
  bool isHeard = false;
};

// Every rank sends each other one what that sums up, a block, and has the sums back from it. A block is
// summed up by the rank where the ring would finish it and in the order of the ring, so that the result is
// the same bits. In step s a rank sends to the one s places back and receives from the one s places on, which
// is the order in which it adds what comes, and every link carries one message each way.
class WireGroup::Direct {
 public:
  // Many large messages at once overflow the queue in front of the receiver; with one at a time, whoever
  // waits for a slow one lets the line run empty, and all others in turn.
  static constexpr size_t kAtOnce = 3;

  Direct(WireGroup& group, Begun& begun, const Ring& ring);

  // Queues contributions, as far as others have kept up.
  void contribute();
  void run(const FindNext& findNext);

 private:
  static constexpr size_t kPacedBytes = 64 << 10;
  // Received of one contribution and not yet added.
  static constexpr size_t kWindow = 8;

  size_t target(size_t step) const { return (group_.place_ + group_.size() - step) % group_.size(); }
  size_t source(size_t step) const { return (group_.place_ + step) % group_.size(); }
  // The block that the rank at `place` sums up.
  size_t blockOf(size_t place) const { return (place + 1) % group_.size(); }
  std::span<std::byte> own(size_t number) const { return segments_.at(blockOf(group_.place_), number); }
  std::byte* sum(size_t number) const { return scratch_ + number * segments_.bytes; }
  std::byte* slot(size_t step, size_t number) const;

  // Whether it is time to send in `step` of a stage, in which `numBefore` messages of each come.
  bool isTurn(size_t step, size_t numBefore) const;
  void makeRoom();
  // False: nothing has come that can be added.
  bool add();
  void answer();
  bool hasAnswered() const;
  // Whose message, or room for one, is needed to get on; nobody's: the own place.
  size_t awaited() const;

  WireGroup& group_;
  Begun& begun_;
  const Ring& ring_;
  const Segments segments_;
  std::byte* scratch_ = nullptr;
  // Of each step: segments for which there is room, results' last; added to the own block's sum, of which the
  // last step's are final; sent as results.
  std::vector<size_t> room_;
  std::vector<size_t> added_;
  std::vector<size_t> answered_;
};

}  // namespace baguarun::net
