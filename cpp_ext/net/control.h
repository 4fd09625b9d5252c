// What ranks on several hosts tell each other beside their work, over links from each to rank 0.
//
// Whoever breaks tells the others why; who leaves in order says so. Who waits long in a collective says in
// which, and rank 0 compares: ranks that wait in different calls are told so. Some time before a deadline,
// who waits tells rank 0, which asks around and lets all know who did not come or does not answer. When the
// deadline passes, the error that names them is thus at hand; what comes in time still is no error.
//
// Where beats are on (BAGUA_NET_BEAT_TIMEOUT_S), each also gives a sign of life now and then, in a call or
// not, and who gives none breaks the communicator.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "net/beats.h"
#include "net/call.h"
#include "net/error.h"
#include "net/inquiry.h"
#include "net/mesh.h"
#include "net/told.h"

namespace baguarun::net {

// Threads: one at a time.
class Control {
 public:
  // `beatTimeout`: of silence, after which a rank is taken for lost; 0: never.
  Control(int rank, int size, Mesh& mesh, Clock::duration beatTimeout = Clock::duration(0));

  // Once the control links are there.
  bool isComplete() const;
  // The first rank whose control link is not there, when it is waited for.
  int firstMissing() const;

  // The call that this rank is in, or was in last, which must have ended by `deadline`.
  void enter(const Call& call, Clock::time_point deadline);
  // The one with that number; the last one where it is forgotten.
  const CallTrail& ownTrail(uint64_t sequence) const;
  // It still waits in it, for `rank`: tells rank 0 of that when it is due. To be called again when it says.
  // Throws Told when the deadline has passed: who is to blame.
  void keepWaiting(int rank);
  Clock::time_point nextWaiting() const;
  // Who is to blame is being found out: answers should not have to wait.
  bool isAsking() const noexcept { return hasAsked_ || inquiry_.has_value(); }

  // Hears the others. False: they said nothing. Throws Told: what one of them broke with.
  bool progress();

  // Tells the others what this rank broke with, or that it leaves; waits no longer than `patience` for the
  // words to be on their way.
  void tell(const Error& error, Clock::duration patience) noexcept;
  void leave(Clock::duration patience) noexcept;

  // Has left in order.
  bool hasLeft(int rank) const { return peers_[static_cast<size_t>(rank)].hasLeft; }

  // Why a link broke, if somebody has a better reason than `error`. Takes up to 0.3 s, in a call (`isInCall`)
  // not much longer than until its deadline.
  // `isSettled`: the reason does not matter any more.
  Told explainBreak(const Error& error, bool isInCall, const std::function<bool()>& isSettled);

  // When progress() must be called though nothing comes.
  std::optional<Clock::time_point> nextCall() const;

 private:
  enum class Kind : uint32_t { kLeaving, kFailure, kWaiting, kDoubting, kAsking, kFinding, kBeat };

  // Goes over the wire as it is.
  struct Word {
    Kind kind;
    Fault fault;
    int32_t rank;
    uint32_t patienceMs;  // of kDoubting: for answers
    CallTrail trail;
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
    CallTrail trail;  // of the call that it said it waits in
    bool hasLeft = false;
    std::optional<Clock::time_point> lostAt;  // its link ended without a word
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
  const CallTrail& trailOf(int rank, uint64_t sequence) const;
  void reportWaiting();
  void doubt(int rank);
  void ask(const Word& doubt, int asker);
  void conclude();
  bool isHubSilent() const noexcept { return !isHub() && hasAsked_ && !hasHeardHub_; }
  Error lateness(int rank) const;
  Error overdue(int rank) const;
  void lose(int rank);
  void checkLost(int rank);
  void beat();
  std::optional<Told> listen(Clock::duration patience, const std::function<bool()>& isSettled);
  std::string name(int rank) const { return mesh_.name(rank); }

  const int rank_;
  const int size_;
  Mesh& mesh_;
  CallTrail trail_;
  // A rank may be ahead of others: roots need not wait for them.
  std::array<CallTrail, 64> ownTrails_{};
  // Of the call.
  Clock::time_point reportAt_;
  Clock::time_point askAt_;
  Clock::time_point deadline_;
  Clock::duration patience_{};
  bool hasReported_ = false;
  bool hasAsked_ = false;
  // Since it asked.
  bool hasHeardHub_ = false;
  std::optional<Error> finding_;

  std::vector<Peer> peers_;
  Beats beats_;
  // Of rank 0.
  std::optional<Inquiry> inquiry_;
};

}  // namespace baguarun::net
