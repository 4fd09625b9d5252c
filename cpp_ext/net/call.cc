#include "net/call.h"

#include <array>

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

}  // namespace baguarun::net
