// Collectives among the processes of one host, over memory that they share.
//
// An operation is a row of steps. In each, a rank copies a chunk into its slot of a ring, says so, and reads
// the others' slots. No rank is more than two steps ahead of another, so a ring of five slots needs no other
// bookkeeping: when a rank writes step k, everybody has read step k - 5 (see shm_group.cc).
// All-reduce up to 64 KiB: every rank copies in and reduces everything, one synchronisation. Above: chunks of
// 256 or 512 KiB, of which each rank reduces its share, pipelined; per rank and byte of data one copy in, one
// share of the reduction, one copy out. Data inside the segment (allocate()) is reduced in place, without
// copies. Results are the same bits on all ranks.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "net/call.h"
#include "net/reduce.h"
#include "net/shm_segment.h"
#include "net/shm_sync.h"

namespace baguarun::net {

// One rank's membership. A failure (an Error from any operation but those for arguments) is final for the
// group on every rank: destroy it and make another. Threads: collectives and packets from one thread at a
// time, packets also from the hook; allocate() and roomLeft() from one, which may be another; abort(), fail()
// and ring() from any.
class ShmGroup {
 public:
  static constexpr int kMaxRanks = 64;
  struct Options {
    int rank = 0;
    int size = 1;
    // The same on all ranks, unlike that of any other group alive on the host.
    std::string nonce;
    // Bound of the group's making, and of each operation without setDeadline().
    std::chrono::milliseconds timeout{30'000};
    // Room for this rank's allocate(), the same on all ranks. Costs memory when it is allocated.
    size_t arenaBytes = 0;
    // What the ranks are called in errors; empty: by their place.
    std::vector<int> labels = {};
    // As in Communicator::Options.
    std::function<void()> check = {};
  };

  // Joins the group; all ranks call it. Throws as ShmSegment::connect() and Error(kUsage) for bad options.
  ShmGroup(const Options& options, const BlobExchange& exchange);

  // Rank of a group over a segment made by ShmSegment::forThreads(size, segmentBytes(size, arenaBytes)).
  ShmGroup(const Options& options, std::shared_ptr<ShmSegment> segment);

  static size_t segmentBytes(int size, size_t arenaBytes);

  ShmGroup(const ShmGroup&) = delete;
  ShmGroup& operator=(const ShmGroup&) = delete;
  // Leaves; who still waits for this rank gets an Error.
  ~ShmGroup();

  // `out`: the reduction of `in` over all ranks. They may be the same; if that place is inside the segment,
  // it is so on all ranks.
  void allReduce(const void* in, void* out, size_t count, Dtype dtype, ReduceOp op);

  // As allReduce(), but only root's `out` is written to.
  void reduce(const void* in, void* out, size_t count, Dtype dtype, ReduceOp op, int root);

  // `in`: size() blocks of `count` elements. `out`: the reduction of block rank(). It may be that block of
  // `in`.
  void reduceScatter(const void* in, void* out, size_t count, Dtype dtype, ReduceOp op);

  // `out`: the ranks' `in`, `bytes` each, in rank order. `in` may be its own place in `out`.
  void allGather(const void* in, void* out, size_t bytes);

  void broadcast(void* data, size_t bytes, int root);

  // `out` counts on root only, `in` on all.
  void gather(const void* in, void* out, size_t bytes, int root);

  // `in` counts on root only.
  void scatter(const void* in, void* out, size_t bytes, int root);

  // Block q of `in` goes to rank q, block q of `out` comes from rank q; blocks lie one behind the other.
  // Sizes in bytes; what q sends to r must be what r expects of q. `in` and `out` must not overlap.
  void allToAllV(const void* in, std::span<const size_t> sendBytes, void* out,
                 std::span<const size_t> recvBytes);
  void allToAll(const void* in, void* out, size_t bytes);

  void barrier();

  // When the operations from now on must have ended.
  void setDeadline(Clock::time_point deadline) noexcept { fixedDeadline_ = deadline; }

