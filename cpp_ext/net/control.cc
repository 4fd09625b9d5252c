#include "net/control.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace baguarun::net {

namespace {

// How long what a rank that vanished had sent before may still serve the others.
constexpr std::chrono::milliseconds kGrace{500};
constexpr std::chrono::milliseconds kRelayTime{50};
// Who waits longer in a collective says so, that calls which do not match are found.
constexpr std::chrono::milliseconds kLongWait{200};
// How long before its deadline who waits wants to know who is late; half of that is for the answers, which a
// rank that sleeps in shared memory takes up to 70 ms to give. A call of little time asks after half of it.
constexpr std::chrono::milliseconds kAskingTime{500};
// How long to wait for a better reason than that a link broke, and how long even at a deadline.
constexpr std::chrono::milliseconds kReasonTime{300};
constexpr std::chrono::milliseconds kLeastReasonTime{100};

template <size_t kSize>
void setText(char (&to)[kSize], const std::string& from) {
  to[from.copy(to, kSize - 1)] = '\0';
}

template <size_t kSize>
std::string getText(const char (&from)[kSize]) {
  return std::string(from, strnlen(from, kSize));
}

}  // namespace

Control::Control(int rank, int size, Mesh& mesh, Clock::duration beatTimeout)
    : rank_(rank),
      size_(size),
      mesh_(mesh),
      peers_(static_cast<size_t>(size)),
      beats_(beatTimeout, size, Clock::now()) {
  if (!isHub()) {
    mesh_.want(Mesh::Use::kControl, 0);
  }
}

// Those whom this rank has a control link to.
template <class Do>
void Control::forLinked(Do act) {
  for (int rank = isHub() ? 1 : 0; rank < (isHub() ? size_ : 1); ++rank) {
    act(rank);
  }
}

int Control::firstMissing() const {
  for (int rank = isHub() ? 1 : 0; rank < (isHub() ? size_ : 1); ++rank) {
    if (mesh_.find(Mesh::Use::kControl, rank) == nullptr) {
      return rank;
    }
  }
  return rank_;
}

bool Control::isComplete() const { return firstMissing() == rank_; }

void Control::enter(const Call& call, Clock::time_point deadline) {
  const auto now = Clock::now();
  const auto asking =
      std::clamp<Clock::duration>((deadline - now) / 2, Clock::duration(0), Clock::duration(kAskingTime));
  trail_ = trail_.followedBy(call);
  ownTrails_[call.sequence % ownTrails_.size()] = trail_;
  peers_[static_cast<size_t>(rank_)].trail = trail_;
  reportAt_ = now + kLongWait;
  askAt_ = deadline - asking;
  deadline_ = deadline;
  patience_ = asking / 2;
  hasReported_ = hasAsked_ = hasHeardHub_ = false;
  finding_.reset();
}

void Control::keepWaiting(int rank) {
  const auto now = Clock::now();
  if (now >= deadline_) {
    throw Told(overdue(rank), false);
  }
  if (now >= reportAt_ && !hasReported_) {
    reportWaiting();
  }
  if (now >= askAt_ && !hasAsked_) {
    doubt(rank);
  }
}

Clock::time_point Control::nextWaiting() const {
  return std::min({deadline_, hasReported_ ? deadline_ : reportAt_, hasAsked_ ? deadline_ : askAt_});
}

void Control::reportWaiting() {
  hasReported_ = true;
  if (isHub()) {
    compare(rank_);
  } else {
    say(0, make(Kind::kWaiting));
    flush(Clock::duration(0));
  }
}

// The deadline comes near.
void Control::doubt(int rank) {
  hasAsked_ = true;
  hasHeardHub_ = false;
  finding_.reset();
  Word word = withError(make(Kind::kDoubting), lateness(rank));
  word.patienceMs =
      static_cast<uint32_t>(std::chrono::duration_cast<std::chrono::milliseconds>(patience_).count());
  if (isHub()) {
    ask(word, rank_);
  } else {
    say(0, word);
  }
  flush(Clock::duration(0));
}

