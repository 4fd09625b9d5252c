// Messages between ranks, matched by tag.
//
// A message of up to 64 KiB goes at once and is kept by the receiver until somebody wants it; a larger one
// asks first and goes when there is room for it, and so does a small one while the receiver keeps more than
// kMaxKeptBytes of this sender's: what nobody wants yet never fills anybody's memory. Whoever wants a large
// message before there is word of it offers its room ahead, so that the sender need not ask: on a busy line a
// question waits behind the data. Messages of one sender and tag are matched in the order in which they were
// sent; a receive from anybody takes what came first. Word of room goes ahead of messages: behind a large one
// it would keep the other side from sending meanwhile.
//
// Where an answer takes long, a large message is pushed: it goes without having asked, as long as the
// receiver has no more than kMaxPushedBytes of this sender's for which it has not said that they have got a
// room. Most find theirs, since both sides begin at about the same time; the others are kept until somebody
// wants them. Who has more to send than may be pushed has to wait for an answer anyway, and pushes no more
// than goes by until then: it would be in the way of what others send, and somebody wants there already.
// Rooms that were offered for a tag are not used while one of its messages was pushed and no word of it has
// come: that message may have got the room.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "net/carrier.h"
#include "net/communicator.h"
#include "net/verdict.h"

namespace baguarun::net {

// Threads: post() any; all else one at a time.
class Mailbox : private PacketSink {
 public:
  static constexpr uint64_t kMaxKeptBytes = 1 << 20;
  static constexpr uint64_t kMaxPushedBytes = 8 << 20;

  struct Hooks {
    // The way to a rank, made where there is none yet; nullptr while it is being made.
    std::function<Carrier*(int rank)> carrierTo;
    // Hands what has come from anybody to the sink; false: nothing.
    std::function<bool(PacketSink& sink)> receive;
    // A rank's name in errors.
    std::function<std::string(int rank)> name;
  };

  Mailbox(int rank, int size, std::shared_ptr<Verdict> verdict, Hooks hooks);

  std::shared_ptr<Communicator::Message> post(bool isSend, void* data, size_t bytes, int peer, uint32_t tag);

  // Moves what can be moved now. False: nothing. Throws Error.
  bool progress();

  // Whether messages of this rank are under way.
  bool hasPending() const noexcept { return numPending_.load() > 0; }
  // Whether messages whose send has ended are not with the network yet, and need somebody who drives.
  bool hasUnsent() const noexcept { return hasUnsent_.load(); }
  // Whether something of `peer`, or for it, is awaited.
  bool needs(int peer) const;
  bool needsToSend(int peer) const;
  // Whether something is awaited that any peer may send.
  bool needsAny() const noexcept { return numFromAny_ > 0; }

 private:
  struct Operation;
  using Handle = std::shared_ptr<Operation>;

  // A message that came before anybody wanted it.
  struct Arrival {
    int from;
    uint64_t bytes;
    bool isWaiting = false;  // with its sender, as `id`
    bool isPushed = false;   // its payload comes as that of `id`, or has come
    uint64_t id = 0;
    std::vector<std::byte> payload = {};
    Handle ownSend = nullptr;  // where this rank is the sender
    Handle kept = nullptr;     // where the payload of a pushed one is until it gets a room

    bool isEager() const { return !isWaiting && !isPushed && ownSend == nullptr; }
  };
  struct Tag {
    std::deque<Handle> posted;
    std::deque<Arrival> arrived;
  };
  // A message for a peer, or the question for its room.
  struct Outgoing {
    Packet packet;
    Handle operation;
  };
  struct Lane {
    std::deque<Packet> words;  // of room; they go before `outgoing`
    std::deque<Outgoing> outgoing;
    std::deque<std::pair<uint64_t, Handle>> unflushed;        // done when as many packets are flushed
    bool hasUnsent = false;                                   // packets, or words that the peer awaits
    uint64_t eagerBytes = 0;                                  // sent and not yet credited
    uint64_t readBytes = 0;                                   // of its eager messages, not yet credited
    uint64_t pushedBytes = 0;                                 // sent, and no word that they have got a room
    uint64_t keptBytes = 0;                                   // pushed by it, and kept
    uint64_t largeBytes = 0;                                  // of large sends that have not ended
    std::unordered_map<uint32_t, size_t> pushedTags;          // tags of such messages, and how many
    std::unordered_map<uint32_t, std::deque<Packet>> offers;  // rooms that no message has got, by tag
    size_t numAwaited = 0;
    size_t numSending = 0;  // of them
  };

  void take(int from, const Packet& packet, const std::byte* payload) override;
  std::byte* room(int from, const Packet& packet) override;
  void filled(int from, const Packet& packet) override;

  void begin(const Handle& operation);
  void beginSend(const Handle& operation);
  void beginReceive(const Handle& operation);
  void arrive(Arrival arrival, uint32_t tag, const std::byte* payload);
  void deliver(const Handle& receive, Arrival& arrival, const std::byte* payload);
  void offerAhead(const Handle& receive, const Tag& tag);
  void takeOffer(int from, const Packet& packet);
  void takeGrant(int from, const Packet& packet);
  Handle firstAsking(int peer, uint32_t tag, std::optional<uint64_t> bytes) const;
  bool isLargeSend(const Operation& operation) const;
  bool mayPush(const Operation& send) const;
  void push(const Handle& send);
  void endPush(int from, const Packet& packet);
  void finishHalf(const Handle& push);
  Handle keep(int from, uint64_t id, uint64_t bytes);
  void deliverPushed(const Handle& receive, const Arrival& arrival);
  void sendData(const Handle& send, uint64_t id);
  void queue(int peer, Outgoing outgoing);
  void tell(int peer, const Packet& word);
  void markBusy(int peer);
  void credit(int from, uint64_t bytes);
  void unpost(const Handle& receive);
  void finish(const Handle& operation);
  bool flush(int peer, Lane& lane);
  bool sendNext(Carrier& carrier, Outgoing& next, Lane& lane);

  const int rank_;
  const std::shared_ptr<Verdict> verdict_;
  const Hooks hooks_;
  std::vector<Lane> lanes_;
  std::vector<int> busyLanes_;
  std::unordered_map<uint32_t, Tag> tags_;
  std::unordered_map<uint64_t, Handle> sends_;     // that wait for their grant
  std::unordered_map<uint64_t, Handle> pushes_;    // that wait for word of their room
  std::unordered_map<uint64_t, Handle> receives_;  // whose payload comes in pieces
  size_t numFromAny_ = 0;
  uint64_t numSends_ = 0;
  uint64_t numOffers_ = 0;
  std::atomic<size_t> numPending_{0};
  std::atomic<bool> hasUnsent_{false};

  std::mutex mutex_;
  std::vector<Handle> posted_;
  std::atomic<bool> hasPosted_{false};
};

}  // namespace baguarun::net
