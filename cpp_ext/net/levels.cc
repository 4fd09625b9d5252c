#include "net/levels.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "net/scale.h"
#include "net/shm_steps.h"

namespace baguarun::net {

using shm::bytesOf;
using shm::copyBytes;

namespace {

// 16-bit floats up to there are summed up as fp32.
constexpr size_t kWidenedBytes = 64 << 10;

std::vector<int> everybody(const HostMap& map) {
  std::vector<int> ranks(map.hostOf.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// The rank at `place` of each host, the first one where there are not as many.
std::vector<int> atPlace(const HostMap& map, size_t place) {
  std::vector<int> ranks;
  for (const std::vector<int>& host : map.hosts) {
    ranks.push_back(host[place < host.size() ? place : 0]);
  }
  return ranks;
}

ReduceOp withoutAverage(ReduceOp op) { return op == ReduceOp::kAvg ? ReduceOp::kSum : op; }

int divisorOf(ReduceOp op, size_t count) { return op == ReduceOp::kAvg ? static_cast<int>(count) : 1; }

bool isHalf(Dtype dtype) { return dtype == Dtype::kFloat16 || dtype == Dtype::kBFloat16; }

}  // namespace

Levels::Levels(const HostMap& map, int rank, ShmGroup* local, WireContext& context)
    : map_(map),
      rank_(rank),
      host_(static_cast<size_t>(map.hostOf[static_cast<size_t>(rank)])),
      place_(map.placeOf[static_cast<size_t>(rank)]),
      local_(local),
      context_(context),
      flat_(context, everybody(map), static_cast<size_t>(rank)),
      rail_(context, atPlace(map, static_cast<size_t>(place_)), host_),
      leaders_(context, atPlace(map, 0), host_) {
  if (local_ != nullptr && map_.isEven()) {
    overRails_.emplace(context_, *local_, rail_);
  }
}

std::byte* Levels::stage(size_t bytes) {
  if (stage_.size() < bytes) {
    stage_.resize(bytes);
  }
  return stage_.data();
}

// One rank of each host: the root of its own, else the first.
WireGroup Levels::speakers(int root) {
  std::vector<int> ranks = atPlace(map_, 0);
  ranks[static_cast<size_t>(map_.hostOf[static_cast<size_t>(root)])] = root;
  return WireGroup(context_, std::move(ranks), host_);
}

void Levels::allReduce(const Call& call, const void* in, void* out, const RailAllReduce::Arrived& arrived) {
  const size_t each = elementBytes(call.dtype);
  if (isHalf(call.dtype) && call.count * each <= kWidenedBytes) {
    std::vector<float> wide(call.count);
    widen(call.dtype, in, wide.data(), call.count);
    std::byte* const sum = bytesOf(wide.data());
    reduceByLeaders(call, sum, sum, call.count, Dtype::kFloat32, call.op);
    narrow(call.dtype, wide.data(), out, call.count);
    return;
  }
  size_t left = call.count;
  if (overRails_ && RailAllReduce::isFor(call)) {
    overRails_->run(context_.ownTrail(call.sequence), in, out, arrived);
    left = RailAllReduce::numLeft(call, local_->size());
  }
  if (left > 0) {
    const size_t begin = (call.count - left) * each;
    reduceByLeaders(call, bytesOf(in) + begin, bytesOf(out) + begin, left, call.dtype, call.op);
  }
}

void Levels::reduceByLeaders(const Call& call, const std::byte* in, std::byte* out, size_t count, Dtype dtype,
                             ReduceOp op) {
  const Reduction reduction{
      .dtype = dtype, .op = withoutAverage(op), .divisor = divisorOf(op, map_.hostOf.size())};
  if (local_ != nullptr) {
    local_->reduce(in, out, count, dtype, reduction.op, 0);
    in = out;
  }
  if (isLeader()) {
    const auto findNext = [this] { return local_ == nullptr ? context_.nextAllReduce() : std::nullopt; };
    leaders_.allReduce(context_.ownTrail(call.sequence), in, out, count, reduction, findNext);
  }
  if (local_ != nullptr) {
    local_->broadcast(out, count * elementBytes(dtype), 0);
  }
}

void Levels::reduce(const Call& call, void* data, size_t count, Dtype dtype, ReduceOp op, int root) {
  const size_t bytes = count * elementBytes(dtype);
  if (isHalf(dtype) && bytes <= kWidenedBytes) {
    std::vector<float> wide(count);
    widen(dtype, data, wide.data(), count);
    reduce(call, wide.data(), count, Dtype::kFloat32, op, root);
    if (rank_ == root) {
      narrow(dtype, wide.data(), data, count);
    }
    return;
  }
  WireGroup speakers = this->speakers(root);
  const int speaker = speakers.members()[host_];
  std::byte* sum = bytesOf(data);
  if (rank_ == speaker && rank_ != root) {
    // Only the root's data may change.
    sum = stage(bytes);
    copyBytes(sum, data, bytes);
  }
  if (local_ != nullptr) {
    local_->reduce(sum, sum, count, dtype, withoutAverage(op), map_.placeOf[static_cast<size_t>(speaker)]);
  }
  if (rank_ == speaker) {
    speakers.reduce(call, sum, count,
                    {.dtype = dtype, .op = withoutAverage(op), .divisor = divisorOf(op, map_.hostOf.size())},
                    static_cast<size_t>(map_.hostOf[static_cast<size_t>(root)]));
  }
}

void Levels::reduceScatter(const Call& call, const void* in, void* out, size_t count, Dtype dtype,
                           ReduceOp op) {
  const size_t bytes = count * elementBytes(dtype);
  const size_t numRanks = map_.hostOf.size();
  if (isHalf(dtype) && bytes * numRanks <= kWidenedBytes) {
    std::vector<float> wide(count * numRanks);
    std::vector<float> result(count);
    widen(dtype, in, wide.data(), wide.size());
    reduceScatter(call, wide.data(), result.data(), count, Dtype::kFloat32, op);
    narrow(dtype, result.data(), out, count);
    return;
  }
  if (map_.isEven()) {
    scatterOverRails(call, bytesOf(in), out, count, dtype, op);
    return;
  }
  std::byte* const all = stage(bytes * numRanks);
  reduceByLeaders(call, bytesOf(in), all, count * numRanks, dtype, op);
  copyBytes(out, all + static_cast<size_t>(rank_) * bytes, bytes);
}

// Inside the host, each rank gets the blocks of its rail; along the rail, its own.
void Levels::scatterOverRails(const Call& call, const std::byte* in, void* out, size_t count, Dtype dtype,
                              ReduceOp op) {
  const size_t bytes = count * elementBytes(dtype);
  const size_t numHosts = map_.hosts.size();
  const size_t numLocal = map_.hosts[0].size();
  std::byte* const byRail = stage(bytes * numHosts * numLocal);
  for (size_t place = 0; place < numLocal; ++place) {
    for (size_t host = 0; host < numHosts; ++host) {
      const auto rank = static_cast<size_t>(map_.hosts[host][place]);
      copyBytes(byRail + (place * numHosts + host) * bytes, in + rank * bytes, bytes);
    }
  }
  std::byte* const own = byRail + static_cast<size_t>(place_) * numHosts * bytes;
  if (local_ != nullptr) {
    local_->reduceScatter(byRail, own, count * numHosts, dtype, op);
  }
  rail_.reduceScatter(call, own, out, count,
                      {.dtype = dtype, .op = withoutAverage(op), .divisor = divisorOf(op, numHosts)});
}

void Levels::allGather(const Call& call, const void* in, void* out, size_t bytes) {
  if (map_.isEven()) {
    gatherOverRails(call, bytesOf(in), bytesOf(out), bytes);
  } else {
    gatherByLeaders(call, bytesOf(in), bytesOf(out), bytes);
  }
}

void Levels::gatherOverRails(const Call& call, const std::byte* in, std::byte* out, size_t bytes) {
  const size_t numHosts = map_.hosts.size();
  const size_t numLocal = map_.hosts[0].size();
  if (numLocal == 1) {
    rail_.allGather(call, in, out, bytes);
    return;
  }
  std::byte* const byRail = stage(bytes * numHosts * numLocal);
  std::byte* const own = byRail + static_cast<size_t>(place_) * numHosts * bytes;
  rail_.allGather(call, in, own, bytes);
  local_->allGather(own, byRail, numHosts * bytes);
  for (size_t place = 0; place < numLocal; ++place) {
    for (size_t host = 0; host < numHosts; ++host) {
      const auto rank = static_cast<size_t>(map_.hosts[host][place]);
      copyBytes(out + rank * bytes, byRail + (place * numHosts + host) * bytes, bytes);
    }
  }
}

// The leaders exchange as many blocks as the largest host has.
void Levels::gatherByLeaders(const Call& call, const std::byte* in, std::byte* out, size_t bytes) {
  size_t most = 0;
  for (const std::vector<int>& host : map_.hosts) {
    most = std::max(most, host.size());
  }
  std::byte* const byHost = stage(bytes * most * map_.hosts.size());
  std::byte* const own = byHost + host_ * most * bytes;
  if (local_ != nullptr) {
    local_->gather(in, own, bytes, 0);
  } else {
    copyBytes(own, in, bytes);
  }
  if (isLeader()) {
    leaders_.allGather(call, own, byHost, most * bytes);
  }
  if (local_ != nullptr) {
    local_->broadcast(byHost, bytes * most * map_.hosts.size(), 0);
  }
  for (size_t rank = 0; rank < map_.hostOf.size(); ++rank) {
    const size_t at = static_cast<size_t>(map_.hostOf[rank]) * most + static_cast<size_t>(map_.placeOf[rank]);
    copyBytes(out + rank * bytes, byHost + at * bytes, bytes);
  }
}

void Levels::broadcast(const Call& call, void* data, size_t bytes, int root) {
  WireGroup speakers = this->speakers(root);
  const int speaker = speakers.members()[host_];
  if (rank_ == speaker) {
    speakers.broadcast(call, data, bytes, static_cast<size_t>(map_.hostOf[static_cast<size_t>(root)]));
  }
  if (local_ != nullptr) {
    local_->broadcast(data, bytes, map_.placeOf[static_cast<size_t>(speaker)]);
  }
}

void Levels::barrier(const Call& call) {
  if (local_ != nullptr) {
    local_->barrier();
  }
  if (isLeader()) {
    leaders_.barrier(call);
  }
  if (local_ != nullptr) {
    local_->barrier();
  }
}

}  // namespace baguarun::net
