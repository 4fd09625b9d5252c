#include "net/shm_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
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
#include "net/shm_handover.h"

namespace baguarun::net {

namespace {

constexpr size_t kTokenBytes = 16;
// Everybody has just met: who does not come for the segment within this has ended.
constexpr std::chrono::seconds kHandoverTime{60};

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
    throwShmError("stat of /proc/self/ns/pid", errno);
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
    throwShmError("memfd_create", errno);
  }
  if (ftruncate(fd.get(), static_cast<off_t>(totalBytes)) != 0) {
    throwShmError("a segment of " + std::to_string(totalBytes) + " bytes", errno);
  }
  if (reservedBytes > 0) {
    // posix_fallocate gives the error back; it does not set errno.
    const int error = posix_fallocate(fd.get(), 0, static_cast<off_t>(reservedBytes));
    if (error != 0) {
      throwShmError("reserving " + std::to_string(reservedBytes) + " bytes (raise the memory limit)", error);
    }
  }
  // Nobody can shorten the file under the others' feet.
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throwShmError("sealing the segment", errno);
  }
  return fd;
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
        throwShmError("pidfd_open", errno);
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
  ShmHandover handover;
  Fd listener;
  if (isFirst) {
    // A failure here is told to the others, who would wait otherwise.
    try {
      std::array<unsigned char, kTokenBytes> random;
      if (getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) {
        throwShmError("getrandom", errno);
      }
      me.token = hex(random.data(), random.size());
      me.socketName = "baguarun-shm-" + me.token.substr(0, 16) + "-" + me.pid;
      handover.memory = makeMemory(options.nonce, options.reservedBytes, options.totalBytes);
      handover.doorbells = ShmHandover::makeDoorbells(options.size);
      listener = listenForShm(me.socketName, options.size);
    } catch (const Error& error) {
      me.failure = oneLine(error.what());
    }
  }
  std::vector<Introduction> all;
  for (const std::string& blob : exchange(me.pack())) {
    all.push_back(Introduction::unpack(blob));
  }
  checkIntroductions(all, static_cast<size_t>(options.size));

  const auto deadline = Clock::now() + std::min<Clock::duration>(options.timeout, kHandoverTime);
  std::shared_ptr<ShmSegment> segment(new ShmSegment());
  segment->labels_ = options.labels;
  std::string failure;
  try {
    if (isFirst) {
      serveShm(listener, handover, me.token, options.size - 1, {deadline, options.check});
    } else {
      handover = fetchShm(all[0].socketName, all[0].token, static_cast<size_t>(options.size),
                          {deadline, options.check});
    }
    segment->map(handover.memory, options.totalBytes);
    segment->peers_ = openPeers(all, *segment);
    for (size_t rank = 0; rank < all.size(); ++rank) {
      segment->peers_[rank].doorbell = std::move(handover.doorbells[rank]);
    }
    segment->usableCpus_ = countUsableCpus(all);
  } catch (const Error& error) {
    failure = oneLine(error.what());
    listener = Fd();  // who still waits on it need not
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
  for (Fd& doorbell : ShmHandover::makeDoorbells(size)) {
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

void ShmSegment::giveBack(std::byte* data, size_t bytes) const noexcept {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const auto offset = static_cast<size_t>(data - data_);
  const size_t begin = (offset + page - 1) / page * page;
  const size_t end = (offset + bytes) / page * page;
  if (begin < end) {
    // Where the system cannot, the memory stays until the segment goes.
    madvise(data_ + begin, end - begin, MADV_REMOVE);
  }
}

void ShmSegment::map(const Fd& fd, size_t bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (address == MAP_FAILED) {
    throwShmError("mapping " + std::to_string(bytes) + " bytes", errno);
  }
  data_ = static_cast<std::byte*>(address);
  bytes_ = bytes;
  // Only a wish: large pages are faster where the system allows them.
  madvise(data_, bytes, MADV_HUGEPAGE);
}

}  // namespace baguarun::net
