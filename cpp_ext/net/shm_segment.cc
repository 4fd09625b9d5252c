#include "net/shm_segment.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>

#include "net/error.h"

namespace baguarun::net {

namespace {

constexpr size_t kTokenBytes = 16;
// How long a connection on our socket may take to show its token; a stranger is dropped after it.
constexpr timeval kTokenTimeout{.tv_sec = 1, .tv_usec = 0};

std::string errorText(const std::string& what, int error = errno) {
  return what + ": " + std::strerror(error);
}

[[noreturn]] void throwSystem(const std::string& what, int error = errno) {
  throw Error(Fault::kSystem, "", errorText("shared memory: " + what, error));
}

// When the process started, in ticks since boot: with the pid it names a process for good. Empty: no such
// one.
std::string startTime(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  // The name in parentheses may hold anything; what follows the last one is numbers. The start is field 22.
  const size_t close = line.rfind(')');
  if (close == std::string::npos) {
    return "";
  }
  std::istringstream fields(line.substr(close + 1));
  std::string field;
  for (int number = 3; number <= 22; ++number) {
    fields >> field;
  }
  return field;
}

std::string pidNamespace() {
  struct stat facts;
  if (stat("/proc/self/ns/pid", &facts) != 0) {
    throwSystem("stat of /proc/self/ns/pid");
  }
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  file >> boot;
  return boot + "/" + std::to_string(facts.st_ino);
}

std::string hex(const unsigned char* bytes, size_t count) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
  }
  return text;
}

// What a rank tells the others first. One line, fields parted by '\n' in a fixed order.
struct Introduction {
  std::string nonce, size, totalBytes, place, pid, started, cpus, socketName, token, failure;

  std::string pack() const {
    std::string text;
    for (const std::string* field :
         {&nonce, &size, &totalBytes, &place, &pid, &started, &cpus, &socketName, &token, &failure}) {
      text += *field + '\n';
    }
    return text;
  }

  static Introduction unpack(const std::string& text) {
    Introduction it;
    std::istringstream lines(text);
    for (std::string* field : {&it.nonce, &it.size, &it.totalBytes, &it.place, &it.pid, &it.started, &it.cpus,
                               &it.socketName, &it.token, &it.failure}) {
      std::getline(lines, *field);
    }
    return it;
  }
};

std::string oneLine(std::string text) {
  for (char& c : text) {
    c = c == '\n' ? ' ' : c;
  }
  return text;
}

Fd makeMemory(const std::string& nonce, size_t reservedBytes, size_t totalBytes) {
  checkMemoryLeft(reservedBytes, "the shared segment");
  const std::string label = "baguarun-" + nonce.substr(0, 32);
  Fd fd(memfd_create(label.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) {
    throwSystem("memfd_create");
  }
  if (ftruncate(fd.get(), static_cast<off_t>(totalBytes)) != 0) {
    throwSystem("a segment of " + std::to_string(totalBytes) + " bytes");
  }
  if (reservedBytes > 0) {
    // posix_fallocate gives the error back; it does not set errno.
    const int error = posix_fallocate(fd.get(), 0, static_cast<off_t>(reservedBytes));
    if (error != 0) {
      throwSystem("reserving " + std::to_string(reservedBytes) + " bytes (raise the memory limit)", error);
    }
  }
  // Nobody can shorten the file under the others' feet.
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throwSystem("sealing the segment");
  }
  return fd;
}

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
    throwSystem("a Unix socket");
  }
  return fd;
}

Fd listenAt(const std::string& socketName, int backlog) {
  Fd fd = makeSocket();
  socklen_t length = 0;
  const sockaddr_un address = abstractAddress(socketName, length);
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(fd.get(), backlog) != 0) {
    throwSystem("listening on a Unix socket");
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
  return recv(connection.get(), given.data(), given.size(), MSG_WAITALL) ==
             static_cast<ssize_t>(token.size()) &&
         given == token;
}

// The kernel passes on at most 253 descriptors at once.
constexpr size_t kMaxDescriptors = 250;

// The memory and the doorbells.
struct Handover {
  Fd memory;
  std::vector<Fd> doorbells;
};

bool sendDescriptors(const Fd& connection, const Handover& handover) {
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

std::vector<Fd> makeDoorbells(int count) {
  std::vector<Fd> doorbells;
  for (int i = 0; i < count; ++i) {
    doorbells.emplace_back(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!doorbells.back()) {
      throwSystem("eventfd");
    }
  }
  return doorbells;
}

void waitReadable(const Fd& fd, Clock::time_point deadline, const char* what) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd entry{.fd = fd.get(), .events = POLLIN, .revents = 0};
    const int ready = poll(&entry, 1, static_cast<int>(std::max<int64_t>(left.count(), 0)));
    if (ready > 0) {
      return;
    }
    if (ready == 0) {
      throw Error(Fault::kTimeout, "", std::string("shared memory: ") + what + " took too long");
    }
    if (errno != EINTR) {
      throwSystem("poll");
    }
  }
}

