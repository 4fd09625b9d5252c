#include "net/distance.h"

#include <algorithm>
#include <chrono>

namespace baguarun::net {

namespace {

// Four hosts took 6 to 9 % longer for the same bytes where all send to all at once, as many senders meet in
// front of each receiver. What is gained must be twice that: most of the way round is hidden where calls
// follow each other.
constexpr double kLostOnTheWire = 0.09;
constexpr double kLeastGain = 2;
// Below, messages that wait for each other cost little, whatever the wire.
constexpr double kLongTripS = 1e-3;
// How long the mean of the trips is at least, by the longest. Hosts in a few places that are far apart have
// short ones among them: a ring crosses what lies between once, and directly more bytes would.
constexpr double kAlike = 0.5;
// What is left of a rate, at most, from one time to the next: a stream that was idle begins slowly, and says
// so.
constexpr double kKept = 0.75;

// On the wire, from bit 62 on: trips together, the longest, the least rate.
constexpr int kTripsBits = 24;
constexpr int kLongestBits = 18;
constexpr int kRateBits = 21;
static_assert(kTripsBits + kLongestBits + kRateBits == 63);
constexpr double kTripUnitS = 32e-6;
constexpr double kRateUnit = 64 << 10;

constexpr uint64_t most(int bits) { return (uint64_t{1} << bits) - 1; }

uint64_t clamped(double value, int bits) {
  return static_cast<uint64_t>(std::clamp(value, 0.0, static_cast<double>(most(bits))));
}

}  // namespace

bool Distance::isFar(size_t bytes) const noexcept {
  // Two are each other's next, and send the same either way.
  if (numMembers_ <= 2 || wanted_ != AllReduceWay::kByDistance) {
    return numMembers_ > 2 && wanted_ == AllReduceWay::kDirect;
  }
  const auto members = static_cast<double>(numMembers_);
  const double tripsS = kTripUnitS * static_cast<double>(agreed_.trips);
  const double longestS = kTripUnitS * static_cast<double>(agreed_.longestTrip);
  if (longestS < kLongTripS || tripsS < kAlike * members * longestS) {
    return false;
  }
  // Of 2(n-1) messages around the ring, each takes half a trip; directly there are two.
  const double gainedS = (members - 1) / members * tripsS - longestS;
  const double sent = 2 * (members - 1) / members * static_cast<double>(bytes);
  return gainedS * kRateUnit * static_cast<double>(agreed_.leastRate) > kLeastGain * kLostOnTheWire * sent;
}

uint64_t Distance::bytesInTrip() const noexcept {
  const double tripS = kTripUnitS * static_cast<double>(agreed_.longestTrip);
  return static_cast<uint64_t>(tripS * kRateUnit * static_cast<double>(agreed_.leastRate));
}

void Distance::measure(const Way& toNext) noexcept {
  bytesPerSecond_ = std::max(static_cast<double>(toNext.bytesPerSecond), kKept * bytesPerSecond_);
  const std::chrono::duration<double> trip = toNext.shortestTrip;
  const double units = trip.count() / kTripUnitS;
  own_ = {.trips = clamped(units, kLongestBits),
          .longestTrip = clamped(units, kLongestBits),
          .leastRate = clamped(bytesPerSecond_ / kRateUnit, kRateBits)};
  known_ = own_;
}

uint64_t Distance::say(bool isDirect) const noexcept {
  return (isDirect ? kDirect : 0) | known_.trips << (kLongestBits + kRateBits) |
         known_.longestTrip << kRateBits | known_.leastRate;
}

Distance::Links Distance::unpacked(uint64_t said) noexcept {
  return {.trips = said >> (kLongestBits + kRateBits) & most(kTripsBits),
          .longestTrip = said >> kRateBits & most(kLongestBits),
          .leastRate = said & most(kRateBits)};
}

void Distance::hear(uint64_t said) noexcept {
  const Links behind = unpacked(said);
  known_ = {.trips = std::min(own_.trips + behind.trips, most(kTripsBits)),
            .longestTrip = std::max(own_.longestTrip, behind.longestTrip),
            .leastRate = std::min(own_.leastRate, behind.leastRate)};
  if (++numHeard_ == numMembers_ - 1) {
    agreed_ = known_;
    numHeard_ = 0;
  }
}

}  // namespace baguarun::net
