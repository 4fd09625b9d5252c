#include "net/communicator_state.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "net/error.h"
#include "net/link_carrier.h"
#include "net/shm_carrier.h"

namespace baguarun::net {

namespace {

// How long what a process that ended had sent before may still serve the others.
constexpr std::chrono::milliseconds kGrace{500};
// The longest sleep: some failures are found by looking.
constexpr std::chrono::milliseconds kLongestSleep{1000};
// How long words to the others may take to be on their way.
constexpr std::chrono::milliseconds kTellingTime{50};
constexpr uint64_t kBellNumber = ~uint64_t{0};
constexpr uint64_t kDoorbellNumber = ~uint64_t{1};
constexpr uint64_t kMeshNumber = ~uint64_t{2};

}  // namespace

Communicator::Implementation::Implementation(const Options& options, const BlobExchange& exchange)
    : options_(options), ownerPid_(getpid()), bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!bell_) {
    throw Error(Fault::kSystem, "", "eventfd: " + errnoText(errno));
  }
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    throw Error(Fault::kUsage, "",
                "rank=" + std::to_string(options.rank) + ", size=" + std::to_string(options.size) +
                    ": want 0 <= rank < size");
  }
  met_ = meet(options, exchange);
  if (met_.mesh != nullptr) {
    levels_ =
        std::make_unique<Levels>(met_.map, options_.rank, met_.shm.get(), static_cast<WireContext&>(*this));
  }
  makeCarriers();
  mailbox_ =
      std::make_unique<Mailbox>(options_.rank, options_.size, verdict_,
                                Mailbox::Hooks{.carrierTo = [this](int rank) { return carrierTo(rank); },
                                               .receive = [this](PacketSink& sink) { return receive(sink); },
                                               .name = [this](int rank) { return name(rank); }});
  watch();
}

Communicator::Implementation::~Implementation() {
  // A forked child holds the parent's links: what it says would be the parent's word.
  if (met_.control == nullptr || getpid() != ownerPid_) {
    return;
  }
  if (verdict_->isBroken()) {
    tellOthers(kTellingTime);
  } else {
    met_.control->leave(kTellingTime);
  }
}

const std::vector<int>& Communicator::Implementation::neighbours() const {
  return met_.map.hosts[static_cast<size_t>(met_.map.hostOf[static_cast<size_t>(options_.rank)])];
}

// Whether it shares memory with this rank.
bool Communicator::Implementation::isNear(int rank) const {
  return met_.shm != nullptr && std::ranges::binary_search(neighbours(), rank);
}

// Whether a rank that shares memory with this one has sent something that is not taken yet.
bool Communicator::Implementation::hasNearPackets() const {
  for (int place = 0; place < met_.shm->size(); ++place) {
    if (place != met_.shm->rank() && met_.shm->nextPacket(place) != nullptr) {
      return true;
    }
  }
  return false;
}

void Communicator::Implementation::makeCarriers() {
  carriers_.resize(static_cast<size_t>(options_.size));
  for (int rank = 0; rank < options_.size; ++rank) {
    if (rank == options_.rank) {
      continue;
    }
    if (isNear(rank)) {
      carriers_[static_cast<size_t>(rank)] = std::make_unique<ShmCarrier>(*met_.shm, placeOf(rank), rank);
    } else {
      carriers_[static_cast<size_t>(rank)] = std::make_unique<LinkCarrier>(*met_.mesh, rank);
    }
  }
}

void Communicator::Implementation::watch() {
  epoll_.add(bell_.get(), EPOLLIN, kBellNumber);
  if (met_.mesh != nullptr) {
    epoll_.add(met_.mesh->pollFd(), EPOLLIN, kMeshNumber);
  }
  if (met_.shm == nullptr) {
    return;
  }
  met_.shm->setHook([this](int place) { return waitBesides(place); });
  epoll_.add(met_.shm->doorbell(), EPOLLIN, kDoorbellNumber);
  for (int place = 0; place < met_.shm->size(); ++place) {
    if (const Fd& pidfd = met_.shm->segment().peer(place).pidfd) {
      epoll_.add(pidfd.get(), EPOLLIN, static_cast<uint64_t>(place));
    }
  }
}

