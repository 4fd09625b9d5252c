// A link: messages to and from one peer over several TCP streams, without threads.
//
// Messages of one direction are matched first-in first-out: the n-th isend() of one side fills the n-th
// irecv() of the other. A message is cut into chunks, and every chunk goes to whichever stream has room; what
// turns out slow gets smaller chunks, so that no stream holds the others up for long. Small messages share
// system calls. Nothing is copied but what the kernel copies, and a few kilobytes per chunk at the receiving
// side; a message whose irecv() is not posted yet waits in the sockets, so memory stays bounded.
//
// Nothing moves by itself. Bytes move inside progress(), test() and wait(), which never block except wait().
// To sleep until something can move: call progress() until it returns false, then wait for pollFd() to become
// readable (level-triggered, a new request counts as a reason to call progress() again), for no more than a
// second while requests are pending: only progress() notices a machine that vanished silently.
//
// Failure. A peer that closes, dies or breaks the protocol while it is needed, and a machine that gives no
// sign of life for `peerTimeout`, break the link: every call then throws the same Error, naming the peer, and
// the peer gets to know. Requests that are done stay good. A peer that ends its side when nothing is
// outstanding is no error. A peer that is alive but does not read or write is none, either: how long to wait
// for it is the caller's to decide (abort(), or wait() with a deadline).
//
// Threads: one at a time, but abort() from any thread at any time before the destructor. After fork() the
// child may destroy a Link: that leaves the parent's connection alone.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "net/backlog.h"
#include "net/error.h"
#include "net/frame.h"
#include "net/socket.h"
#include "net/stream.h"
#include "net/stream_count.h"

namespace baguarun::net {

class Link;

// A message under way; made by isend() and irecv(), gone once test() said done. Owned by the link.
class Request {
 public:
  Link& link() const noexcept { return *link_; }
  // What test() would find without moving anything.
  bool isDone() const noexcept { return state_ == State::kDone; }

 private:
  friend class Link;

  enum class State { kFree, kActive, kDone };

  Link* link_ = nullptr;
  State state_ = State::kFree;
  bool isSend_ = false;
  uint32_t sequence_ = 0;
  uint8_t* data_ = nullptr;      // only read where isSend_
  size_t capacity_ = 0;          // bytes at data_
  std::optional<size_t> total_;  // bytes of the message, once known
  size_t moved_ = 0;             // bytes handed to the kernel, or received
};

// What test() finds.
struct Status {
  bool done = false;
  size_t bytes = 0;  // of the message; what was sent may be less than the receiver had room for
};

class Link {
 public:
  // Requests in flight, per direction.
  static constexpr size_t kMaxRequests = 32;

  struct Settings {
    uint32_t chunkBytes;
    std::chrono::milliseconds peerTimeout;
    std::string peer;  // the name in errors
  };

  // Takes over connected sockets on which the hello is done, in the same order on both sides.
  Link(std::vector<Fd> streams, Settings settings);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // Posts a message of `size` bytes. `data` must stay as it is until the request is done. nullptr: all
  // kMaxRequests are in flight, try again after a test(). Done means that the kernel has all of it.
  Request* isend(const void* data, size_t size);

  // Posts room for a message of at most `capacity` bytes. nullptr as for isend(). A longer message breaks the
  // link with Fault::kUsage, and nothing is written behind the room.
  Request* irecv(void* data, size_t capacity);

  // Whether `request` is done; moves bytes where it is not. Once done, the request must not be used again.
  Status test(Request* request);

  // Moves what can be moved now. False: nothing could, sleeping on pollFd() is right.
  bool progress();

  // test() until done, asleep in between. Throws Error(kTimeout) after `deadline`; the request stays pending.
  size_t wait(Request* request, Clock::time_point deadline);

  // An epoll descriptor that is readable when progress() may find something to do. Valid as long as the link.
  int pollFd() const noexcept { return epoll_.fd(); }