Control::Word Control::make(Kind kind) const {
  Word word{};
  word.kind = kind;
  word.rank = rank_;
  word.trail = trail_;
  return word;
}

Control::Word Control::withError(Word word, const Error& error) {
  word.fault = error.fault();
  setText(word.peer, error.peer());
  setText(word.text, error.message());
  return word;
}

void Control::say(int to, const Word& word) {
  Link* const link = mesh_.find(Mesh::Use::kControl, to);
  if (link == nullptr || mesh_.end(Mesh::Use::kControl, to).has_value()) {
    return;
  }
  std::deque<Outgoing>& outgoing = peers_[static_cast<size_t>(to)].outgoing;
  while (!outgoing.empty() && outgoing.front().request->isDone()) {
    link->test(outgoing.front().request);
    outgoing.pop_front();
  }
  auto kept = std::make_unique<Word>(word);
  try {
    // A peer that has not read 32 words does not read at all, and will be found out otherwise.
    if (Request* const request = link->isend(kept.get(), sizeof(Word))) {
      outgoing.push_back({std::move(kept), request});
      mesh_.poke(Mesh::Use::kControl, to, sizeof(Word));
    }
  } catch (const Error&) {
    lose(to);  // the others are told all the same
  }
}

void Control::sayAll(const Word& word, int except) {
  forLinked([&](int rank) {
    if (rank != except) {
      say(rank, word);
    }
  });
}

void Control::flush(Clock::duration patience) noexcept {
  const auto end = Clock::now() + patience;
  bool isPending = true;
  while (isPending) {
    isPending = false;
    forLinked([&](int rank) {
      auto& outgoing = peers_[static_cast<size_t>(rank)].outgoing;
      Link* const link = mesh_.find(Mesh::Use::kControl, rank);
      if (link == nullptr || outgoing.empty() || mesh_.end(Mesh::Use::kControl, rank).has_value()) {
        return;
      }
      try {
        link->progress();
        isPending |= !outgoing.back().request->isDone();
      } catch (const Error&) {
        outgoing.clear();  // it needs to hear nothing
        lose(rank);
      }
    });
    if (isPending) {
      if (Clock::now() >= end) {
        return;
      }
      waitReadable(mesh_.pollFd(), std::chrono::milliseconds(1));
    }
  }
}

void Control::tell(const Error& error, Clock::duration patience) noexcept {
  sayAll(withError(make(Kind::kFailure), error), rank_);
  flush(patience);
}

void Control::leave(Clock::duration patience) noexcept {
  sayAll(make(Kind::kLeaving), rank_);
  flush(patience);
}

bool Control::progress() {
  bool moved = false;
  forLinked([&](int rank) {
    while (hear(rank)) {
      moved = true;
    }
    checkLost(rank);
  });
  if (inquiry_.has_value() && inquiry_->isOver(Clock::now())) {
    conclude();
    moved = true;
  }
  if (beats_.areOn()) {
    beat();
  }
  return moved;
}

// Gives a sign of life when it is due, and looks for those of the others.
void Control::beat() {
  if (!beats_.look(Clock::now())) {
    return;
  }
  sayAll(make(Kind::kBeat), rank_);
  flush(Clock::duration(0));
  forLinked([&](int rank) {
    const Peer& peer = peers_[static_cast<size_t>(rank)];
    if (!peer.hasLeft && !peer.lostAt.has_value() && beats_.isSilent(rank)) {
      const auto silence = std::chrono::duration_cast<std::chrono::milliseconds>(4 * beats_.interval());
      throw Told(Error(Fault::kRemote, name(rank),
                       Error::kSilence + std::to_string(silence.count()) +
                           " ms: is it stopped, or the network cut?"),
                 false);
    }
  });
}

