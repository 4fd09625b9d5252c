// What ranks on several hosts tell each other beside their work, over links from each to rank 0.
//
// Whoever breaks tells the others why; who leaves in order says so. Who waits long in a collective says in
// which, and rank 0 compares: ranks that wait in different calls are told so. When somebody's deadline
// passes, rank 0 asks around, and names those who did not come or do not answer.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "net/call.h"
#include "net/error.h"
#include "net/mesh.h"
#include "net/told.h"

namespace baguarun::net {

// Threads: one at a time.
class Control {
 public:
  Control(int rank, int size, Mesh& mesh);

  // Once the control links are there.
  bool isComplete() const;
  // The first rank whose control link is not there, when it is waited for.
  int firstMissing() const;

  // The call that this rank is in, or was in last.
  void enter(const Call& call);
  // The one with that number, kNone where it is forgotten.
  Call ownCall(uint64_t sequence) const;
  // It has been waiting in it for long.
  void reportWaiting();

  // Hears the others. False: they said nothing. Throws Told: what one of them broke with, or what rank 0
  // found out.
  bool progress();

  // Tells the others what this rank broke with, or that it leaves; waits no longer than `patience` for the
  // words to be on their way.
  void tell(const Error& error, Clock::duration patience) noexcept;
  void leave(Clock::duration patience) noexcept;

  // Has left in order.
  bool hasLeft(int rank) const { return peers_[static_cast<size_t>(rank)].hasLeft; }

  // Who is to blame for `error`, a deadline that passed in the call entered last. Takes up to a second.
  Told explainTimeout(const Error& error);
  // Why a link broke, if somebody has a better reason than `error`.
  Told explainBreak(const Error& error);

  // When progress() must be called though nothing comes.
  std::optional<Clock::time_point> nextCall() const;

 private:
  enum class Kind : uint32_t { kLeaving, kFailure, kWaiting, kTimeout, kAsking };

  // Goes over the wire as it is.
  struct Word {
    Kind kind;
    Fault fault;
    int32_t rank;
    uint32_t reserved;
    Call call;
    char peer[128];
    char text[600];
  };
  struct Outgoing {
    std::unique_ptr<Word> word;
    Request* request;
  };
  struct Peer {
    Word word{};  // that comes next
    Request* incoming = nullptr;
    std::deque<Outgoing> outgoing;
    Call call;  // that it said it waits in
    bool hasAnswered = false;
    bool hasLeft = false;
    std::optional<Clock::time_point> lostAt;  // its link ended without a word
  };
  // Of rank 0, about a deadline that passed.
  struct Inquiry {
    Clock::time_point end;
    Call call;
    Error error;
    int asker;
  };

  bool isHub() const noexcept { return rank_ == 0; }
  template <class Do>
  void forLinked(Do act);
  Word make(Kind kind) const;
  static Word withError(Word word, const Error& error);
  void say(int to, const Word& word);
  void sayAll(const Word& word, int except);
  void flush(Clock::duration patience) noexcept;
  bool hear(int from);
  void obey(int from, const Word& word);
  void compare(int rank);
  const Call& callOf(int rank, uint64_t sequence) const;
  void ask(const Call& call, const Error& error, int asker);
  Error conclude() const;
  void checkLost(int rank);
  std::optional<Told> listen(Clock::duration patience);
  std::string name(int rank) const { return mesh_.name(rank); }

  const int rank_;
  const int size_;
  Mesh& mesh_;
  Call call_;
  // A rank may be ahead of others: roots need not wait for them.
  std::array<Call, 64> ownCalls_{};
  bool hasReported_ = false;
  std::vector<Peer> peers_;
  std::optional<Inquiry> inquiry_;
};

}  // namespace baguarun::net
