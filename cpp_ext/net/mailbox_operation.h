// One send or receive, and what both halves of a mailbox count by.
#pragma once

#include <atomic>
#include <memory>

#include "net/mailbox.h"

namespace baguarun::net {

struct Mailbox::Operation : Communicator::Message {
  bool isDone() const override {
    if (done.load(std::memory_order_acquire)) {
      return true;
    }
    verdict->checkAtRest();
    return done.load(std::memory_order_acquire);
  }
  int source() const override { return from.load(std::memory_order_relaxed); }

  std::shared_ptr<const Verdict> verdict;
  bool isSend = false;
  std::byte* data = nullptr;  // only read where isSend
  uint64_t bytes = 0;
  int peer = 0;  // who it was asked for; kAnySource: anybody
  uint32_t tag = 0;
  uint64_t id = 0;
  uint64_t moved = 0;
  bool isOffered = false;  // a receive whose room the sender knows as `id`
  bool isPushed = false;
  bool isHalfDone = false;  // a pushed send that the network has, or whose room there is word of
  // Of what is kept: the memory, and the receive that has got it before all of it was there.
  std::unique_ptr<std::byte[]> memory;
  std::shared_ptr<Operation> owner;
  std::atomic<int> from{Communicator::kAnySource};
  std::atomic<bool> done{false};
};

// Even an empty message costs memory where it is kept.
inline constexpr uint64_t kKeepingBytes = 64;
// Packets taken or sent per call, so that a busy peer does not keep the caller from the others.
inline constexpr int kMaxPackets = 16;

}  // namespace baguarun::net