std::string Communicator::Implementation::name(int rank) const {
  return met_.mesh != nullptr  ? met_.mesh->name(rank)
         : met_.shm != nullptr ? met_.shm->segment().peerName(placeOf(rank))
                               : "rank " + std::to_string(rank);
}

void Communicator::Implementation::enter(Call call, Clock::time_point deadline) {
  if (verdict_->isBroken()) {
    tellOthers(kTellingTime);
    verdict_->check();
  }
  if (met_.shm != nullptr) {
    // With other hosts, whom a neighbour waits for may be there: only the control links tell.
    met_.shm->setDeadline(met_.control == nullptr ? deadline : Clock::time_point::max());
  }
  if (met_.control != nullptr) {
    call.sequence = ++numCalls_;
    call_ = call;
    met_.control->enter(call, deadline);
    if (met_.shm != nullptr) {
      met_.shm->describe(met_.control->ownTrail(call.sequence));
    }
  }
}

// Records the first failure, tells the others, and throws what counts.
void Communicator::Implementation::breakWith(const Error& error, bool isInCall) {
  Error cause = error;
  if (const auto* told = dynamic_cast<const Told*>(&error)) {
    hasTold_ = told->isKnown();
  } else if (met_.control != nullptr && !verdict_->isBroken() && error.fault() == Fault::kRemote) {
    // Who broke may have closed its links before its words came.
    const Told why = met_.control->explainBreak(error, isInCall, [this] { return verdict_->isBroken(); });
    hasTold_ = why.isKnown();
    cause = why;
  }
  verdict_->set(cause);
  tellOthers(kTellingTime);
  throw *verdict_->get();
}

void Communicator::Implementation::tellOthers(Clock::duration patience) noexcept {
  const Error error = *verdict_->get();
  if (met_.shm != nullptr) {
    met_.shm->fail(error);
  }
  if (met_.control != nullptr && !hasTold_) {
    hasTold_ = true;
    met_.control->tell(error, patience);
  }
}

std::shared_ptr<Communicator::Message> Communicator::Implementation::post(bool isSend, void* data,
                                                                          size_t bytes, int peer,
                                                                          uint32_t tag) {
  verdict_->check();
  auto message = mailbox_->post(isSend, data, bytes, peer, tag);
  wake();
  return message;
}

bool Communicator::Implementation::progress() {
  const Verdict::Drive drive(*verdict_);
  if (verdict_->isBroken()) {
    tellOthers(kTellingTime);
    verdict_->check();
  }
  try {
    return advance();
  } catch (const Error& error) {
    breakWith(error, false);
  }
}

// Until a pass moves nothing, but not for ever.
bool Communicator::Implementation::advance() {
  constexpr int kMaxPasses = 4;
  int passes = 0;
  while (passes < kMaxPasses && advanceOnce()) {
    ++passes;
  }
  return passes > 0;
}

// What goes on beside collectives. False: nothing could move.
bool Communicator::Implementation::advanceOnce() {
  verdict_->check();
  if (met_.shm != nullptr) {
    met_.shm->checkFailure();
  }
  bool moved = mailbox_->progress();
  if (met_.mesh != nullptr) {
    moved |= met_.mesh->progress();
    moved |= met_.control->progress();
  }
  if (!moved) {
    checkGone();
  }
  return moved;
}

// While an operation in shared memory waits, for the neighbour at `place`.
bool Communicator::Implementation::waitBesides(int place) {
  // Also of those whom this rank wants nothing of: they wait until there is room for more.
  const bool hasMessages = mailbox_->hasPending() || hasNearPackets();
  if (hasMessages || met_.mesh != nullptr) {
    advance();
  }
  if (met_.control == nullptr) {
    return hasMessages;
  }
  met_.control->keepWaiting(neighbours()[static_cast<size_t>(place)]);
  return hasMessages || met_.control->isAsking() || met_.mesh->hasPending(Mesh::Use::kCollectives);
}