void serveDescriptors(const Fd& listener, const Handover& handover, const std::string& token, int numPeers,
                      Clock::time_point deadline) {
  for (int served = 0; served < numPeers;) {
    waitReadable(listener, deadline, "the other ranks' fetching of the segment");
    const Fd connection(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (connection && isMember(connection, token) && sendDescriptors(connection, handover)) {
      ++served;
    }
  }
}

Handover fetchDescriptors(const std::string& socketName, const std::string& token, size_t numDoorbells,
                          Clock::time_point deadline) {
  const Fd connection = makeSocket();
  socklen_t length = 0;
  const sockaddr_un address = abstractAddress(socketName, length);
  if (connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    throwSystem("reaching rank 0's Unix socket (the processes of a host must share a network namespace)");
  }
  if (send(connection.get(), token.data(), token.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(token.size())) {
    throwSystem("asking rank 0 for the segment");
  }
  waitReadable(connection, deadline, "rank 0's handing over the segment");
  char byte = 0;
  iovec data{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = recvmsg(connection.get(), &message, MSG_CMSG_CLOEXEC);
  const cmsghdr* header = got == 1 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) {
    throw Error(Fault::kRemote, "rank 0", "did not hand over the shared segment");
  }
  std::vector<int> fds((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
  std::memcpy(fds.data(), CMSG_DATA(header), fds.size() * sizeof(int));
  Handover handover;
  for (const int fd : fds) {
    if (!handover.memory) {
      handover.memory = Fd(fd);
    } else {
      handover.doorbells.emplace_back(fd);
    }
  }
  if (handover.doorbells.size() != numDoorbells) {
    throw Error(Fault::kSystem, "rank 0",
                "shared memory: not all descriptors came over (is the limit of open files too low?)");
  }
  return handover;
}

Introduction introduce(const ShmSegment::Options& options) {
  Introduction me;
  me.nonce = oneLine(options.nonce);
  me.size = std::to_string(options.size);
  me.totalBytes = std::to_string(options.totalBytes);
  me.place = pidNamespace();
  me.pid = std::to_string(getpid());
  me.started = startTime(getpid());
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  // More CPUs than a cpu_set_t holds: the set stays empty, which only means that nobody spins.
  if (sched_getaffinity(0, sizeof(cpus), &cpus) == 0) {
    me.cpus = hex(reinterpret_cast<const unsigned char*>(&cpus), sizeof(cpus));
  }
  return me;
}

void checkIntroductions(const std::vector<Introduction>& all, size_t size) {
  if (all.size() != size) {
    throw Error(Fault::kUsage, "",
                "shared memory: the exchange gave " + std::to_string(all.size()) +
                    " blobs: want one of each of " + std::to_string(size) + " ranks");
  }
  for (size_t rank = 0; rank < size; ++rank) {
    const Introduction& it = all[rank];
    const std::string who = "rank " + std::to_string(rank);
    if (!it.failure.empty()) {
      throw Error(Fault::kSystem, who, it.failure);
    }
    if (it.nonce != all[0].nonce || it.size != all[0].size || it.totalBytes != all[0].totalBytes) {
      throw Error(Fault::kUsage, who,
                  "shared memory: its group is '" + it.nonce + "' of " + it.size + " ranks and " +
                      it.totalBytes + " bytes, rank 0's is '" + all[0].nonce + "' of " + all[0].size +
                      " and " + all[0].totalBytes);
    }
    if (it.place != all[0].place) {
      throw Error(Fault::kSystem, who,
                  "shared memory: is not on the host, or in the PID namespace, of rank 0");
    }
  }
}

int countUsableCpus(const std::vector<Introduction>& all) {
  int count = 0;
  for (size_t digit = 0; digit < 2 * sizeof(cpu_set_t); ++digit) {
    int bits = 0;
    for (const Introduction& it : all) {
      const char c = digit < it.cpus.size() ? it.cpus[digit] : '0';
      bits |= c <= '9' ? c - '0' : c - 'a' + 10;
    }
    count += __builtin_popcount(static_cast<unsigned>(bits));
  }
  return count;
}

std::vector<ShmPeer> openPeers(const std::vector<Introduction>& all, const ShmSegment& segment) {
  std::vector<ShmPeer> peers;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    ShmPeer peer{.pid = std::stoi(all[rank].pid), .pidfd = Fd(), .doorbell = Fd()};
    if (peer.pid != getpid()) {
      peer.pidfd = Fd(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
      if (!peer.pidfd && errno != ESRCH) {
        throwSystem("pidfd_open");
      }
      // Looked up after the pidfd was opened: the number cannot have gone to another process in between.
      if (!peer.pidfd || startTime(peer.pid) != all[rank].started) {
        throw Error(
            Fault::kRemote,
            "rank " + std::to_string(segment.label(static_cast<int>(rank))) + " (pid " + all[rank].pid + ")",
            "its process has ended");
      }
    }
    peers.push_back(std::move(peer));
  }
  return peers;
}

}  // namespace

void checkMemoryLeft(size_t bytes, const std::string& what) {
  std::ifstream file("/proc/meminfo");
  std::string key;
  size_t kib = 0;
  std::string unit;
  size_t left = std::numeric_limits<size_t>::max();
  while (file >> key >> kib && std::getline(file, unit)) {
    if (key == "MemAvailable:") {
      left = kib * 1024;
      break;
    }
  }
  if (bytes > left) {
    throw Error(Fault::kSystem, "",
                "shared memory: " + what + " needs " + std::to_string(bytes) + " bytes, the machine has " +
                    std::to_string(left) + " left");
  }
}

std::shared_ptr<ShmSegment> ShmSegment::connect(const Options& options, const BlobExchange& exchange) {
  Introduction me = introduce(options);
  const bool isFirst = options.rank == 0;
  Handover handover;
  Fd listener;
  if (isFirst) {
    // A failure here is told to the others, who would wait otherwise.
    try {
      std::array<unsigned char, kTokenBytes> random;
      if (getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) {
        throwSystem("getrandom");
      }
      me.token = hex(random.data(), random.size());
      me.socketName = "baguarun-shm-" + me.token.substr(0, 16) + "-" + me.pid;
      handover.memory = makeMemory(options.nonce, options.reservedBytes, options.totalBytes);
      handover.doorbells = makeDoorbells(options.size);
      listener = listenAt(me.socketName, options.size);
    } catch (const Error& error) {
      me.failure = oneLine(error.what());
    }
  }
  std::vector<Introduction> all;
  for (const std::string& blob : exchange(me.pack())) {
    all.push_back(Introduction::unpack(blob));
  }
  checkIntroductions(all, static_cast<size_t>(options.size));

  const auto deadline = Clock::now() + options.timeout;
  std::shared_ptr<ShmSegment> segment(new ShmSegment());
  segment->labels_ = options.labels;
  std::string failure;
  try {
    if (isFirst) {
      serveDescriptors(listener, handover, me.token, options.size - 1, deadline);
    } else {
      handover =
          fetchDescriptors(all[0].socketName, all[0].token, static_cast<size_t>(options.size), deadline);
    }
    segment->map(handover.memory, options.totalBytes);
    segment->peers_ = openPeers(all, *segment);
    for (size_t rank = 0; rank < all.size(); ++rank) {
      segment->peers_[rank].doorbell = std::move(handover.doorbells[rank]);
    }
    segment->usableCpus_ = countUsableCpus(all);
  } catch (const Error& error) {
    failure = oneLine(error.what());
  }
  // Nobody starts before everybody has it, and everybody learns why it failed.
  const std::vector<std::string> outcomes = exchange(failure);
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (!outcomes[rank].empty()) {
      throw Error(Fault::kRemote, "rank " + std::to_string(segment->label(static_cast<int>(rank))),
                  outcomes[rank]);
    }
  }
  return segment;
}

std::shared_ptr<ShmSegment> ShmSegment::forThreads(int size, size_t totalBytes) {
  std::shared_ptr<ShmSegment> segment(new ShmSegment());
  segment->map(makeMemory("threads", 0, totalBytes), totalBytes);
  for (Fd& doorbell : makeDoorbells(size)) {
    segment->peers_.push_back(ShmPeer{.pid = getpid(), .pidfd = Fd(), .doorbell = std::move(doorbell)});
  }
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  segment->usableCpus_ = sched_getaffinity(0, sizeof(cpus), &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
  return segment;
}

ShmSegment::~ShmSegment() {
  if (data_ != nullptr) {
    munmap(data_, bytes_);
  }
}

std::string ShmSegment::peerName(int rank) const {
  return "rank " + std::to_string(label(rank)) + " (pid " + std::to_string(peer(rank).pid) + ")";
}

void ShmSegment::map(const Fd& fd, size_t bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (address == MAP_FAILED) {
    throwSystem("mapping " + std::to_string(bytes) + " bytes");
  }
  data_ = static_cast<std::byte*>(address);
  bytes_ = bytes;
  // Only a wish: large pages are faster where the system allows them.
  madvise(data_, bytes, MADV_HUGEPAGE);
}

}  // namespace baguarun::net