// Takes one word. False: there was none.
bool Control::hear(int from) {
  Link* const link = mesh_.find(Mesh::Use::kControl, from);
  Peer& peer = peers_[static_cast<size_t>(from)];
  if (link == nullptr || (peer.incoming != nullptr && !peer.incoming->isDone())) {
    return false;
  }
  const bool came = peer.incoming != nullptr;
  const bool isWhole = !came || link->test(peer.incoming).bytes == sizeof(Word);
  const Word word = peer.word;
  peer.incoming = nullptr;
  if (!peer.lostAt.has_value() && !mesh_.end(Mesh::Use::kControl, from).has_value()) {
    peer.incoming = link->irecv(&peer.word, sizeof(Word));
    mesh_.poke(Mesh::Use::kControl, from, 0);
  }
  if (!isWhole) {
    throw Error(Fault::kRemote, name(from), "sent a control message that means nothing");
  }
  if (came) {
    obey(from, word);
  }
  return came;
}

void Control::obey(int from, const Word& word) {
  const int rank = isHub() ? from : word.rank;
  if (rank < 0 || rank >= size_ ||
      static_cast<uint32_t>(word.fault) > static_cast<uint32_t>(Fault::kTimeout)) {
    throw Error(Fault::kRemote, name(from), "sent a control message that means nothing");
  }
  Peer& peer = peers_[static_cast<size_t>(rank)];
  hasHeardHub_ |= from == 0;
  beats_.hear(from);
  switch (word.kind) {
    case Kind::kLeaving:
      peer.hasLeft = true;
      if (isHub()) {
        sayAll(word, from);
      }
      return;
    case Kind::kFailure: {
      if (isHub()) {
        sayAll(word, from);
        flush(kRelayTime);  // nothing moves any more after what follows
      }
      std::string text = getText(word.text);
      if (word.fault == Fault::kAborted) {
        throw Told(Error(Fault::kRemote, name(rank), "aborted: " + text), true);
      }
      // A timeout's own text says who found it where that was not rank 0.
      if (word.fault != Fault::kTimeout) {
        text += " (found by " + name(rank) + ")";
      }
      throw Told(Error(word.fault, getText(word.peer), text), true);
    }
    case Kind::kWaiting:
      peer.trail = word.trail;
      if (isHub()) {
        if (inquiry_.has_value()) {
          inquiry_->answer(rank, word.trail.call);
        }
        compare(rank);
      }
      return;
    case Kind::kDoubting:
      peer.trail = word.trail;
      if (isHub()) {
        ask(word, rank);
      }
      return;
    case Kind::kAsking:
      say(0, make(Kind::kWaiting));
      return;
    case Kind::kBeat:
      return;
    case Kind::kFinding:
      finding_ = Error(word.fault, getText(word.peer), getText(word.text));
      return;
  }
  throw Error(Fault::kRemote, name(from), "sent a control message that means nothing");
}

const CallTrail& Control::ownTrail(uint64_t sequence) const {
  const CallTrail& trail = ownTrails_[sequence % ownTrails_.size()];
  return trail.call.sequence == sequence ? trail : trail_;
}

// What `rank` said it calls, this one with this number.
const CallTrail& Control::trailOf(int rank, uint64_t sequence) const {
  return rank == rank_ ? ownTrail(sequence) : peers_[static_cast<size_t>(rank)].trail;
}

// Rank 0: whether somebody waits in another call of the same number.
void Control::compare(int rank) {
  const uint64_t sequence = peers_[static_cast<size_t>(rank)].trail.call.sequence;
  for (int other = 0; other < size_; ++other) {
    if (other == rank) {
      continue;
    }
    const int later = std::max(rank, other);
    const int earlier = std::min(rank, other);
    if (const auto text = difference(trailOf(later, sequence), trailOf(earlier, sequence), name(earlier))) {
      throw Told(Error(Fault::kUsage, name(later), *text), false);
    }
  }
}

