// Collectives of ranks on several hosts, in levels: shared memory inside a host, links between hosts.
//
// Where every host has as many ranks, large data goes over rails: ranks of equal place on their hosts reduce
// or gather their share among each other, all at once. Else one rank of each host speaks for all.
#pragma once

#include <optional>
#include <vector>

#include "net/host_map.h"
#include "net/rail_all_reduce.h"
#include "net/shm_group.h"
#include "net/wire_group.h"

namespace baguarun::net {

// Threads: one at a time.
class Levels {
 public:
  // `local`: the ranks of this host, nullptr where this is the only one.
  Levels(const HostMap& map, int rank, ShmGroup* local, WireContext& context);

  // As Communicator's; arguments have been checked.
  void allReduce(const Call& call, const void* in, void* out, const RailAllReduce::Arrived& arrived);
  void reduce(const Call& call, void* data, size_t count, Dtype dtype, ReduceOp op, int root);
  void reduceScatter(const Call& call, const void* in, void* out, size_t count, Dtype dtype, ReduceOp op);
  void allGather(const Call& call, const void* in, void* out, size_t bytes);
  void broadcast(const Call& call, void* data, size_t bytes, int root);
  void barrier(const Call& call);
  // Straight between ranks.
  WireGroup& flat() noexcept { return flat_; }

 private:
  bool isLeader() const noexcept { return place_ == 0; }
  std::byte* stage(size_t bytes);
  WireGroup speakers(int root);
  void reduceByLeaders(const Call& call, const std::byte* in, std::byte* out, size_t count, Dtype dtype,
                       ReduceOp op);
  void scatterOverRails(const Call& call, const std::byte* in, void* out, size_t count, Dtype dtype,
                        ReduceOp op);
  void gatherOverRails(const Call& call, const std::byte* in, std::byte* out, size_t bytes);
  void gatherByLeaders(const Call& call, const std::byte* in, std::byte* out, size_t bytes);

  const HostMap map_;
  const int rank_;
  const size_t host_;
  const int place_;
  ShmGroup* const local_;
  WireContext& context_;
  WireGroup flat_;
  WireGroup rail_;     // where the hosts are even
  WireGroup leaders_;  // where this is one
  std::optional<RailAllReduce> overRails_;
  std::vector<std::byte> stage_;
};

}  // namespace baguarun::net
