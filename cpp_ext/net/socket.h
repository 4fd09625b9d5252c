// Descriptors, epoll and the socket options of the transport.
#pragma once

#include <sys/epoll.h>

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "net/address.h"

namespace baguarun::net {

using Clock = std::chrono::steady_clock;

// Owns a descriptor. Threads: a value, one at a time.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) noexcept : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd();

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// An epoll instance; every event carries the number that its descriptor was added with.
// Threads: as the kernel's epoll, any.
class Epoll {
 public:
  Epoll();
  void add(int fd, uint32_t events, uint64_t number);
  void modify(int fd, uint32_t events, uint64_t number);
  void remove(int fd) noexcept;

  // Fills `room` with what is ready, waiting up to `timeout` (0: not at all; negative: for ever).
  std::span<epoll_event> wait(std::span<epoll_event> room, std::chrono::milliseconds timeout) const;

  int fd() const noexcept { return fd_.get(); }

 private:
  Fd fd_;
};

// A non-blocking, close-on-exec TCP socket. Throws Error(kSystem).
Fd makeTcpSocket(int family);

// How much the kernel may hold unsent on `fd`. Throws Error(kSystem).
void setNotSentLowWater(int fd, uint32_t bytes);

// Do not call the socket readable before that many bytes, or the end, have come.
void setReceiveLowWater(int fd, uint32_t bytes);

// Options of a socket that carries a stream: TCP_NODELAY and keepalives that notice a silent machine within
// `peerTimeout`.
//
// TCP_USER_TIMEOUT is left alone while data flows: Linux counts the time that the peer's window is closed, so
// it would cut off a healthy peer that merely posts its receive late. peerAnswers() in stream.h looks
// instead.
void setStreamOptions(int fd, std::chrono::milliseconds peerTimeout);

Address localAddress(int fd);

// Sleeps until `fd` is readable, up to `timeout`. Takes no event away from an epoll descriptor.
void waitReadable(int fd, std::chrono::milliseconds timeout);

// Error that a non-blocking connect() ended with; 0 where it succeeded.
int pendingError(int fd) noexcept;

// Cryptographically random bytes.
void fillRandom(std::span<uint8_t> bytes);

std::string errnoText(int error);

}  // namespace baguarun::net