  // Ends every operation, also one that sleeps in wait(), with Error(kAborted); tells the peer by closing.
  void abort() noexcept;

  bool hasPending() const noexcept { return numPending_ > 0; }
  // The peer has closed its side: it went away in order, or died while nothing was outstanding.
  bool peerHasClosed() const noexcept;
  const std::string& peer() const noexcept { return settings_.peer; }
  // Another name for the peer in errors from now on.
  void namePeer(std::string name) { settings_.peer = std::move(name); }
  size_t numStreams() const noexcept { return streams_.size(); }
  // To the peer, over the streams in use.
  Way way() const noexcept;
  uint32_t chunkBytes() const noexcept { return settings_.chunkBytes; }

 private:
  // Visits per stream and call, so that one busy stream or link does not keep the caller from the others.
  static constexpr int kMaxVisits = 4;

  struct Stream {
    Fd fd;
    StreamWriter writer;
    StreamReader reader;
    Backlog backlog;
    std::optional<Frame> frame;  // being received
    uint32_t frameFilled = 0;    // bytes of it that have arrived
    bool isReadable = true;      // until the kernel says otherwise
    bool isWritable = true;
    uint32_t wakeBytes = 1;    // that must have come before the kernel says that it is readable
    uint32_t shareBytes = 0;   // largest chunk it gets, and what the kernel may hold of it unsent
    uint64_t recentBytes = 0;  // written since the last rebalance()
    bool wasFull = false;      // at some time since then
    bool isHungUp = false;     // the kernel knows the end; bytes before it may still wait for their irecv()
  };

  // One direction: a ring of requests in the order of their sequence numbers.
  struct Lane {
    std::array<Request, kMaxRequests> ring;
    uint32_t posted = 0;  // sequence number of the next request
    size_t numActive = 0;
  };

  Request* post(Lane& lane, bool isSend, void* data, size_t size);
  void finish(Lane& lane, Request& request) noexcept;
  void throwIfBroken() const;
  [[noreturn]] void breakWith(Fault fault, const std::string& message);
  [[noreturn]] void breakStream(size_t index, const std::string& doing, int error);
  void shutdownStreams() noexcept;

  void pollEvents();
  bool pumpWrites();
  bool writeTo(size_t index);
  void resume();
  bool deal(Stream& stream);
  void onFull(Stream& stream);
  void rebalance();
  static void setShare(Stream& stream, uint32_t bytes);
  void beginWith(Stream& stream);
  void onPhase();
  void credit(StreamWriter& writer);

  bool pumpReads();
  bool readFrom(size_t index);
  void onDrained(Stream& stream);
  bool consumeStage(Stream& stream, size_t index);
  Request* findReceiver(const Frame& frame, size_t index);
  void advanceFrame(Stream& stream, size_t bytes);

  void checkBrokenWrite();
  void checkEnded();
  void checkSilence();

  Settings settings_;
  const int ownerPid_;
  std::vector<Stream> streams_;
  Epoll epoll_;
  std::atomic<bool> isAborted_{false};
  std::optional<Error> failure_;

  // A write that failed ends the link only when all that had arrived before is read.
  struct BrokenWrite {
    size_t stream;
    int error;
  };
  std::optional<BrokenWrite> brokenWrite_;

  Lane sends_;
  Lane receives_;
  size_t numPending_ = 0;
  uint32_t dealSequence_ = 0;  // the message that the next chunk is of
  size_t dealOffset_ = 0;
  uint64_t recentBytes_ = 0;  // of all streams
  StreamCount streamCount_;
  uint32_t limitOfOne_ = 0;  // of the first stream's buffer before others were tried
  size_t firstStream_ = 0;   // where dealing begins
  Clock::time_point lastMoved_;
  Clock::time_point lastWritten_;
  std::optional<Clock::time_point> someEndedAt_;  // while something was pending
  Clock::time_point lastChecked_;
  Clock::time_point lastCompared_;
};

}  // namespace baguarun::net
