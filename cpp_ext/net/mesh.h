// The links of one rank to the others of its group, made when they are first needed.
//
// Every rank listens on one port; its card (address and nonce) goes to the others by the exchange that makes
// the group. The link for collectives between two ranks is made by the smaller one; messages go over a link
// that their sender makes, so that neither side waits for the other's wish to talk; control links lead from
// every rank to rank 0 and are made at once.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "net/connector.h"
#include "net/env.h"
#include "net/link.h"
#include "net/listener.h"

namespace baguarun::net {

// Threads: one at a time, bytesSent() any.
class Mesh {
 public:
  enum class Use : uint32_t { kControl, kCollectives, kSending, kReceiving };

  // Listens. Throws Error: kSystem, kUsage (no such interface).
  Mesh(int rank, int size, const Env& env);

  // What the others must know of this rank.
  std::string card() const;
  // Everybody's, in rank order. Throws Error(kUsage) for one that is none.
  void meet(const std::vector<std::string>& cards);

  // The link to `rank`, nullptr where there is none yet. kReceiving: the one that it sends on.
  Link* find(Use use, int rank) const noexcept;
  // Sees to it that there will be one, unless it has ended. Throws Error: kSystem, kRemote (cannot connect).
  void want(Use use, int rank);
  // Something was posted on the link: `bytes` to be sent.
  void poke(Use use, int rank, size_t bytes);
  // What a link ended with that is for some of the others only (all but kCollectives), or why kSending could
  // not be made: who left in order needs no word any more.
  const std::optional<Error>& end(Use use, int rank) const noexcept;

  // Moves what can be moved now. False: nothing. Throws the Error of a link for collectives, or of one that
  // could not be made.
  bool progress();
  // Whether something that was posted on a link of that use is under way.
  bool hasPending(Use use) const noexcept;
  // Readable when progress() may find something to do; call it at least every second.
  int pollFd() const noexcept { return epoll_.fd(); }

  // "rank 2 (10.0.0.4:4711)".
  std::string name(int rank) const;
  uint64_t bytesSent() const noexcept { return bytesSent_.load(std::memory_order_relaxed); }

 private:
  struct Slot {
    std::unique_ptr<Connector> connector;
    std::unique_ptr<Link> link;
    std::optional<Error> end;
    bool isActive = false;
  };
  struct Contact {
    Address address;
    Nonce nonce{};
  };

  size_t indexOf(Use use, int rank) const noexcept;
  void activate(size_t index);
  void acceptAll();
  void take(size_t index, std::unique_ptr<Link> link);
  bool advance(size_t index);

  const int rank_;
  const int size_;
  const Env env_;
  const Env controlEnv_;
  Listener listener_;
  std::vector<Contact> contacts_;
  std::vector<Slot> slots_;
  std::vector<size_t> active_;
  Epoll epoll_;
  Clock::time_point lastSweep_;
  std::atomic<uint64_t> bytesSent_{0};
};

}  // namespace baguarun::net
