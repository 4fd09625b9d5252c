#include "net/mesh.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "net/interfaces.h"

namespace baguarun::net {

namespace {

constexpr uint64_t kListenerNumber = ~uint64_t{0};
constexpr size_t kUses = 4;
// What is pending is looked at this often though nothing happens on it: a silent machine says nothing.
constexpr std::chrono::milliseconds kSweepEvery{1000};
// A peer answers when it drives, which may be long after; the caller's deadline is the bound.
constexpr std::chrono::hours kForEver{24};

Env patient(const Env& env, int numStreams) {
  return {.numStreams = numStreams,
          .chunkBytes = env.chunkBytes,
          .secret = env.secret,
          .connectTimeout = kForEver,
          .helloTimeout = env.helloTimeout,
          .peerTimeout = env.peerTimeout,
          .ncclIfname = env.ncclIfname,
          .glooIfname = env.glooIfname,
          .family = env.family,
          .commId = env.commId};
}

// Members of a large group that all come at once, on a link to send on and another one, are no crowd.
size_t maxStrangers(int size, int numStreams) {
  return std::max(Listener::kUsualStrangers,
                  size_t{2} * static_cast<size_t>(size) * static_cast<size_t>(numStreams));
}

constexpr std::string_view kHexDigits = "0123456789abcdef";

bool decodeHex(const std::string& text, Nonce& bytes) {
  if (text.size() != 2 * bytes.size()) {
    return false;
  }
  for (size_t i = 0; i < text.size(); ++i) {
    const size_t digit = kHexDigits.find(text[i]);
    if (digit == std::string_view::npos) {
      return false;
    }
    bytes[i / 2] = static_cast<uint8_t>(bytes[i / 2] << 4 | digit);
  }
  return true;
}

uint64_t senderOf(Mesh::Use use, int rank) {
  return static_cast<uint64_t>(use) << 32 | static_cast<uint64_t>(rank);
}

}  // namespace

Mesh::Mesh(int rank, int size, const Env& env)
    : rank_(rank),
      size_(size),
      env_(patient(env, env.numStreams)),
      controlEnv_(patient(env, 1)),
      listener_(chooseForGloo(listInterfaces(), env).front().address.withPort(0), env_,
                maxStrangers(size, env.numStreams)),
      slots_(kUses * static_cast<size_t>(size)),
      lastSweep_(Clock::now()) {
  epoll_.add(listener_.pollFd(), EPOLLIN, kListenerNumber);
}

std::string Mesh::card() const {
  std::string card = listener_.address().toString() + "\n";
  for (const uint8_t byte : listener_.nonce()) {
    card += kHexDigits[byte >> 4];
    card += kHexDigits[byte & 15];
  }
  return card;
}

void Mesh::meet(const std::vector<std::string>& cards) {
  for (const std::string& card : cards) {
    const size_t end = card.find('\n');
    Contact contact;
    if (end == std::string::npos || !decodeHex(card.substr(end + 1), contact.nonce)) {
      throw Error(Fault::kUsage, "rank " + std::to_string(contacts_.size()),
                  "gave no address in the exchange: is it of another version of baguarun?");
    }
    contact.address = Address::parse(card.substr(0, end));
    // The zone of a link-local address is a number of the host that uses it.
    if (contact.address.isLinkLocal()) {
      contact.address = contact.address.withScopeId(listener_.address().scopeId());
    }
    contacts_.push_back(contact);
  }
}

std::string Mesh::name(int rank) const {
  return "rank " + std::to_string(rank) + " (" + contacts_[static_cast<size_t>(rank)].address.toString() +
         ")";
}

size_t Mesh::indexOf(Use use, int rank) const noexcept {
  return kUses * static_cast<size_t>(rank) + static_cast<size_t>(use);
}

Link* Mesh::find(Use use, int rank) const noexcept { return slots_[indexOf(use, rank)].link.get(); }

bool Mesh::hasPending(Use use) const noexcept {
  for (size_t index = static_cast<size_t>(use); index < slots_.size(); index += kUses) {
    if (slots_[index].link != nullptr && slots_[index].link->hasPending()) {
      return true;
    }
  }
  return false;
}

const std::optional<Error>& Mesh::end(Use use, int rank) const noexcept {
  return slots_[indexOf(use, rank)].end;
}

void Mesh::want(Use use, int rank) {
  const size_t index = indexOf(use, rank);
  Slot& slot = slots_[index];
  const bool isOurs = use == Use::kSending || (use == Use::kCollectives && rank_ < rank) ||
                      (use == Use::kControl && rank == 0);
  if (!isOurs || slot.link != nullptr || slot.connector != nullptr || slot.end.has_value()) {
    return;
  }
  const Contact& contact = contacts_[static_cast<size_t>(rank)];
  slot.connector = std::make_unique<Connector>(Target{.address = contact.address,
                                                      .nonce = contact.nonce,
                                                      .sender = senderOf(use, rank_),
                                                      .peer = name(rank)},
                                               use == Use::kControl ? controlEnv_ : env_);
  epoll_.add(slot.connector->pollFd(), EPOLLIN, index);
}

void Mesh::poke(Use use, int rank, size_t bytes) {
  bytesSent_.fetch_add(bytes, std::memory_order_relaxed);
  activate(indexOf(use, rank));
}

void Mesh::activate(size_t index) {
  Slot& slot = slots_[index];
  if (!slot.isActive && !slot.end.has_value() && (slot.link != nullptr || slot.connector != nullptr)) {
    slot.isActive = true;
    active_.push_back(index);
  }
}

void Mesh::take(size_t index, std::unique_ptr<Link> link) {
  Slot& slot = slots_[index];
  if (slot.connector != nullptr) {
    epoll_.remove(slot.connector->pollFd());
    slot.connector.reset();
  }
  slot.link = std::move(link);
  slot.link->namePeer(name(static_cast<int>(index / kUses)));
  epoll_.add(slot.link->pollFd(), EPOLLIN, index);
}

void Mesh::acceptAll() {
  while (auto accepted = listener_.accept()) {
    const auto rank = static_cast<uint32_t>(accepted->sender);
    auto use = static_cast<Use>(accepted->sender >> 32);
    if (rank >= static_cast<uint32_t>(size_) || accepted->sender >> 32 >= kUses) {
      continue;
    }
    use = use == Use::kSending ? Use::kReceiving : use;
    // A member that knows no better is dropped as a stranger is.
    if (const size_t index = indexOf(use, static_cast<int>(rank)); slots_[index].link == nullptr) {
      take(index, std::move(accepted->link));
    }
  }
}

bool Mesh::progress() {
  std::array<epoll_event, 64> events;
  for (const epoll_event& event : epoll_.wait(events, std::chrono::milliseconds(0))) {
    if (event.data.u64 == kListenerNumber) {
      acceptAll();
    } else {
      activate(event.data.u64);
    }
  }
  if (const auto now = Clock::now(); now - lastSweep_ > kSweepEvery) {
    lastSweep_ = now;
    acceptAll();
    for (size_t index = 0; index < slots_.size(); ++index) {
      if (slots_[index].connector != nullptr ||
          (slots_[index].link != nullptr && slots_[index].link->hasPending())) {
        activate(index);
      }
    }
  }
  bool moved = false;
  for (size_t i = 0; i < active_.size();) {
    const size_t index = active_[i];
    if (advance(index)) {
      moved = true;
      ++i;
    } else {
      slots_[index].isActive = false;
      active_[i] = active_.back();
      active_.pop_back();
    }
  }
  return moved;
}

bool Mesh::advance(size_t index) {
  Slot& slot = slots_[index];
  const auto use = static_cast<Use>(index % kUses);
  try {
    if (slot.link != nullptr) {
      return slot.link->progress();
    }
    if (auto link = slot.connector->poll()) {
      take(index, std::move(link));
      return true;
    }
    return false;
  } catch (const Error& error) {
    const bool mayEnd = use == Use::kSending ? error.fault() != Fault::kSystem
                                             : slot.link != nullptr && use != Use::kCollectives;
    if (!mayEnd) {
      throw;
    }
    slot.end = error;
    epoll_.remove(slot.link != nullptr ? slot.link->pollFd() : slot.connector->pollFd());
    slot.connector.reset();
    return false;
  }
}

}  // namespace baguarun::net
