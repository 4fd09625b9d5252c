// The operations of WireGroup that reduce, and the ring.
#include <algorithm>
#include <array>
#include <cstring>

#include "net/error.h"
#include "net/scale.h"
#include "net/shm_steps.h"
#include "net/wire_all_reduce.h"

namespace baguarun::net {

using shm::copyBytes;

namespace {

// Received and not yet reduced.
constexpr size_t kWindow = 16;

}  // namespace

WireGroup::WireGroup(WireContext& context, std::vector<int> members, size_t place)
    : context_(context),
      members_(std::move(members)),
      place_(place),
      distance_(members_.size(), context.allReduceWay()) {}

WireGroup::~WireGroup() = default;

// In step s, a rank sends the block that it has finished in step s - 1 and receives the one before it in the
// ring; in the first `reduceSteps` what comes is added to the own block. Segment j of the row of all segments
// can be sent when segment j - perBlock of the row has come.
void WireGroup::ring(WireCall& call, const Ring& ring, Begun* begun, const FindNext* findNext) {
  const size_t members = call.size();
  const size_t next = (place_ + 1) % members;
  const size_t previous = (place_ + members - 1) % members;
  const Segments segments(ring, members);
  const size_t total = ring.steps * segments.perBlock;
  const size_t reduced = ring.reduceSteps * segments.perBlock;
  const size_t lastStep = reduced - std::min(reduced, segments.perBlock);
  std::byte* const window = reduced > 0 ? context_.scratch(kWindow * segments.bytes) : nullptr;
  size_t sent = begun != nullptr ? begun->sent : 0;
  size_t posted = 0;
  size_t done = 0;
  while (sent < total || done < total) {
    for (; sent < total && (sent < segments.perBlock || sent < done + segments.perBlock); ++sent) {
      const auto segment = segments.sent(place_, sent);
      call.send(next, segment.data(), segment.size());
    }
    for (; posted < total && posted < done + kWindow; ++posted) {
      const auto segment = segments.sent(previous, posted);
      std::byte* const slot = window + posted % kWindow * segments.bytes;
      call.receive(previous, posted < reduced ? slot : segment.data(), segment.size());
    }
    call.advance();
    if (begun != nullptr && sent == total && posted == total && call.isAllPosted()) {
      beginNext(*begun, *findNext);
    }
    if (done < total && call.numReceived(previous) == done) {
      call.pass(previous);
      continue;
    }
    for (; done < call.numReceived(previous); ++done) {
      if (done < reduced) {
        const auto segment = segments.sent(previous, done);
        const size_t count = segment.size() / elementBytes(ring.reduction.dtype);
        combine(ring.reduction, segment.data(), window + done % kWindow * segments.bytes,
                ring.contribution(segment), count);
        if (done >= lastStep && ring.reduction.divisor > 1) {
          divide(ring.reduction.dtype, segment.data(), count, ring.reduction.divisor);
        }
      }
    }
  }
  call.finish();
  if (begun != nullptr) {
    beginNext(*begun, *findNext);
  }
}

// Of the link to the next member. Directly, the links to as many as are sent to at once share a line.
Way WireGroup::measuredWay() const {
  const auto wayTo = [this](size_t step) {
    const int rank = members_[(place_ + step) % size()];
    const Link* const link = context_.mesh().find(Mesh::Use::kCollectives, rank);
    return link != nullptr ? link->way() : Way{};
  };
  Way found = wayTo(1);
  if (wasDirect_) {
    for (size_t step = 2; step < size(); ++step) {
      found.bytesPerSecond = std::min(found.bytesPerSecond, wayTo(step).bytesPerSecond);
    }
    found.bytesPerSecond *= std::min(Direct::kAtOnce, size() - 1);
  }
  return found;
}

// What nobody else is needed for.
std::unique_ptr<WireGroup::Begun> WireGroup::begin(const WireContext::Ahead& ahead, const Ring& ring) {
  const size_t next = (place_ + 1) % size();
  auto begun = std::make_unique<Begun>(ahead, WireCall(context_, members_, place_, ahead.trail),
                                       distance_.isFar(ring.totalBytes));
  if (distance_.measures()) {
    distance_.measure(measuredWay());
  }
  wasDirect_ = begun->isDirect;
  begun->call.noteToAll(distance_.say(begun->isDirect), Distance::kDirect, "BAGUA_NET_ALL_REDUCE");
  // One that goes around the ring finds out at once that this rank does not.
  begun->call.greet(next);
  if (begun->isDirect) {
    Direct(*this, *begun, ring).contribute();
    return begun;
  }
  const Segments segments(ring, size());
  for (; begun->sent < segments.perBlock; ++begun->sent) {
    const auto segment = segments.sent(place_, begun->sent);
    begun->call.send(next, ring.contribution(segment), segment.size());
  }
  return begun;
}

void WireGroup::hear(Begun& begun) {
  if (!begun.isHeard) {
    begun.isHeard = true;
    distance_.hear(begun.call.waitNote((place_ + size() - 1) % size()));
  }
}

// While others are waited for, all that is sent in `present` being on its way, and room for what comes there.
void WireGroup::beginNext(Begun& present, const FindNext& findNext) {
  hear(present);
  if (begun_ == nullptr) {
    const auto ahead = findNext();
    if (!ahead || ahead->count * elementBytes(ahead->trail.call.dtype) <= kSmallBytes) {
      return;
    }
    const Call& call = ahead->trail.call;
    begun_ = begin(*ahead, ringOf(ahead->data, ahead->data, ahead->count, {call.dtype, call.op}));
  }
  begun_->call.advance();
}

void WireGroup::combine(const Reduction& reduction, std::byte* out, const std::byte* first,
                        const std::byte* second, size_t count) {
  if (count == 0) {
    return;
  }
  const std::array<const void*, 2> sources = {first, second};
  void* const to = out;
  net::reduce(reduction.op, reduction.dtype, sources, {&to, 1}, count);
}

// Pairs at distance 1, 2, 4, ... exchange what they have. Ranks beyond the largest power of two add theirs to
// a partner's first and are told the result.
void WireGroup::doubling(WireCall& call, std::byte* data, size_t count, Reduction reduction) {
  const size_t bytes = count * elementBytes(reduction.dtype);
  const size_t members = call.size();
  size_t power = 1;
  while (2 * power <= members) {
    power *= 2;
  }
  std::byte* const other = context_.scratch(bytes);
  if (place_ >= power) {
    call.send(place_ - power, data, bytes);
    call.waitSent(place_ - power, 1);
    call.receive(place_ - power, data, bytes);
    call.finish();
    return;
  }
  const bool hasExtra = place_ + power < members;
  if (hasExtra) {
    call.receive(place_ + power, other, bytes);
    call.waitReceived(place_ + power, 1);
    combine(reduction, data, data, other, count);
  }
  for (size_t distance = 1; distance < power; distance *= 2) {
    const size_t partner = place_ ^ distance;
    call.send(partner, data, bytes);
    call.receive(partner, other, bytes);
    call.waitReceived(partner, 1);
    call.waitSent(partner, 1);
    combine(reduction, data, partner < place_ ? other : data, partner < place_ ? data : other, count);
  }
  if (reduction.divisor > 1) {
    divide(reduction.dtype, data, count, reduction.divisor);
  }
  if (hasExtra) {
    call.send(place_ + power, data, bytes);
  }
  call.finish();
}

void WireGroup::allReduce(const CallTrail& trail, const void* in, void* out, size_t count,
                          Reduction reduction, const FindNext& findNext) {
  const size_t bytes = count * elementBytes(reduction.dtype);
  if (begun_ == nullptr && bytes <= kSmallBytes) {
    copyBytes(out, in, bytes);
    WireCall wire(context_, members_, place_, trail);
    doubling(wire, static_cast<std::byte*>(out), count, reduction);
    return;
  }
  const WireContext::Ahead present{.trail = trail, .data = out, .count = count};
  const Ring ring = ringOf(in, out, count, reduction);
  // What set out before its call was to be reduced in place.
  const bool isOther =
      begun_ != nullptr && (begun_->ahead.trail != trail || begun_->ahead.data != out || in != out);
  if (isOther) {
    throw Error(Fault::kUsage, "", "another call than the one that was said to be next, whose data set out");
  }
  const auto begun = begun_ != nullptr ? std::move(begun_) : begin(present, ring);
  if (begun->isDirect) {
    Direct(*this, *begun, ring).run(findNext);
  } else {
    this->ring(begun->call, ring, begun.get(), &findNext);
  }
}

WireGroup::Ring WireGroup::ringOf(const void* in, void* data, size_t count, Reduction reduction) const {
  const size_t bytes = count * elementBytes(reduction.dtype);
  return {.in = static_cast<const std::byte*>(in),
          .data = static_cast<std::byte*>(data),
          // Blocks meet at cache lines.
          .blockBytes = Segments::roundUp((bytes + size() - 1) / size(), 64),
          .totalBytes = bytes,
          .shift = 0,
          .reduceSteps = size() - 1,
          .steps = 2 * (size() - 1),
          .reduction = reduction};
}

void WireGroup::reduceScatter(const Call& call, void* in, void* out, size_t count, Reduction reduction) {
  WireCall wire(context_, members_, place_, call);
  const size_t bytes = count * elementBytes(reduction.dtype);
  // Turned by one, so that what a rank finishes last is its own block.
  ring(wire, {.in = static_cast<const std::byte*>(in),
              .data = static_cast<std::byte*>(in),
              .blockBytes = bytes,
              .totalBytes = bytes * size(),
              .shift = size() - 1,
              .reduceSteps = size() - 1,
              .steps = size() - 1,
              .reduction = reduction});
  copyBytes(out, static_cast<std::byte*>(in) + place_ * bytes, bytes);
}

// A chain that ends at the root: each adds its own to what comes and hands it on.
void WireGroup::reduce(const Call& call, void* data, size_t count, Reduction reduction, size_t root) {
  WireCall wire(context_, members_, place_, call);
  const size_t each = elementBytes(reduction.dtype);
  const size_t bytes = count * each;
  const size_t position = (place_ + size() - root - 1) % size();  // the root is last
  const bool isFirst = position == 0;
  const bool isLast = place_ == root;
  const size_t next = (place_ + 1) % size();
  const size_t previous = (place_ + size() - 1) % size();
  const size_t segment = std::clamp(Segments::roundUp(bytes / (2 * Segments::kPerBlock), 4096),
                                    Segments::kLeastBytes, Segments::kMostBytes);
  const size_t total = std::max<size_t>(1, (bytes + segment - 1) / segment);
  std::byte* const window = context_.scratch(kWindow * segment);
  const auto own = [&](size_t k) {
    const size_t from = std::min(k * segment, bytes);
    return std::span(static_cast<std::byte*>(data) + from, std::min(segment, bytes - from));
  };
  size_t posted = 0;
  for (size_t done = 0; done < total; ++done) {
    const auto mine = own(done);
    if (isFirst) {
      wire.send(next, mine.data(), mine.size());
      continue;
    }
    // A slot is free again when what it held has been sent on.
    if (!isLast && done >= kWindow / 2) {
      wire.waitSent(next, done - kWindow / 2 + 1);
    }
    for (; posted < total && posted < done + kWindow / 2; ++posted) {
      wire.receive(previous, window + posted % kWindow * segment, own(posted).size());
    }
    wire.waitReceived(previous, done + 1);
    std::byte* const slot = window + done % kWindow * segment;
    const size_t elements = mine.size() / each;
    if (isLast) {
      combine(reduction, mine.data(), slot, mine.data(), elements);
      if (reduction.divisor > 1) {
        divide(reduction.dtype, mine.data(), elements, reduction.divisor);
      }
    } else {
      combine(reduction, slot, slot, mine.data(), elements);
      wire.send(next, slot, mine.size());
    }
  }
  wire.finish();
}

}  // namespace baguarun::net