  // The operations from now on are parts of the call of `trail`, which must be the same on all ranks too.
  void describe(const CallTrail& trail) noexcept { asked_ = trail; }

  // Called where an operation has to wait, before it sleeps, and while it does.
  void setHook(ShmHook hook);

  // Packets, in order between two ranks; nothing here waits. packetRoom(): memory of kPacketBytes for the
  // next packet to `to`, nullptr where it has not read the ones before; postPacket() sends what was written
  // there. nextPacket(): the next packet of `from`, nullptr where there is none; dropPacket() has read it.
  static constexpr size_t kPacketBytes = (64 << 10) + 64;
  std::byte* packetRoom(int to) const noexcept;
  void postPacket(int to) noexcept;
  const std::byte* nextPacket(int from) const noexcept;
  void dropPacket(int from) noexcept;

  // To sleep on descriptors until a packet comes or a rank fails, leaves or aborts: expectBell(), look once
  // more for something to do, wait for doorbell() to become readable, answerBell(). ring() wakes.
  void expectBell() noexcept;
  void answerBell() noexcept;
  int doorbell() const noexcept;
  void ring(int peer) noexcept;

  // Who has destroyed its group.
  bool hasLeft(int peer) const noexcept;
  // Throws where the group has failed.
  void checkFailure() const;
  // Ends the group on all ranks with `error`, in its own words. Threads: any.
  void fail(const Error& error) noexcept;

  const ShmSegment& segment() const noexcept { return *segment_; }
  // For what outlives the group: the memory stays mapped as long as somebody holds this.
  const std::shared_ptr<ShmSegment>& sharedSegment() const noexcept { return segment_; }

  // Memory in the segment, 64-byte aligned, zeroed, owned by the group. Throws Error(kSystem) when the arena
  // or the machine's memory is used up.
  void* allocate(size_t bytes);
  // Bytes that allocate() can still give.
  size_t roomLeft() const noexcept { return arenaBytes_ - arenaUsed_; }

  // Ends all operations of all ranks within 100 ms, those to come included. Threads: any.
  void abort(const std::string& reason = "") noexcept;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }

 private:
  struct Header;
  struct Layout;
  struct Cell;

  void ringAll() noexcept;
  static ShmSegment::Options segmentOptions(const Options& options);
  uint64_t beginOperation();
  void* slot(uint64_t step, int rank) const;
  Header& header(uint64_t step, int rank) const;
  void postReady(uint64_t step);
  void waitReady(uint64_t step);
  void waitDone(uint64_t step, int peer);
  void verify(uint64_t step);
  void checkRank(int rank, const char* what) const;
  bool isInSegment(const void* data, size_t bytes) const;
  Header makeHeader(CallKind kind, uint64_t count, int root = 0) const;

  // Runs `steps` steps: copyIn(k, own slot) fills a slot, copyOut(k, step) reads all of them.
  template <class CopyIn, class CopyOut>
  void exchange(const Header& call, size_t steps, CopyIn copyIn, CopyOut copyOut);

  void reduceAtOnce(const Header& call, const std::byte* in, std::byte* out);
  void reducePipelined(const Header& call, const std::byte* in, std::byte* out);
  void reduceInSegment(const Header& call, std::byte* data);

  const int rank_;
  const int size_;
  const size_t arenaBytes_;
  const std::chrono::milliseconds timeout_;
  const int ownerPid_;
  const std::shared_ptr<ShmSegment> segment_;
  const std::unique_ptr<Layout> layout_;
  std::unique_ptr<ShmWaiter> waiter_;
  uint64_t step_ = 0;
  uint64_t sequence_ = 0;
  CallTrail asked_;
  size_t arenaUsed_ = 0;
  std::optional<Clock::time_point> fixedDeadline_;
  Clock::time_point deadline_;
};

}  // namespace baguarun::net
