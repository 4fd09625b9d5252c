// The memory that the processes of one host share, and how they find each other.
//
// A segment is an anonymous memory file (memfd). Rank 0 makes it and hands the descriptor to the others over
// an abstract Unix socket; no name in /dev/shm or elsewhere ever exists, so nothing is left behind however a
// process ends, and the small /dev/shm of a container is no limit.
#pragma once

#include <sched.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "net/socket.h"

namespace baguarun::net {

// Gives every rank's blob in rank order, its own included. All ranks call it the same number of times. It may
// throw; a bound on its time is its own business.
using BlobExchange = std::function<std::vector<std::string>(const std::string& mine)>;

// A process of the segment, seen from this one.
struct ShmPeer {
  int pid = 0;
  Fd pidfd;  // becomes readable when the process ends; empty for our own process
  // An eventfd on which it can be woken where it sleeps on descriptors; see ShmGroup::ring().
  Fd doorbell;
};

// Owns the mapping and the peers' pidfds. Threads: read-only after construction.
class ShmSegment {
 public:
  struct Options {
    // This process's place among `size` processes.
    int rank = 0;
    int size = 1;
    // The same for all members of this group, and for no other group alive on the host.
    std::string nonce;
    // Bytes that are reserved at once: ENOMEM becomes an Error here, not a SIGBUS later.
    size_t reservedBytes = 0;
    // Bytes of address space; what lies beyond `reservedBytes` costs memory when it is touched.
    size_t totalBytes = 0;
    // Bound of the hand-over of the descriptor.
    std::chrono::milliseconds timeout{30'000};
    // What the processes are called in errors; empty: by their place.
    std::vector<int> labels = {};
    // As in Communicator::Options.
    std::function<void()> check = {};
  };

  // Joins or makes the segment with the other ranks. Throws Error on every rank where one of them fails:
  // kSystem (no memory; not one host, or another PID namespace), kUsage (ranks that disagree about the
  // group), kRemote (a process ended meanwhile).
  static std::shared_ptr<ShmSegment> connect(const Options& options, const BlobExchange& exchange);

  // A segment of `size` ranks that are threads of this process.
  static std::shared_ptr<ShmSegment> forThreads(int size, size_t totalBytes);

  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;
  ~ShmSegment();

  std::byte* data() const noexcept { return data_; }
  size_t bytes() const noexcept { return bytes_; }
  int size() const noexcept { return static_cast<int>(peers_.size()); }
  const ShmPeer& peer(int rank) const { return peers_[static_cast<size_t>(rank)]; }

  // Gives the memory of the whole pages in a part of the segment back to the system; they hold zeros then.
  void giveBack(std::byte* data, size_t bytes) const noexcept;

  // How many CPUs the ranks may use, taken together.
  int usableCpus() const noexcept { return usableCpus_; }

  // "rank 2 (pid 4711)".
  std::string peerName(int rank) const;
  // What the process at place `rank` is called.
  int label(int rank) const { return labels_.empty() ? rank : labels_[static_cast<size_t>(rank)]; }

 private:
  ShmSegment() = default;
  void map(const Fd& fd, size_t bytes);

  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  int usableCpus_ = 1;
  std::vector<ShmPeer> peers_;
  std::vector<int> labels_;
};

// Throws Error(kSystem) where the machine has not `bytes` of memory left; `what` says for what they are
// wanted.
void checkMemoryLeft(size_t bytes, const std::string& what);

}  // namespace baguarun::net