// Its link has ended, which is known from now on.
void Control::lose(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  peer.lostAt = peer.lostAt.value_or(Clock::now());
}

void Control::checkLost(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (mesh_.end(Mesh::Use::kControl, rank).has_value()) {
    lose(rank);
  }
  if (!peer.hasLeft && peer.lostAt.has_value() && Clock::now() >= *peer.lostAt + kGrace) {
    throw Told(Error(Fault::kRemote, name(rank), "its connection ended: has it died?"), false);
  }
}

// Rank 0: `asker` has said the `doubt`.
void Control::ask(const Word& doubt, int asker) {
  if (inquiry_.has_value()) {
    inquiry_->answer(asker, doubt.trail.call);
    // So that it knows that somebody is here.
    say(asker, make(Kind::kAsking));
    return;
  }
  const auto patience = std::min<Clock::duration>(std::chrono::milliseconds(doubt.patienceMs), kAskingTime);
  inquiry_.emplace(size_, asker, doubt.trail.call,
                   Error(doubt.fault, getText(doubt.peer), getText(doubt.text)), Clock::now() + patience);
  inquiry_->answer(0, trail_.call);
  sayAll(make(Kind::kAsking), rank_);
}

void Control::conclude() {
  finding_ = inquiry_->conclude([this](int rank) { return name(rank); });
  inquiry_.reset();
  sayAll(withError(make(Kind::kFinding), *finding_), rank_);
}

// What is wrong if `rank`, which this one waits for, goes on like this.
Error Control::lateness(int rank) const {
  return Error(Fault::kTimeout, name(rank), "did not deliver its part of " + trail_.call.text() + " in time");
}

// The deadline has passed.
Error Control::overdue(int rank) const {
  if (finding_.has_value()) {
    return *finding_;
  }
  if (isHubSilent()) {
    return Error(Fault::kTimeout, name(0), "did not take part in " + trail_.call.text() + " in time");
  }
  const Error late = lateness(rank);
  return Error(late.fault(), late.peer(), late.message() + " (found by " + name(rank_) + ")");
}

Told Control::explainBreak(const Error& error, bool isInCall, const std::function<bool()>& isSettled) {
  Clock::duration patience = kReasonTime;
  if (isInCall) {
    patience = std::clamp<Clock::duration>(deadline_ - Clock::now(), kLeastReasonTime, kReasonTime);
  }
  if (const auto told = listen(patience, isSettled)) {
    return *told;
  }
  // Somebody whose deadline was earlier has closed its links, and rank 0 would have told of it.
  return Told(isInCall && isHubSilent() ? overdue(0) : error, false);
}

// What the others say, if they do within `patience`. Only control links are looked at.
std::optional<Told> Control::listen(Clock::duration patience, const std::function<bool()>& isSettled) {
  const auto end = Clock::now() + patience;
  try {
    while (Clock::now() < end && !isSettled()) {
      forLinked([&](int rank) {
        Link* const link = mesh_.find(Mesh::Use::kControl, rank);
        if (link != nullptr && !peers_[static_cast<size_t>(rank)].lostAt.has_value()) {
          try {
            link->progress();
          } catch (const Error&) {
            lose(rank);
          }
        }
      });
      progress();
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  } catch (const Told& told) {
    return told;
  } catch (const Error& error) {
    return Told(error, false);
  }
  return std::nullopt;
}

std::optional<Clock::time_point> Control::nextCall() const {
  std::optional<Clock::time_point> next;
  if (inquiry_.has_value()) {
    next = inquiry_->end();
  }
  if (beats_.areOn()) {
    next = std::min(next.value_or(Clock::time_point::max()), beats_.next());
  }
  for (const Peer& peer : peers_) {
    if (peer.lostAt.has_value() && !peer.hasLeft) {
      next = std::min(next.value_or(Clock::time_point::max()), *peer.lostAt + kGrace);
    }
  }
  return next;
}

}  // namespace baguarun::net
