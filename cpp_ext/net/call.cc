#include "net/call.h"

#include <array>
#include <bit>
#include <type_traits>

namespace baguarun::net {

std::string Call::text() const {
  constexpr std::array kNames = {"nothing",    "barrier",   "all-reduce", "reduce",  "reduce-scatter",
                                 "all-gather", "broadcast", "gather",     "scatter", "all-to-all"};
  const auto index = static_cast<size_t>(kind);
  std::string text = index < kNames.size() ? kNames[index] : "something unknown";
  if (kind == CallKind::kAllReduce || kind == CallKind::kReduce || kind == CallKind::kReduceScatter) {
    text += std::string(" ") + name(op) + " of " + std::to_string(count) + " " + name(dtype);
  } else if (kind != CallKind::kBarrier && kind != CallKind::kAllToAll) {
    text += " of " + std::to_string(count) + " bytes";
  }
  if (kind == CallKind::kReduce || kind == CallKind::kBroadcast || kind == CallKind::kGather ||
      kind == CallKind::kScatter) {
    text += " from/to rank " + std::to_string(root);
  }
  return text + " as call " + std::to_string(sequence);
}

CallTrail CallTrail::followedBy(const Call& next) const {
  static_assert(std::has_unique_object_representations_v<Call>);
  uint64_t digest = past;
  for (const uint64_t word : std::bit_cast<std::array<uint64_t, sizeof(Call) / sizeof(uint64_t)>>(call)) {
    // An odd factor and a shift lose nothing of a word and spread it.
    digest = (digest ^ word) * 0x9e3779b97f4a7c15;
    digest ^= digest >> 32;
  }
  return {.call = next, .past = digest, .previous = call};
}

std::optional<std::string> difference(const CallTrail& its, const CallTrail& ours, const std::string& us) {
  // The first mistake says most.
  for (const Call* const mine : {&ours.previous, &ours.call}) {
    for (const Call* const theirs : {&its.previous, &its.call}) {
      if (mine->kind != CallKind::kNone && theirs->sequence == mine->sequence && *theirs != *mine) {
        return "calls " + theirs->text() + ", where " + us + " calls " + mine->text();
      }
    }
  }
  if (its.call == ours.call && its.past != ours.past) {
    return "has made other calls before " + its.call.text() + " than " + us;
  }
  return std::nullopt;
}

}  // namespace baguarun::net
