#include "net/socket.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "net/error.h"

namespace baguarun::net {

namespace {

constexpr int kKeepaliveProbes = 4;

void setOption(int fd, int level, int name, int value, const char* what) {
  if (setsockopt(fd, level, name, &value, sizeof(value)) != 0) {
    throw Error(Fault::kSystem, "", std::string("cannot set ") + what + ": " + errnoText(errno));
  }
}

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) {
    close(fd_);
  }
}

Epoll::Epoll() : fd_(epoll_create1(EPOLL_CLOEXEC)) {
  if (!fd_) {
    throw Error(Fault::kSystem, "", "cannot make an epoll instance: " + errnoText(errno));
  }
}

void Epoll::add(int fd, uint32_t events, uint64_t number) {
  epoll_event event{.events = events, .data = {.u64 = number}};
  if (epoll_ctl(fd_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    throw Error(Fault::kSystem, "", "cannot watch a socket: " + errnoText(errno));
  }
}

void Epoll::modify(int fd, uint32_t events, uint64_t number) {
  epoll_event event{.events = events, .data = {.u64 = number}};
  NET_CHECK(epoll_ctl(fd_.get(), EPOLL_CTL_MOD, fd, &event) == 0);
}

void Epoll::remove(int fd) noexcept {
  epoll_event unused{};
  epoll_ctl(fd_.get(), EPOLL_CTL_DEL, fd, &unused);
}

std::span<epoll_event> Epoll::wait(std::span<epoll_event> room, std::chrono::milliseconds timeout) const {
  const int count =
      epoll_wait(fd_.get(), room.data(), static_cast<int>(room.size()), static_cast<int>(timeout.count()));
  if (count < 0) {
    if (errno == EINTR) {
      return {};
    }
    throw Error(Fault::kSystem, "", "cannot wait for sockets: " + errnoText(errno));
  }
  return room.first(static_cast<size_t>(count));
}

Fd makeTcpSocket(int family) {
  Fd fd(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) {
    throw Error(Fault::kSystem, "", "cannot make a socket: " + errnoText(errno));
  }
  return fd;
}

void setNotSentLowWater(int fd, uint32_t bytes) {
  setOption(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, static_cast<int>(bytes), "TCP_NOTSENT_LOWAT");
}

void setReceiveLowWater(int fd, uint32_t bytes) {
  setOption(fd, SOL_SOCKET, SO_RCVLOWAT, static_cast<int>(bytes), "SO_RCVLOWAT");
}

void setStreamOptions(int fd, std::chrono::milliseconds peerTimeout) {
  setOption(fd, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY");
  const int quarter = std::max<int>(1, static_cast<int>(peerTimeout.count() / 1000 / 4));
  setOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE");
  setOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, quarter, "TCP_KEEPIDLE");
  setOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, quarter * 3 / kKeepaliveProbes), "TCP_KEEPINTVL");
  setOption(fd, IPPROTO_TCP, TCP_KEEPCNT, kKeepaliveProbes, "TCP_KEEPCNT");
}

Address localAddress(int fd) {
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0) {
    throw Error(Fault::kSystem, "", "cannot name a socket: " + errnoText(errno));
  }
  return Address::fromSockaddr(reinterpret_cast<const sockaddr*>(&storage));
}

void waitReadable(int fd, std::chrono::milliseconds timeout) {
  pollfd watched{.fd = fd, .events = POLLIN, .revents = 0};
  if (poll(&watched, 1, static_cast<int>(timeout.count())) < 0 && errno != EINTR) {
    throw Error(Fault::kSystem, "", "cannot wait for a descriptor: " + errnoText(errno));
  }
}

int pendingError(int fd) noexcept {
  int error = 0;
  socklen_t size = sizeof(error);
  return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

void fillRandom(std::span<uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = getrandom(bytes.data(), bytes.size(), 0);
    if (count < 0 && errno != EINTR) {
      throw Error(Fault::kSystem, "", "getrandom: " + errnoText(errno));
    }
    bytes = bytes.subspan(count > 0 ? static_cast<size_t>(count) : 0);
  }
}

std::string errnoText(int error) {
  char text[128] = "";
  return strerror_r(error, text, sizeof(text));
}

}  // namespace baguarun::net
