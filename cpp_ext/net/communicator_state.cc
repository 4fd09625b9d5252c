#include "net/communicator_state.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "net/error.h"

namespace baguarun::net {

namespace {

// How long what a process that ended had sent before may still serve the others.
constexpr std::chrono::milliseconds kGrace{500};
// The longest sleep: some failures are found by looking.
constexpr std::chrono::milliseconds kLongestSleep{1000};
constexpr uint64_t kBellNumber = ~uint64_t{0};
constexpr uint64_t kDoorbellNumber = ~uint64_t{1};

}  // namespace

Communicator::Implementation::Implementation(const Options& options, const BlobExchange& exchange)
    : options_(options), bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!bell_) {
    throw Error(Fault::kSystem, "", "eventfd: " + errnoText(errno));
  }
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    throw Error(Fault::kUsage, "",
                "rank=" + std::to_string(options.rank) + ", size=" + std::to_string(options.size) +
                    ": want 0 <= rank < size");
  }
  if (options.size > 1) {
    meet(exchange);
  }
  mailbox_ = std::make_unique<Mailbox>(
      options_.rank, options_.size, verdict_,
      Mailbox::Hooks{.carrierTo = [this](int rank) { return carriers_[static_cast<size_t>(rank)].get(); },
                     .receive = [this](PacketSink& sink) { return receive(sink); },
                     .name = [this](int rank) { return name(rank); }});
  watch();
}

Communicator::Implementation::~Implementation() = default;

void Communicator::Implementation::meet(const BlobExchange& exchange) {
  const std::string host = options_.host.empty() ? hostIdentity() : options_.host;
  const std::string own = options_.shareMemory ? host : "rank " + std::to_string(options_.rank);
  const std::vector<std::string> hosts = exchange(own);
  if (hosts.size() != static_cast<size_t>(options_.size)) {
    throw Error(Fault::kUsage, "",
                "the exchange gave " + std::to_string(hosts.size()) + " blobs: want one of each of " +
                    std::to_string(options_.size) + " ranks");
  }
  map_ = HostMap::of(hosts, ShmGroup::kMaxRanks);
  if (map_.hosts.size() > 1) {
    throw Error(Fault::kUsage, "", "ranks on several hosts: not there yet");
  }
  carriers_.resize(hosts.size());
  shm_ = std::make_unique<ShmGroup>(ShmGroup::Options{.rank = options_.rank,
                                                      .size = options_.size,
                                                      .nonce = options_.nonce,
                                                      .timeout = options_.timeout,
                                                      .arenaBytes = options_.arenaBytes,
                                                      .labels = map_.hosts[0]},
                                    exchange);
  for (const int rank : map_.hosts[0]) {
    if (rank != options_.rank) {
      carriers_[static_cast<size_t>(rank)] =
          std::make_unique<ShmCarrier>(*shm_, map_.placeOf[static_cast<size_t>(rank)], rank);
    }
  }
  shm_->setHook([this] { return mailbox_->hasPending() && (advance(), true); });
}

void Communicator::Implementation::watch() {
  epoll_.add(bell_.get(), EPOLLIN, kBellNumber);
  if (shm_ == nullptr) {
    return;
  }
  epoll_.add(shm_->doorbell(), EPOLLIN, kDoorbellNumber);
  for (int place = 0; place < shm_->size(); ++place) {
    if (const Fd& pidfd = shm_->segment().peer(place).pidfd) {
      epoll_.add(pidfd.get(), EPOLLIN, static_cast<uint64_t>(place));
    }
  }
}

std::string Communicator::Implementation::name(int rank) const {
  return shm_ == nullptr ? "rank " + std::to_string(rank)
                         : shm_->segment().peerName(map_.placeOf[static_cast<size_t>(rank)]);
}

// Records the first failure, tells the others, and throws what counts.
void Communicator::Implementation::breakWith(const Error& error) {
  if (verdict_->set(error) && shm_ != nullptr) {
    shm_->fail(error);
  }
  throw *verdict_->get();
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
  verdict_->check();
  try {
    return advance();
  } catch (const Error& error) {
    breakWith(error);
  }
}

// What goes on beside collectives. False: nothing could move.
bool Communicator::Implementation::advance() {
  verdict_->check();
  if (shm_ != nullptr) {
    shm_->checkFailure();
  }
  const bool moved = mailbox_->progress();
  if (!moved) {
    checkGone();
  }
  return moved;
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
  if (shm_ == nullptr) {
    return;
  }
  for (const int rank : map_.hosts[static_cast<size_t>(map_.hostOf[static_cast<size_t>(options_.rank)])]) {
    const int place = map_.placeOf[static_cast<size_t>(rank)];
    if (rank != options_.rank && mailbox_->needs(rank) && shm_->hasLeft(place) &&
        shm_->nextPacket(place) == nullptr) {
      throw Error(Fault::kRemote, name(rank), "has left with messages outstanding");
    }
  }
  for (const Gone& gone : gone_) {
    if (!shm_->hasLeft(gone.place) && Clock::now() >= gone.since + kGrace) {
      throw Error(Fault::kRemote, shm_->segment().peerName(gone.place), "its process has ended");
    }
  }
}

void Communicator::Implementation::sleep(Clock::time_point until) {
  if (verdict_->isBroken()) {
    return;
  }
  if (shm_ != nullptr) {
    shm_->expectBell();
  }
  try {
    if (progress()) {
      return;
    }
  } catch (const Error&) {
    return;  // recorded; the next call throws it
  }
  const auto now = Clock::now();
  auto left = std::min(until - now, Clock::duration(kLongestSleep));
  for (const Gone& gone : gone_) {
    if (gone.since + kGrace > now) {
      left = std::min(left, gone.since + kGrace - now);
    }
  }
  std::array<epoll_event, 16> events;
  const auto rounded = std::chrono::ceil<std::chrono::milliseconds>(std::max(left, Clock::duration(0)));
  for (const epoll_event& event : epoll_.wait(events, rounded)) {
    hear(event.data.u64);
  }
}

void Communicator::Implementation::hear(uint64_t number) {
  if (number == kBellNumber) {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = read(bell_.get(), &count, sizeof(count));
    isRung_.store(false);
  } else if (number == kDoorbellNumber) {
    shm_->answerBell();
  } else {
    const int place = static_cast<int>(number);
    epoll_.remove(shm_->segment().peer(place).pidfd.get());
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
      shm_ != nullptr) {
    shm_->abort(reason);
  }
  wake();
}

void* Communicator::Implementation::allocate(size_t bytes) {
  const bool isInside = shm_ != nullptr && map_.hosts.size() == 1;
  return isInside && bytes <= shm_->roomLeft() ? shm_->allocate(bytes) : nullptr;
}

void Communicator::Implementation::checkRoot(int root) const {
  if (root < 0 || root >= options_.size) {
    throw Error(Fault::kUsage, "",
                "root=" + std::to_string(root) + ": want 0 <= root < " + std::to_string(options_.size));
  }
}

}  // namespace baguarun::net