// While a collective over links waits.
void Communicator::Implementation::await(int rank) {
  const bool moved = advance();
  met_.control->keepWaiting(rank);
  if (moved) {
    return;
  }
  if (met_.control->hasLeft(rank) && met_.mesh->find(Mesh::Use::kCollectives, rank) == nullptr) {
    throw Error(Fault::kRemote, name(rank), "has left");
  }
  if (met_.shm != nullptr && mailbox_->hasPending()) {
    met_.shm->expectBell();
    if (advance()) {
      return;
    }
  }
  doze(met_.control->nextWaiting());
}

std::byte* Communicator::Implementation::scratch(size_t bytes) {
  if (scratch_.size() < bytes) {
    scratch_.resize(bytes);
  }
  return scratch_.data();
}

std::optional<WireContext::Ahead> Communicator::Implementation::nextAllReduce() {
  const auto next = findNext_ ? findNext_() : std::nullopt;
  if (!next) {
    return std::nullopt;
  }
  const Call call{.sequence = numCalls_ + 1,
                  .count = next->count,
                  .kind = CallKind::kAllReduce,
                  .dtype = next->dtype,
                  .op = next->op};
  return Ahead{.trail = ownTrail(numCalls_).followedBy(call), .data = next->data, .count = next->count};
}

Carrier* Communicator::Implementation::carrierTo(int rank) {
  if (rank != options_.rank && !isNear(rank)) {
    met_.mesh->want(Mesh::Use::kSending, rank);
  }
  return carriers_[static_cast<size_t>(rank)].get();
}

bool Communicator::Implementation::receive(PacketSink& sink) {
  for (size_t i = 0; i < carriers_.size(); ++i) {
    Carrier* const carrier = carriers_[nextCarrier_].get();
    nextCarrier_ = (nextCarrier_ + 1) % carriers_.size();
    if (carrier != nullptr && carrier->receive(sink)) {
      return true;
    }
  }
  return false;
}

// Nothing has come: is somebody waited for who has gone?
void Communicator::Implementation::checkGone() {
  if (mailbox_->hasPending()) {
    for (int rank = 0; rank < options_.size; ++rank) {
      if (rank != options_.rank && mailbox_->needs(rank)) {
        checkAwaited(rank);
      }
    }
    checkAny();
  }
  for (const Gone& gone : gone_) {
    if (!met_.shm->hasLeft(gone.place) && Clock::now() >= gone.since + kGrace) {
      throw Error(Fault::kRemote, met_.shm->segment().peerName(gone.place), "its process has ended");
    }
  }
}

// With a message outstanding that any rank may send.
void Communicator::Implementation::checkAny() {
  if (!mailbox_->needsAny() || options_.size == 1) {
    return;
  }
  for (int rank = 0; rank < options_.size; ++rank) {
    if (rank != options_.rank && !hasNothingLeft(rank)) {
      return;
    }
  }
  throw Error(Fault::kRemote, "every other rank", "has left with messages outstanding");
}

// Nothing will come from there any more. Had one on another host ever sent anything, there would be a link.
bool Communicator::Implementation::hasNothingLeft(int rank) {
  if (isNear(rank)) {
    return met_.shm->hasLeft(placeOf(rank)) && met_.shm->nextPacket(placeOf(rank)) == nullptr;
  }
  if (met_.mesh->find(Mesh::Use::kReceiving, rank) != nullptr) {
    return met_.mesh->end(Mesh::Use::kReceiving, rank).has_value();
  }
  // Nobody tells any more who goes: whether there is an answer does.
  if (met_.control->hasLeft(0)) {
    met_.mesh->want(Mesh::Use::kSending, rank);
  }
  return met_.control->hasLeft(rank) || met_.mesh->end(Mesh::Use::kSending, rank).has_value();
}

