// One rank's membership of a group, wherever the others are: memory shared with the ranks of its host, links
// to the ranks of others, and the collectives and messages that run over both.
//
// Ranks are on one host if they can share memory (see host_map.h). All-reduce, reduce-scatter, all-gather and
// broadcast between hosts go in two levels: inside the host first, then between ranks of equal local rank
// (rails) where every host has as many ranks, else between one rank of each host. Results of a reduction are
// the same bits on all ranks. 16-bit floats are summed in fp32 and rounded once on one host, and everywhere
// up to 64 KiB; larger ones are rounded once more per host on their way between hosts.
//
// Collectives block and run in the order of the calls, which must be the same on all ranks. Every call says
// to those whom it sends to what it is and what came before it, and calls that differ end with Fault::kUsage
// on every rank: none comes out of a barrier, all-reduce, reduce-scatter, all-gather or all-to-all, where it
// needs all others, before all have called the same up to there. A broadcast, reduce, gather or scatter that
// needs only some of the others, or none, may return first. Messages between two ranks do not block: they
// are matched by tag, in any order of tags, first-in first-out within one, and move while anybody is in
// progress() or in a collective.
//
// Failure. A rank that dies, breaks the protocol or gives no sign of life, and a deadline that passes, break
// the communicator: every operation under way and every later one throws the same Error naming the rank, and
// the other ranks get to know the reason. There is no repair: destroy it and make another with a new nonce.
//
// Threads: one at a time (whoever drives), but isend(), irecv() and wake() also from any other at the same
// time, and abort() and fail() from any thread at any time before the destructor. After fork() the child may
// only destroy it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "net/env.h"
#include "net/error.h"
#include "net/reduce.h"
#include "net/shm_segment.h"
#include "net/socket.h"

namespace baguarun::net {

class Communicator {
 public:
  static constexpr int kAnySource = -1;

  struct Options {
    int rank = 0;
    int size = 1;
    // The same on all ranks, and for no other group alive or gone.
    std::string nonce;
    Env env;
    // Bound of the making.
    std::chrono::milliseconds timeout{30'000};
    // False: links also to ranks of this host.
    bool shareMemory = true;
    // Room for allocate(), the same on all ranks, a multiple of 4096. Costs memory when it is allocated.
    size_t arenaBytes = 0;
    // Ranks that say different things here share no memory, whoever is on their host. Empty: what the system
    // says.
    std::string host = {};
    // False: no signs of life of its own, whatever `env` says, as another communicator of the same ranks
    // gives them, and fail() is called when that one finds a silent rank.
    bool beats = true;
    // Called again and again while the making waits for others; what it throws gives it up. May be empty.
    std::function<void()> check = {};
  };

  // An all-reduce that this rank calls after the one that it is in; its data are as they will be then.
  struct NextAllReduce {
    void* data;
    size_t count;
    Dtype dtype;
    ReduceOp op;
  };

  // A message under way. Shared by who asked for it and the communicator.
  class Message {
   public:
    virtual ~Message() = default;
    // True once the buffer belongs to the caller again. Throws the communicator's Error if it broke before.
    virtual bool isDone() const = 0;
    // Who it came from; of use with kAnySource.
    virtual int source() const = 0;
  };

  // Makes the group; all ranks call it. `exchange` is called the same number of times on all ranks. Throws
  // Error: kUsage (ranks that disagree, bad options), kRemote, kTimeout, kSystem.
  Communicator(const Options& options, const BlobExchange& exchange);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Collectives. Arguments as in shm_group.h; `deadline` bounds the call.
  void allReduce(void* data, size_t count, Dtype dtype, ReduceOp op, Clock::time_point deadline);
  // Of what is at `in`, which stays as it is, to `out`, which may be the same. `arrived` is told on the way
  // that so many elements, from the first on, are as they will be; that all are it may not be told.
  void allReduceInto(const void* in, void* out, size_t count, Dtype dtype, ReduceOp op,
                     Clock::time_point deadline, const std::function<void(size_t count)>& arrived);
  void reduce(void* data, size_t count, Dtype dtype, ReduceOp op, int root, Clock::time_point deadline);
  void reduceScatter(const void* in, void* out, size_t count, Dtype dtype, ReduceOp op,
                     Clock::time_point deadline);
  void allGather(const void* in, void* out, size_t bytes, Clock::time_point deadline);
  void broadcast(void* data, size_t bytes, int root, Clock::time_point deadline);
  void gather(const void* in, void* out, size_t bytes, int root, Clock::time_point deadline);
  void scatter(const void* in, void* out, size_t bytes, int root, Clock::time_point deadline);
  void allToAllV(const void* in, std::span<const size_t> sendBytes, void* out,
                 std::span<const size_t> recvBytes, Clock::time_point deadline);
  void barrier(Clock::time_point deadline);

  // For who queues calls: `find` is asked by allReduce() while that waits for others with all of its own data
  // sent. What it has found is the next call, whose data belong to the communicator from then on: between
  // hosts the first of them set out meanwhile, so that lines do not run empty from call to call; where hosts
  // have several ranks, when all of those know it. Threads: before the first call.
  void lookAheadBy(std::function<std::optional<NextAllReduce>()> find);

  // Messages. `data` must stay until isDone(). A message whose size is not `bytes` breaks the communicator
  // with Fault::kUsage naming both sizes. To itself a rank may send, too.
  std::shared_ptr<Message> isend(const void* data, size_t bytes, int to, uint32_t tag);
  std::shared_ptr<Message> irecv(void* data, size_t bytes, int from, uint32_t tag);

  // Moves messages. False: nothing could move.
  bool progress();
  // Whether somebody must go on to call progress() though no message is awaited here: a short one that was
  // sent may wait for room at the peer, and other hosts for word of what has broken the group.
  bool hasUnsent() const;
  // Sleeps until progress() may find something to do, wake() or abort() is called, or `until` has passed.
  void sleep(Clock::time_point until);
  // Ends a sleep(), also the next one.
  void wake() noexcept;

  // Breaks the communicator with Fault::kAborted: everything under way ends within 100 ms on this rank, and
  // the others are told `reason`.
  void abort(const std::string& reason) noexcept;
  // The same with an error that was found elsewhere, and concerns one of these ranks.
  void fail(const Error& error) noexcept;
  // The error it broke with, if it did.
  std::optional<Error> failure() const;

  // Memory of zeros in which allReduce() among the ranks of one host needs no copy, if all ranks call it with
  // such memory; nullptr where there is none (not all ranks on one host, arena used up). It may outlive the
  // communicator, and goes back to the system, but not to the arena, with its last owner. Throws
  // Error(kSystem) where the machine has too little. Threads: one at a time, beside whoever drives.
  std::shared_ptr<void> allocate(size_t bytes);
  // Bytes that allocate() can still give.
  size_t roomLeft() const noexcept;

  // How often somebody must call progress(), or anything else that moves messages, lest the other ranks take
  // this one for dead; 0: whenever it likes.
  std::chrono::milliseconds beatInterval() const noexcept;

  int rank() const noexcept;
  int size() const noexcept;
  // Bytes handed to links so far.
  uint64_t bytesSent() const noexcept;

 private:
  class Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace baguarun::net
