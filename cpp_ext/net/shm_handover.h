// How the processes of a host get the descriptors that they share: rank 0 hands them out over an abstract
// Unix socket to those of its user who know a token.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "net/socket.h"

namespace baguarun::net {

// Throws Error(kSystem) with what `error` means.
[[noreturn]] void throwShmError(const std::string& what, int error);

// The memory of a segment, and an eventfd for each rank.
struct ShmHandover {
  Fd memory;
  std::vector<Fd> doorbells;

  static std::vector<Fd> makeDoorbells(int count);
};

// How long to wait for others.
struct Patience {
  Clock::time_point deadline;
  // Called while waiting; what it throws ends the wait. May be empty.
  std::function<void()> check;
};

// The socket of rank 0. Throws Error(kSystem).
Fd listenForShm(const std::string& socketName, int backlog);

// Hands out to `numPeers` processes. Throws Error: kTimeout, kSystem.
void serveShm(const Fd& listener, const ShmHandover& handover, const std::string& token, int numPeers,
              const Patience& patience);

// What rank 0 hands out, which is asked again where it hangs up. Throws Error: kTimeout, kSystem, kRemote.
ShmHandover fetchShm(const std::string& socketName, const std::string& token, size_t numDoorbells,
                     const Patience& patience);

}  // namespace baguarun::net