// With messages to or from `rank` outstanding.
void Communicator::Implementation::checkAwaited(int rank) {
  if (!isNear(rank)) {
    if (const auto& end = met_.mesh->end(Mesh::Use::kReceiving, rank)) {
      throw Error(*end);
    }
    // What it had sent before may still be on its way here.
    const bool isMissed =
        mailbox_->needsToSend(rank) || met_.mesh->find(Mesh::Use::kReceiving, rank) == nullptr;
    const auto& end = met_.mesh->end(Mesh::Use::kSending, rank);
    if (end.has_value() && isMissed && !met_.control->hasLeft(rank)) {
      throw Error(*end);
    }
  }
  if (hasNothingLeft(rank)) {
    throw Error(Fault::kRemote, name(rank), "has left with messages outstanding");
  }
}

void Communicator::Implementation::sleep(Clock::time_point until) {
  if (met_.shm != nullptr) {
    met_.shm->expectBell();
  }
  try {
    if (progress()) {
      return;
    }
  } catch (const Error&) {
    return;  // recorded; the next call throws it
  }
  doze(until);
}

// Waits for something to happen.
void Communicator::Implementation::doze(Clock::time_point until) {
  const auto now = Clock::now();
  until = std::min(until, now + kLongestSleep);
  for (const Gone& gone : gone_) {
    if (gone.since + kGrace > now) {
      until = std::min(until, gone.since + kGrace);
    }
  }
  if (met_.control != nullptr) {
    until = std::min(until, met_.control->nextCall().value_or(until));
  }
  std::array<epoll_event, 16> events;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(std::max(until - now, Clock::duration(0)));
  for (const epoll_event& event : epoll_.wait(events, left)) {
    hear(event.data.u64);
  }
}

void Communicator::Implementation::hear(uint64_t number) {
  if (number == kBellNumber) {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = read(bell_.get(), &count, sizeof(count));
    isRung_.store(false);
  } else if (number == kDoorbellNumber) {
    met_.shm->answerBell();
  } else if (number != kMeshNumber) {
    const int place = static_cast<int>(number);
    epoll_.remove(met_.shm->segment().peer(place).pidfd.get());
    gone_.push_back({.place = place, .since = Clock::now()});
  }
}

void Communicator::Implementation::wake() noexcept {
  if (!isRung_.exchange(true)) {
    const uint64_t one = 1;
    // Only a full counter makes it fail, and then the bell rings already.
    [[maybe_unused]] const ssize_t written = write(bell_.get(), &one, sizeof(one));
  }
}

void Communicator::Implementation::abort(const std::string& reason) noexcept {
  if (verdict_->set(Error(Fault::kAborted, "", "the communicator was aborted: " + reason)) &&
      met_.shm != nullptr) {
    met_.shm->abort(reason);
  }
  wake();
}

void Communicator::Implementation::fail(const Error& error) noexcept {
  if (verdict_->set(error) && met_.shm != nullptr) {
    met_.shm->fail(error);
  }
  wake();
}

std::shared_ptr<void> Communicator::Implementation::allocate(size_t bytes) {
  if (bytes == 0 || bytes > roomLeft()) {
    return nullptr;
  }
  const auto giveBack = [segment = met_.shm->sharedSegment(), bytes, owner = ownerPid_](std::byte* data) {
    // A forked child sees the same memory, which is still in use.
    if (getpid() == owner) {
      segment->giveBack(data, bytes);
    }
  };
  return {static_cast<std::byte*>(met_.shm->allocate(bytes)), giveBack};
}

size_t Communicator::Implementation::roomLeft() const noexcept {
  const bool isInside = met_.shm != nullptr && met_.mesh == nullptr;
  return isInside ? met_.shm->roomLeft() : 0;
}

void Communicator::Implementation::checkRoot(int root) const {
  if (root < 0 || root >= options_.size) {
    throw Error(Fault::kUsage, "",
                "root=" + std::to_string(root) + ": want 0 <= root < " + std::to_string(options_.size));
  }
}

}  // namespace baguarun::net
