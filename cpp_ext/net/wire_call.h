// One collective among ranks that are joined by links: rows of sends and receives to and from each of them.
//
// The first message in each direction of each link says what the sender calls and has called; what follows is
// only looked at when it is what this rank calls, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "net/call.h"
#include "net/mesh.h"

namespace baguarun::net {

// What a collective needs of its communicator.
class WireContext {
 public:
  // An all-reduce in place that follows the present one, or a part of it.
  struct Ahead {
    CallTrail trail;
    void* data;
    size_t count;  // elements
  };

  virtual ~WireContext() = default;
  virtual Mesh& mesh() = 0;
  virtual AllReduceWay allReduceWay() const noexcept = 0;
  // Moves whatever is under way, and sleeps where nothing is. `rank` is who is waited for. Throws Error: the
  // deadline has passed, the communicator broke.
  virtual void await(int rank) = 0;
  // What this rank called with that number, or calls now where that is not known.
  virtual CallTrail ownTrail(uint64_t sequence) const = 0;
  // Memory that stays for the next call, at least `bytes`.
  virtual std::byte* scratch(size_t bytes) = 0;
  // What this rank calls next, where that is known and an all-reduce.
  virtual std::optional<Ahead> nextAllReduce() = 0;
};

// Threads: one at a time.
class WireCall {
 public:
  // Among `members` (ranks), of which this is `members[place]`.
  WireCall(WireContext& context, const std::vector<int>& members, size_t place, const CallTrail& trail);
  WireCall(WireContext& context, const std::vector<int>& members, size_t place, const Call& call)
      : WireCall(context, members, place, context.ownTrail(call.sequence)) {}

  size_t size() const noexcept { return members_.size(); }
  size_t place() const noexcept { return place_; }

  // What the header to a member says beside the call; before the first send to it.
  void note(size_t to, uint64_t note) { peers_[to].note = note; }
  // The same to all. In the bits of `alike` those of others must say the same, which `setting` decides, or
  // the call ends with Fault::kUsage. `setting` lives for ever.
  void noteToAll(uint64_t note, uint64_t alike, const char* setting);
  // Sends the header alone.
  void greet(size_t to);
  // Queues a message. `data` must stay until it is sent.
  void send(size_t to, const void* data, size_t bytes);
  // Queues room for a message of `bytes`.
  void receive(size_t from, void* data, size_t bytes);

  // How many messages have been sent or have come, headers aside.
  size_t numSent(size_t to) const noexcept { return peers_[to].numSent; }
  size_t numReceived(size_t from) const noexcept { return peers_[from].numReceived; }

  // Whether all that was queued for it is posted: what another call posts after that comes behind.
  bool isPosted(size_t to) const noexcept { return peers_[to].postedSends == peers_[to].sends.size(); }
  // Whether all that was queued is posted: it comes and goes though nobody calls advance().
  bool isAllPosted() const noexcept;

  // Return when that many have, when the header has come (its note), when all that was queued is done.
  void waitSent(size_t to, size_t count);
  void waitReceived(size_t from, size_t count);
  uint64_t waitNote(size_t from);
  void finish();

  // Posts what is queued and collects what is done. False: nothing.
  bool advance();
  // Lets time pass while `from` is waited for.
  void pass(size_t from);

 private:
  struct Header {
    CallTrail trail;
    uint64_t note = 0;
  };
  struct Item {
    std::byte* data;
    size_t bytes;
    Request* request;
  };
  struct Peer {
    std::deque<Item> sends;
    std::deque<Item> receives;
    size_t postedSends = 0;  // of the queue
    size_t postedReceives = 0;
    size_t numSent = 0;
    size_t numReceived = 0;
    uint64_t note = 0;
    Header ours;
    Header theirs;
    bool isGreeted = false;   // our header is queued
    bool isExpected = false;  // room for theirs is queued
    bool isKnown = false;     // theirs has come and is right
    bool isActive = false;
  };

  void use(size_t member);
  void expect(size_t from);
  bool advanceSends(size_t member, Peer& peer, Link& link);
  bool advanceReceives(size_t member, Peer& peer, Link& link);
  void checkHeader(size_t member, Peer& peer);

  WireContext& context_;
  const std::vector<int>& members_;
  const size_t place_;
  const CallTrail trail_;
  uint64_t alike_ = 0;
  const char* setting_ = "";
  std::vector<Peer> peers_;
  std::vector<size_t> active_;
};

}  // namespace baguarun::net
