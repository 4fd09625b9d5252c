// All-reduces that go directly to who sums up.
#include <algorithm>

#include "net/scale.h"
#include "net/wire_all_reduce.h"

namespace baguarun::net {

WireGroup::Direct::Direct(WireGroup& group, Begun& begun, const Ring& ring)
    : group_(group),
      begun_(begun),
      ring_(ring),
      segments_(ring, group.size()),
      room_(group.size()),
      added_(group.size()),
      answered_(group.size()) {}

bool WireGroup::Direct::isTurn(size_t step, size_t numBefore) const {
  return step <= kAtOnce || ring_.blockBytes < kPacedBytes ||
         begun_.call.numReceived(source(step - kAtOnce)) >= numBefore;
}

void WireGroup::Direct::contribute() {
  while (begun_.sent + 1 < group_.size() && isTurn(begun_.sent + 1, segments_.perBlock)) {
    const size_t to = target(++begun_.sent);
    for (size_t number = 0; number < segments_.perBlock; ++number) {
      const auto segment = segments_.at(blockOf(to), number);
      begun_.call.send(to, ring_.contribution(segment), segment.size());
    }
  }
}

// What comes first is where the sum is built; of the steps after that, as many as are added at once have a
// window.
std::byte* WireGroup::Direct::slot(size_t step, size_t number) const {
  if (step == 1) {
    return sum(number);
  }
  return sum(segments_.perBlock + step % kAtOnce * kWindow + number % kWindow);
}

// A result comes after its contribution has been added: its place is free to receive into.
void WireGroup::Direct::makeRoom() {
  const size_t perBlock = segments_.perBlock;
  size_t first = 1;
  while (first < group_.size() && added_[first] == perBlock) {
    ++first;
  }
  for (size_t step = first; step < std::min(group_.size(), first + kAtOnce); ++step) {
    const size_t most = step == 1 ? perBlock : std::min(perBlock, added_[step] + kWindow);
    for (; room_[step] < most; ++room_[step]) {
      begun_.call.receive(source(step), slot(step, room_[step]), own(room_[step]).size());
    }
    for (; room_[step] >= perBlock && room_[step] < 2 * perBlock; ++room_[step]) {
      const auto segment = segments_.at(blockOf(source(step)), room_[step] - perBlock);
      begun_.call.receive(source(step), segment.data(), segment.size());
    }
  }
}

bool WireGroup::Direct::add() {
  bool moved = false;
  for (size_t step = 1; step < group_.size(); ++step) {
    const size_t number = added_[step];
    const size_t most = step == 1 ? segments_.perBlock : added_[step - 1];
    if (number == most || begun_.call.numReceived(source(step)) <= number) {
      continue;
    }
    const auto own = this->own(number);
    const size_t count = own.size() / elementBytes(ring_.reduction.dtype);
    if (step > 1) {
      group_.combine(ring_.reduction, sum(number), sum(number), slot(step, number), count);
    }
    if (step + 1 == group_.size()) {
      group_.combine(ring_.reduction, own.data(), sum(number), ring_.contribution(own), count);
      if (ring_.reduction.divisor > 1) {
        divide(ring_.reduction.dtype, own.data(), count, ring_.reduction.divisor);
      }
    }
    ++added_[step];
    moved = true;
  }
  return moved;
}

void WireGroup::Direct::answer() {
  for (size_t step = 1; step <= begun_.sent && isTurn(step, 2 * segments_.perBlock); ++step) {
    for (; answered_[step] < added_.back(); ++answered_[step]) {
      const auto segment = own(answered_[step]);
      begun_.call.send(target(step), segment.data(), segment.size());
    }
  }
}

bool WireGroup::Direct::hasAnswered() const {
  const auto isWhole = [this](size_t numSegments) { return numSegments == segments_.perBlock; };
  return std::ranges::all_of(answered_.begin() + 1, answered_.end(), isWhole) && begun_.call.isAllPosted();
}

size_t WireGroup::Direct::awaited() const {
  const bool isSummed = added_.back() == segments_.perBlock;
  for (size_t step = 1; step < group_.size(); ++step) {
    const size_t wanted = isSummed ? 2 * segments_.perBlock : std::min(added_[step] + 1, segments_.perBlock);
    if (begun_.call.numReceived(source(step)) < wanted) {
      return source(step);
    }
  }
  for (size_t step = 1; step < group_.size(); ++step) {
    if (answered_[step] < segments_.perBlock || !begun_.call.isPosted(target(step))) {
      return target(step);
    }
  }
  return group_.place_;
}

void WireGroup::Direct::run(const FindNext& findNext) {
  scratch_ = group_.context_.scratch((segments_.perBlock + kAtOnce * kWindow) * segments_.bytes);
  for (;;) {
    makeRoom();
    contribute();
    answer();
    const bool moved = begun_.call.advance();
    if (hasAnswered()) {
      group_.beginNext(begun_, findNext);
    }
    // What came may be what others' turn waited for.
    if (add() || moved) {
      continue;
    }
    const size_t from = awaited();
    if (from == group_.place_) {
      break;
    }
    begun_.call.pass(from);
  }
  begun_.call.finish();
  group_.beginNext(begun_, findNext);
}

}  // namespace baguarun::net
