// The transport's settings. env.cc is the only file of the transport that reads the environment.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace baguarun::net {

// Which address families interfaces may have (NCCL_SOCKET_FAMILY).
enum class Family { kAny, kIPv4, kIPv6 };

// How all-reduces between hosts go: as the network's distances and speed make it worth, around a ring, or
// straight to who sums up and from there to all.
enum class AllReduceWay { kByDistance, kRing, kDirect };

// All settings, read once. Every field says its variable, unit and default. Threads: a value.
struct Env {
  // BAGUA_NET_NSTREAMS: TCP connections per link, 1 to 64 (4). Both sides' smaller number is used. Take 8
  // where the network limits each flow (most clouds do).
  const int numStreams = 4;

  // BAGUA_NET_CHUNK_BYTES: largest piece of a message that one stream carries at a time, 4096 to 1048576
  // (131072), where the network needs longer than 4 ms for such a piece; up to 1048576 where it is faster.
  // Both sides' smaller number is used.
  const uint32_t chunkBytes = 128 << 10;

  // BAGUA_NET_SECRET: what members of one job share; whoever cannot prove to know it is dropped. Empty: none.
  // It keeps strangers and other jobs out. It does not encrypt.
  const std::string secret = {};

  // BAGUA_NET_CONNECT_TIMEOUT_S: how long establishing a link may take, in seconds (60).
  const std::chrono::milliseconds connectTimeout{60'000};

  // BAGUA_NET_HELLO_TIMEOUT_S: how long a stranger on our port may take to say hello, in seconds (10).
  const std::chrono::milliseconds helloTimeout{10'000};

  // BAGUA_NET_PEER_TIMEOUT_S: after how many seconds without a sign of life (an acknowledgement of data, a
  // keepalive or a window probe) the peer's machine is taken for dead (20). A peer that merely does not read
  // is alive.
  const std::chrono::milliseconds peerTimeout{20'000};

  // BAGUA_NET_BEAT_TIMEOUT_S: after how many seconds without a sign of life from a rank a communicator of
  // several hosts breaks, whether that rank is waited for or not; 0.1 or more (never). The same on all ranks.
  // `baguarun run --elastic in-place` sets it.
  const std::chrono::milliseconds beatTimeout{0};

  // BAGUA_NET_ALL_REDUCE: auto, ring or direct (auto): how large all-reduces between three hosts and more go.
  // The same on all ranks. The results are the same bits.
  const AllReduceWay allReduceWay = AllReduceWay::kByDistance;

  // NCCL_SOCKET_IFNAME: interfaces to use, by NCCL's rules (see interfaces.h). Unset: NCCL's default order.
  const std::optional<std::string> ncclIfname = {};

  // GLOO_SOCKET_IFNAME: comma list of whole interface names, as torch reads it for Gloo.
  const std::optional<std::string> glooIfname = {};

  // NCCL_SOCKET_FAMILY: AF_INET or AF_INET6 (both).
  const Family family = Family::kAny;

  // NCCL_COMM_ID: "address:port" of the root; interfaces of its network come first among equals.
  const std::string commId = {};

  // NCCL_HOSTID: ranks of one host that have different ones share no memory, as if they were on two hosts.
  const std::string hostId = {};

  // From the process's environment. Throws Error(kUsage) naming the variable, what was found and what is
  // wanted.
  static Env read();

  // The same from `lookup`, which gives the value of a variable or nullptr.
  static Env read(const std::function<const char*(const char*)>& lookup);
};

}  // namespace baguarun::net
