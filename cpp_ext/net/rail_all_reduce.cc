#include "net/rail_all_reduce.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "net/error.h"
#include "net/shm_steps.h"

namespace baguarun::net {

using shm::bytesOf;

namespace {

constexpr size_t kLeastBytes = 64 << 10;
// Of a part. Weights of 34 MB among two hosts of two at 1 Gbit/s with 5 ms take 342 ms so, 354 in parts of
// half the size or of twice, and 370 in one; without latency 333, 334, 338 and 359.
constexpr size_t kLeastPartBytes = 8 << 20;
// Without a limit of the wire the same take 123 ms in parts of 16 MB, 135 in smaller ones.
constexpr size_t kLeastTrips = 2;

size_t roundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

size_t bytesIn(const Call& call) { return call.count * elementBytes(call.dtype); }

}  // namespace

bool RailAllReduce::isFor(const Call& call) noexcept { return bytesIn(call) > kLeastBytes; }

size_t RailAllReduce::numLeft(const Call& call, int numLocal) noexcept {
  return call.count % static_cast<size_t>(numLocal);
}

RailAllReduce::RailAllReduce(WireContext& context, ShmGroup& local, WireGroup& rail)
    : context_(context), local_(local), rail_(rail), partBytes_(kLeastPartBytes) {}

size_t RailAllReduce::numParts(const Part& part) noexcept {
  return std::max<size_t>(1, (bytesIn(part.trail.call) + part.bytes / 2) / part.bytes);
}

RailAllReduce::Extent RailAllReduce::extentOf(const Part& part) const noexcept {
  const Call& call = part.trail.call;
  const auto numLocal = static_cast<size_t>(local_.size());
  const size_t parts = numParts(part);
  // Shares meet at cache lines.
  const size_t each = roundUp((call.count + parts - 1) / parts, numLocal * 64 / elementBytes(call.dtype));
  const size_t begin = std::min(part.number * each, call.count);
  return {.begin = begin, .share = (std::min(begin + each, call.count) - begin) / numLocal};
}

size_t RailAllReduce::beginBytes(const Part& part) const noexcept {
  return extentOf(part).begin * elementBytes(part.trail.call.dtype);
}

std::byte* RailAllReduce::own(const Part& part) const noexcept {
  const size_t shareBytes = extentOf(part).share * elementBytes(part.trail.call.dtype);
  return part.out + beginBytes(part) + static_cast<size_t>(local_.rank()) * shareBytes;
}

void RailAllReduce::run(const CallTrail& trail, const void* in, void* out, const Arrived& arrived) {
  const Call& call = trail.call;
  const bool isAverage = call.op == ReduceOp::kAvg;
  const Reduction reduction{.dtype = call.dtype,
                            .op = isAverage ? ReduceOp::kSum : call.op,
                            .divisor = isAverage ? static_cast<int>(rail_.size()) : 1};
  bytesInTrip_ = rail_.bytesInTrip();
  Part part{.trail = trail, .in = bytesOf(in), .out = bytesOf(out), .bytes = partBytes_, .number = 0};
  std::optional<Part> before;
  const auto spreadBefore = [&] {
    spread(*before);
    if (arrived) {
      const Extent extent = extentOf(*before);
      const auto numLocal = static_cast<size_t>(local_.size());
      // An empty part begins behind what is left.
      arrived(std::min(extent.begin + extent.share * numLocal,
                       trail.call.count - numLeft(trail.call, local_.size())));
    }
  };
  for (const size_t parts = numParts(part); part.number < parts; ++part.number) {
    if (!summedUp_) {
      sumUp(part);
    } else if (std::exchange(summedUp_, std::nullopt) != part) {
      throw Error(Fault::kUsage, "",
                  "another call than the one that was said to be next, which is summed up");
    }
    // What has set out is enough for the line meanwhile.
    sumUpFollower(part);
    if (before) {
      spreadBefore();
    }
    before = part;
    bool hasAsked = false;
    rail_.allReduce(trail, own(part), own(part), extentOf(part).share, reduction,
                    [&]() -> std::optional<WireContext::Ahead> {
                      // Each rank of the host as often as the others, which wait for it there.
                      if (!std::exchange(hasAsked, true)) {
                        sumUpFollower(part);
                      }
                      if (!summedUp_) {
                        return std::nullopt;
                      }
                      return WireContext::Ahead{.trail = summedUp_->trail,
                                                .data = own(*summedUp_),
                                                .count = extentOf(*summedUp_).share};
                    });
  }
  spreadBefore();
}

void RailAllReduce::sumUp(const Part& part) {
  const Call& call = part.trail.call;
  local_.reduceScatter(part.in + beginBytes(part), own(part), extentOf(part).share, call.dtype, call.op);
}

void RailAllReduce::spread(const Part& part) {
  local_.allGather(own(part), part.out + beginBytes(part),
                   extentOf(part).share * elementBytes(part.trail.call.dtype));
}

// If all ranks of this host know what it is.
void RailAllReduce::sumUpFollower(const Part& part) {
  if (summedUp_) {
    return;
  }
  if (const auto next = follower(part)) {
    local_.describe(next->trail);
    sumUp(*next);
    local_.describe(part.trail);
    summedUp_ = next;
  }
}

std::optional<RailAllReduce::Part> RailAllReduce::follower(const Part& part) {
  if (part.number + 1 < numParts(part)) {
    Part next = part;
    ++next.number;
    return next;
  }
  // What is left of this call goes before the next one.
  const bool isWhole = numLeft(part.trail.call, local_.size()) == 0;
  const auto next = isWhole ? nextCall() : std::nullopt;
  const Word all = agree({.bytesInTrip = bytesInTrip_, .knowsNext = next.has_value()});
  partBytes_ = std::max(kLeastPartBytes, kLeastTrips * all.bytesInTrip * static_cast<size_t>(local_.size()));
  if (!all.knowsNext) {
    return std::nullopt;
  }
  std::byte* const data = bytesOf(next->data);
  return Part{.trail = next->trail, .in = data, .out = data, .bytes = partBytes_, .number = 0};
}

std::optional<WireContext::Ahead> RailAllReduce::nextCall() {
  const auto next = context_.nextAllReduce();
  return next && isFor(next->trail.call) ? next : std::nullopt;
}

// The longest, and whether all do.
RailAllReduce::Word RailAllReduce::agree(const Word& mine) {
  std::array<Word, ShmGroup::kMaxRanks> said;
  local_.allGather(&mine, said.data(), sizeof(mine));
  Word all = mine;
  for (const Word& word : std::span(said).first(static_cast<size_t>(local_.size()))) {
    all.bytesInTrip = std::max(all.bytesInTrip, word.bytesInTrip);
    all.knowsNext = all.knowsNext && word.knowsNext;
  }
  return all;
}

}  // namespace baguarun::net
