#include "net/listener.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <span>
#include <string>
#include <utility>

#include "net/error.h"

namespace baguarun::net {

namespace {

constexpr int kBacklog = 1024;
constexpr int kMaxAcceptsPerCall = 64;
constexpr size_t kMaxAssemblies = 1024;

Fd listenOn(const Address& address) {
  Fd fd = makeTcpSocket(address.family());
  const int yes = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  if (bind(fd.get(), address.raw(), address.rawSize()) != 0 || listen(fd.get(), kBacklog) != 0) {
    throw Error(Fault::kSystem, "", "cannot listen on " + address.toString() + ": " + errnoText(errno));
  }
  return fd;
}

// A message that always fits into the buffer of a new connection.
template <size_t kSize>
bool sendWhole(int fd, const std::array<uint8_t, kSize>& message) {
  return send(fd, message.data(), kSize, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(kSize);
}

void shutDown(const std::vector<Fd>& streams) {
  for (const Fd& stream : streams) {
    shutdown(stream.get(), SHUT_RDWR);
  }
}

// The connection was already gone when it was taken: not our trouble.
bool isPeersFault(int error) {
  switch (error) {
    case ECONNABORTED:
    case EPROTO:
    case ENETDOWN:
    case ENETUNREACH:
    case EHOSTUNREACH:
    case EHOSTDOWN:
    case ENONET:
    case ENOPROTOOPT:
    case EINTR:
    case EPERM:
      return true;
    default:
      return false;
  }
}

}  // namespace

Listener::Listener(const Address& address, const Env& env, size_t maxStrangers)
    : env_(env),
      maxStrangers_(maxStrangers),
      ownerPid_(getpid()),
      fd_(listenOn(address)),
      address_(localAddress(fd_.get())) {
  fillRandom(nonce_);
  epoll_.add(fd_.get(), EPOLLIN, static_cast<uint64_t>(fd_.get()));
}

Listener::~Listener() {
  if (getpid() != ownerPid_) {
    return;
  }
  // A forked child may hold these descriptors too: closing ours alone would leave peers waiting.
  shutdown(fd_.get(), SHUT_RDWR);
  for (const auto& [number, stranger] : strangers_) {
    shutdown(number, SHUT_RDWR);
  }
  for (const auto& [linkId, assembly] : assemblies_) {
    shutDown(assembly.streams);
  }
}

std::optional<Listener::Accepted> Listener::accept() {
  std::array<epoll_event, 64> room;
  for (const epoll_event& event : epoll_.wait(room, std::chrono::milliseconds(0))) {
    const int fd = static_cast<int>(event.data.u64);
    if (fd == fd_.get()) {
      acceptStrangers();
    } else if (strangers_.contains(fd)) {
      listenTo(fd);
    }
  }
  dropOverdue();
  return takeComplete();
}

void Listener::acceptStrangers() {
  for (int count = 0; count < kMaxAcceptsPerCall; ++count) {
    Fd fd(accept4(fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return;
      }
      if (isPeersFault(errno)) {
        continue;
      }
      throw Error(Fault::kSystem, "", "cannot accept on " + address_.toString() + ": " + errnoText(errno));
    }
    if (strangers_.size() >= maxStrangers_) {
      // Members say their hello at once; whoever has been silent longest is the least likely to be one.
      drop(std::ranges::min_element(strangers_, {}, [](const auto& entry) { return entry.second.deadline; }));
    }
    const int number = fd.get();
    epoll_.add(number, EPOLLIN | EPOLLRDHUP, static_cast<uint64_t>(number));
    strangers_[number] = {
        .fd = std::move(fd), .hello = {}, .received = 0, .deadline = Clock::now() + env_.helloTimeout};
  }
}

// Closing our descriptor is not enough: where a forked child has it too, the connection would live on, and so
// would our watch on it.
Listener::Strangers::iterator Listener::drop(Strangers::iterator stranger) {
  const int fd = stranger->first;
  epoll_.remove(fd);
  shutdown(fd, SHUT_RDWR);
  return strangers_.erase(stranger);
}

void Listener::listenTo(int fd) {
  const auto found = strangers_.find(fd);
  Stranger& stranger = found->second;
  const std::span<uint8_t> room = std::span(stranger.hello).subspan(stranger.received);
  const ssize_t count = recv(fd, room.data(), room.size(), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
    return;
  }
  if (count <= 0) {
    drop(found);
    return;
  }
  stranger.received += static_cast<size_t>(count);
  Hello hello;
  switch (decodeHello(std::span(stranger.hello).first(stranger.received), nonce_, env_.secret, hello)) {
    case HelloVerdict::kIncomplete:
      return;
    case HelloVerdict::kOtherVersion:
      sendWhole(fd, encodeVersionRefusal());
      drop(found);
      return;
    case HelloVerdict::kStranger:
      drop(found);
      return;
    case HelloVerdict::kWelcome: {
      epoll_.remove(fd);
      Stranger member = std::move(stranger);
      strangers_.erase(found);
      admit(std::move(member), hello);
      return;
    }
  }
}

// Puts a stream into its link. Streams that fit nowhere (a repeated hello, a link given up) are dropped.
void Listener::admit(Stranger stranger, const Hello& hello) {
  if (hello.stream == 0 && assemblies_.size() < kMaxAssemblies && linksBegun_.insert(hello.linkId).second) {
    const uint16_t numStreams = std::min(hello.numStreams, static_cast<uint16_t>(env_.numStreams));
    assemblies_[hello.linkId] = {
        .streams = std::vector<Fd>(numStreams),
        .arrived = 0,
        .agreed = {.numStreams = numStreams, .chunkBytes = std::min(hello.chunkBytes, env_.chunkBytes)},
        .sender = hello.sender,
        .deadline = Clock::now() + env_.connectTimeout};
  }
  const auto found = assemblies_.find(hello.linkId);
  if (found == assemblies_.end()) {
    shutdown(stranger.fd.get(), SHUT_RDWR);
    return;
  }
  Assembly& assembly = found->second;
  if (hello.stream >= assembly.streams.size() || assembly.streams[hello.stream] ||
      !sendWhole(stranger.fd.get(), encodeWelcome(stranger.hello, assembly.agreed, env_.secret))) {
    shutdown(stranger.fd.get(), SHUT_RDWR);
    return;
  }
  assembly.streams[hello.stream] = std::move(stranger.fd);
  ++assembly.arrived;
}

void Listener::dropOverdue() {
  if (strangers_.empty() && assemblies_.empty()) {
    return;
  }
  const auto now = Clock::now();
  for (auto stranger = strangers_.begin(); stranger != strangers_.end();) {
    stranger = stranger->second.deadline <= now ? drop(stranger) : std::next(stranger);
  }
  std::erase_if(assemblies_, [&](const auto& entry) {
    const bool isOverdue = entry.second.deadline <= now;
    if (isOverdue) {
      shutDown(entry.second.streams);
    }
    return isOverdue;
  });
}

std::optional<Listener::Accepted> Listener::takeComplete() {
  const auto found = std::ranges::find_if(
      assemblies_, [](const auto& entry) { return entry.second.arrived == entry.second.streams.size(); });
  if (found == assemblies_.end()) {
    return std::nullopt;
  }
  Assembly assembly = std::move(found->second);
  assemblies_.erase(found);
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  // The peer may be gone again already: then the link says so when it is used.
  const bool isKnown =
      getpeername(assembly.streams[0].get(), reinterpret_cast<sockaddr*>(&storage), &size) == 0;
  std::string peer = isKnown ? Address::fromSockaddr(reinterpret_cast<const sockaddr*>(&storage)).toString()
                             : "a peer that left at once";
  return Accepted{.link = std::make_unique<Link>(std::move(assembly.streams),
                                                 Link::Settings{.chunkBytes = assembly.agreed.chunkBytes,
                                                                .peerTimeout = env_.peerTimeout,
                                                                .peer = std::move(peer)}),
                  .sender = assembly.sender};
}

}  // namespace baguarun::net
