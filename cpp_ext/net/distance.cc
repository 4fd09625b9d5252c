#include "net/distance.h"

#include <algorithm>
#include <chrono>

namespace baguarun::net {

namespace {

// Below, messages that wait for each other cost little, whatever the wire.
constexpr std::chrono::milliseconds kLongTrip{1};
// Four hosts took 6 to 9 % longer for the same bytes where all send to all at once, as many senders meet in
// front of each receiver. What is gained must be twice that: most of the way round is hidden where calls
// follow each other.
constexpr double kLostOnTheWire = 0.09;
constexpr double kLeastGain = 2;
// By how much a rate must be believed to have fallen from one agreement to the next: a stream that was idle
// begins slowly, and says so.
constexpr double kKept = 0.75;

// On the wire: bit 63 the way, 31 bits of microseconds, 32 of KiB per second.
constexpr uint64_t kDirect = uint64_t{1} << 63;
constexpr uint64_t kMostTrip = (uint64_t{1} << 31) - 1;
constexpr uint64_t kMostRate = UINT32_MAX;

uint64_t packed(const Way& way) {
  const uint64_t trip = std::min(static_cast<uint64_t>(way.shortestTrip.count()), kMostTrip);
  return trip << 32 | std::min(way.bytesPerSecond >> 10, kMostRate);
}

Way unpacked(uint64_t said) {
  return {.shortestTrip = std::chrono::microseconds((said & ~kDirect) >> 32),
          .bytesPerSecond = (said & kMostRate) << 10};
}

Way worse(const Way& left, const Way& right) {
  return {.shortestTrip = std::max(left.shortestTrip, right.shortestTrip),
          .bytesPerSecond = std::min(left.bytesPerSecond, right.bytesPerSecond)};
}

}  // namespace

bool Distance::isFar(size_t bytes) const noexcept {
  // Two are each other's next, and send the same either way.
  if (numMembers_ <= 2 || wanted_ != AllReduceWay::kByDistance) {
    return numMembers_ > 2 && wanted_ == AllReduceWay::kDirect;
  }
  if (agreed_.shortestTrip < kLongTrip) {
    return false;
  }
  const auto members = static_cast<double>(numMembers_);
  const std::chrono::duration<double> trip = agreed_.shortestTrip;
  // 2(n-1) messages that follow each other around the ring, two in place of them; half a trip each.
  const double gainedS = (members - 2) * trip.count();
  const double sent = 2 * (members - 1) / members * static_cast<double>(bytes);
  return gainedS * static_cast<double>(agreed_.bytesPerSecond) > kLeastGain * kLostOnTheWire * sent;
}

// The links to all others share what one of them alone would have.
Way Distance::measured(const Way& toNext) noexcept {
  const double share = wasDirect_ ? static_cast<double>(numMembers_ - 1) : 1;
  bytesPerSecond_ = std::max(share * static_cast<double>(toNext.bytesPerSecond), kKept * bytesPerSecond_);
  return {.shortestTrip = toNext.shortestTrip, .bytesPerSecond = static_cast<uint64_t>(bytesPerSecond_)};
}

uint64_t Distance::say(const Way& toNext, bool isDirect) noexcept {
  if (numHeard_ == 0) {
    // As it goes over the wire, so that all compare the same numbers.
    worst_ = unpacked(packed(measured(toNext)));
  }
  wasDirect_ = isDirect;
  return packed(worst_) | (isDirect ? kDirect : 0);
}

bool Distance::hear(uint64_t said, bool isDirect) noexcept {
  worst_ = worse(worst_, unpacked(said));
  if (++numHeard_ == numMembers_ - 1) {
    agreed_ = worst_;
    numHeard_ = 0;
  }
  return ((said & kDirect) != 0) == isDirect;
}

}  // namespace baguarun::net
