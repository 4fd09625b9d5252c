#include "net/connector.h"

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

#include "net/error.h"

namespace baguarun::net {

Connector::Connector(Target target, const Env& env)
    : env_(env),
      ownerPid_(getpid()),
      target_([&] {
        if (target.peer.empty()) {
          target.peer = target.address.toString();
        }
        return std::move(target);
      }()),
      deadline_(Clock::now() + env.connectTimeout),
      agreed_{.numStreams = static_cast<uint16_t>(env.numStreams), .chunkBytes = env.chunkBytes},
      streams_(1) {
  fillRandom(linkId_);
  open(0);
}

Connector::~Connector() {
  if (getpid() == ownerPid_) {
    for (const Stream& stream : streams_) {
      shutdown(stream.fd.get(), SHUT_RDWR);
    }
  }
}

void Connector::fail(Fault fault, const std::string& message) const {
  throw Error(fault, target_.peer, message);
}

std::unique_ptr<Link> Connector::poll() {
  std::array<epoll_event, kMaxStreams> room;
  for (const epoll_event& event : epoll_.wait(room, std::chrono::milliseconds(0))) {
    advance(event.data.u64);
  }
  if (numWelcomed_ == agreed_.numStreams) {
    std::vector<Fd> fds;
    for (Stream& stream : streams_) {
      epoll_.remove(stream.fd.get());
      fds.push_back(std::move(stream.fd));
    }
    return std::make_unique<Link>(std::move(fds), Link::Settings{.chunkBytes = agreed_.chunkBytes,
                                                                 .peerTimeout = env_.peerTimeout,
                                                                 .peer = target_.peer});
  }
  if (Clock::now() >= deadline_) {
    const bool isConnected = streams_[0].state != Stream::State::kConnecting;
    fail(Fault::kTimeout, std::string(isConnected ? "connected, but said no welcome" : "did not answer") +
                              " within " + std::to_string(env_.connectTimeout.count()) + " ms");
  }
  return nullptr;
}

void Connector::open(size_t index) {
  Stream& stream = streams_[index];
  stream.fd = makeTcpSocket(target_.address.family());
  const int result = connect(stream.fd.get(), target_.address.raw(), target_.address.rawSize());
  if (result != 0 && errno != EINPROGRESS) {
    fail(Fault::kRemote, "cannot connect to " + target_.address.toString() + ": " + errnoText(errno));
  }
  epoll_.add(stream.fd.get(), EPOLLOUT, index);
}

void Connector::advance(size_t index) {
  switch (streams_[index].state) {
    case Stream::State::kConnecting:
      return sayHello(index);
    case Stream::State::kAwaitingWelcome:
      return hearWelcome(index);
    case Stream::State::kWelcomed:
      return;
  }
}

void Connector::sayHello(size_t index) {
  Stream& stream = streams_[index];
  if (const int error = pendingError(stream.fd.get()); error != 0) {
    fail(Fault::kRemote, "cannot connect to " + target_.address.toString() + ": " + errnoText(error) +
                             (error == ECONNREFUSED ? " (nobody listens there, or no longer)" : ""));
  }
  stream.hello = encodeHello({.stream = static_cast<uint16_t>(index),
                              .numStreams = agreed_.numStreams,
                              .chunkBytes = agreed_.chunkBytes,
                              .nonce = target_.nonce,
                              .linkId = linkId_,
                              .sender = target_.sender},
                             env_.secret);
  // 96 bytes always fit into the buffer of a new connection.
  const ssize_t count =
      send(stream.fd.get(), stream.hello.data(), stream.hello.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (count != static_cast<ssize_t>(stream.hello.size())) {
    fail(Fault::kRemote, "cannot say hello: " + errnoText(errno));
  }
  stream.state = Stream::State::kAwaitingWelcome;
  epoll_.modify(stream.fd.get(), EPOLLIN | EPOLLRDHUP, index);
}

void Connector::hearWelcome(size_t index) {
  Stream& stream = streams_[index];
  const std::span<uint8_t> room = std::span(stream.welcome).subspan(stream.received);
  const ssize_t count = recv(stream.fd.get(), room.data(), room.size(), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
    return;
  }
  if (count == 0 && numWelcomed_ == 0) {
    fail(Fault::kRemote,
         "turned us away: it belongs to another job, has another BAGUA_NET_SECRET or is no listener of ours");
  }
  if (count <= 0) {
    // Who refuses a hello has read it, and closes in order; a process that ends has not.
    fail(Fault::kRemote,
         "ended the connection before its welcome: it has died or left, or is no listener of ours");
  }
  stream.received += static_cast<size_t>(count);
  Welcome welcome;
  switch (
      decodeWelcome(std::span(stream.welcome).first(stream.received), stream.hello, env_.secret, welcome)) {
    case WelcomeVerdict::kIncomplete:
      return;
    case WelcomeVerdict::kStranger:
      fail(Fault::kRemote, "answered the hello with something else: it is no listener of this job");
    case WelcomeVerdict::kOtherVersion:
      fail(Fault::kRemote,
           "speaks another version of the protocol: use one version of baguarun on all nodes");
    case WelcomeVerdict::kAgreed:
      break;
  }
  stream.state = Stream::State::kWelcomed;
  epoll_.modify(stream.fd.get(), 0, index);
  ++numWelcomed_;
  if (index == 0) {
    agree(welcome);
  }
}

// Stream 0 has been welcomed: the others follow on what was agreed.
void Connector::agree(const Welcome& welcome) {
  if (welcome.numStreams > agreed_.numStreams || welcome.chunkBytes > agreed_.chunkBytes) {
    fail(Fault::kRemote, "agreed to more than was offered");
  }
  agreed_ = welcome;
  streams_.resize(agreed_.numStreams);
  for (size_t index = 1; index < streams_.size(); ++index) {
    open(index);
  }
}

}  // namespace baguarun::net
