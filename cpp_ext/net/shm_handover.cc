#include "net/shm_handover.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include "net/error.h"

namespace baguarun::net {

namespace {

// Between two looks whether the wait is given up.
constexpr int kLookMs = 20;

// How long a connection on our socket may take to show its token; a stranger is dropped after it.
constexpr timeval kTokenTimeout{.tv_sec = 1, .tv_usec = 0};

sockaddr_un abstractAddress(const std::string& socketName, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  NET_CHECK(socketName.size() + 1 < sizeof(address.sun_path));
  std::memcpy(address.sun_path + 1, socketName.data(), socketName.size());
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + socketName.size());
  return address;
}

Fd makeSocket() {
  Fd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) {
    throwShmError("a Unix socket", errno);
  }
  return fd;
}

// Whether the one on the other side is of our user and knows the token.
bool isMember(const Fd& connection, const std::string& token) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0 ||
      credentials.uid != geteuid()) {
    return false;
  }
  setsockopt(connection.get(), SOL_SOCKET, SO_RCVTIMEO, &kTokenTimeout, sizeof(kTokenTimeout));
  std::string given(token.size(), '\0');
  ssize_t count = 0;
  do {
    count = recv(connection.get(), given.data(), given.size(), MSG_WAITALL);
  } while (count < 0 && errno == EINTR);
  return count == static_cast<ssize_t>(token.size()) && given == token;
}

// The kernel passes on at most 253 descriptors at once.
constexpr size_t kMaxDescriptors = 250;

bool sendDescriptors(const Fd& connection, const ShmHandover& handover) {
  std::vector<int> fds{handover.memory.get()};
  for (const Fd& doorbell : handover.doorbells) {
    fds.push_back(doorbell.get());
  }
  const size_t bytes = fds.size() * sizeof(int);
  char byte = 1;
  iovec data{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = CMSG_SPACE(bytes);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(bytes);
  std::memcpy(CMSG_DATA(header), fds.data(), bytes);
  return sendmsg(connection.get(), &message, MSG_NOSIGNAL) == 1;
}

void waitReadable(const Fd& fd, const Patience& patience, const char* what) {
  for (;;) {
    if (patience.check) {
      patience.check();
    }
    if (Clock::now() >= patience.deadline) {
      throw Error(Fault::kTimeout, "", std::string("shared memory: ") + what + " took too long");
    }
    pollfd entry{.fd = fd.get(), .events = POLLIN, .revents = 0};
    const int ready = poll(&entry, 1, kLookMs);
    if (ready > 0) {
      return;
    }
    if (ready < 0 && errno != EINTR) {
      throwShmError("poll", errno);
    }
  }
}

// Asks once. Nothing: rank 0 hung up.
std::optional<ShmHandover> askForShm(const std::string& socketName, const std::string& token,
                                     const Patience& patience) {
  const Fd connection = makeSocket();
  socklen_t length = 0;
  const sockaddr_un address = abstractAddress(socketName, length);
  if (connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    throwShmError("reaching rank 0's Unix socket (the processes of a host must share a network namespace)",
                  errno);
  }
  if (send(connection.get(), token.data(), token.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(token.size())) {
    if (errno == EPIPE || errno == ECONNRESET) {
      return std::nullopt;
    }
    throwShmError("asking rank 0 for the segment", errno);
  }
  waitReadable(connection, patience, "rank 0's handing over the segment");
  char byte = 0;
  iovec data{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = recvmsg(connection.get(), &message, MSG_CMSG_CLOEXEC);
  if (got == 0 || (got < 0 && errno == ECONNRESET)) {
    return std::nullopt;
  }
  const cmsghdr* header = got == 1 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) {
    throw Error(Fault::kRemote, "rank 0", "did not hand over the shared segment");
  }
  std::vector<int> fds((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
  std::memcpy(fds.data(), CMSG_DATA(header), fds.size() * sizeof(int));
  ShmHandover handover;
  for (const int fd : fds) {
    if (!handover.memory) {
      handover.memory = Fd(fd);
    } else {
      handover.doorbells.emplace_back(fd);
    }
  }
  return handover;
}

}  // namespace

void throwShmError(const std::string& what, int error) {
  throw Error(Fault::kSystem, "", "shared memory: " + what + ": " + errnoText(error));
}

std::vector<Fd> ShmHandover::makeDoorbells(int count) {
  std::vector<Fd> doorbells;
  for (int i = 0; i < count; ++i) {
    doorbells.emplace_back(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!doorbells.back()) {
      throwShmError("eventfd", errno);
    }
  }
  return doorbells;
}

Fd listenForShm(const std::string& socketName, int backlog) {
  Fd fd = makeSocket();
  socklen_t length = 0;
  const sockaddr_un address = abstractAddress(socketName, length);
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(fd.get(), backlog) != 0) {
    throwShmError("listening on a Unix socket", errno);
  }
  return fd;
}

void serveShm(const Fd& listener, const ShmHandover& handover, const std::string& token, int numPeers,
              const Patience& patience) {
  for (int served = 0; served < numPeers;) {
    waitReadable(listener, patience, "the other ranks' fetching of the segment");
    const Fd connection(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!connection && errno != EINTR && errno != ECONNABORTED && errno != EAGAIN) {
      throwShmError("accepting the other ranks", errno);
    }
    if (connection && isMember(connection, token) && sendDescriptors(connection, handover)) {
      ++served;
    }
  }
}

ShmHandover fetchShm(const std::string& socketName, const std::string& token, size_t numDoorbells,
                     const Patience& patience) {
  // Rank 0 takes a rank that has no turn for long for a stranger.
  for (;;) {
    if (auto handover = askForShm(socketName, token, patience)) {
      if (handover->doorbells.size() != numDoorbells) {
        throw Error(Fault::kSystem, "rank 0",
                    "shared memory: not all descriptors came over (is the limit of open files too low?)");
      }
      return std::move(*handover);
    }
    if (Clock::now() >= patience.deadline) {
      throw Error(Fault::kRemote, "rank 0", "did not hand over the shared segment");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(kLookMs));
  }
}

}  // namespace baguarun::net
