#include "engine/shared_area.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace baguarun::engine {

namespace {

constexpr size_t kLine = 64;
// How often a sleeping rank looks whether those it waits for are still there.
constexpr std::chrono::milliseconds kGlance{20};

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

size_t roundUp(size_t value) { return (value + kLine - 1) / kLine * kLine; }

[[noreturn]] void throwErrno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// Sleeps while `word` is `value`, for kGlance at most.
void sleepWhile(const std::atomic<uint32_t>& word, uint32_t value) {
  const timespec limit{0, std::chrono::nanoseconds(kGlance).count()};
  // EAGAIN, EINTR and ETIMEDOUT all mean: look again.
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &limit, nullptr, 0);
}

void wakeAll(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Rounds are compared as on a circle: they may overflow.
bool reached(uint32_t found, uint32_t wanted) { return static_cast<int32_t>(found - wanted) >= 0; }

}  // namespace

Descriptor::~Descriptor() {
  if (value_ >= 0) {
    close(value_);
  }
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(value_, other.value_);
  return *this;
}

SharedSegment::SharedSegment(Descriptor descriptor, size_t bytes)
    : descriptor_(std::move(descriptor)), bytes_(bytes) {
  void* place = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_.get(), 0);
  if (place == MAP_FAILED) {
    throwErrno("mapping shared memory");
  }
  data_ = static_cast<std::byte*>(place);
}

SharedSegment::~SharedSegment() { munmap(data_, bytes_); }

std::shared_ptr<SharedSegment> SharedSegment::create(size_t bytes) {
  Descriptor descriptor(memfd_create("baguarun-buckets", MFD_CLOEXEC));
  if (descriptor.get() < 0) {
    throwErrno("making shared memory");
  }
  // Reserved now: too little memory is an error here, not a SIGBUS later.
  if (const int error = posix_fallocate(descriptor.get(), 0, static_cast<off_t>(bytes)); error != 0) {
    throw std::system_error(error, std::generic_category(), "reserving shared memory");
  }
  return std::make_shared<SharedSegment>(std::move(descriptor), bytes);
}

std::shared_ptr<SharedSegment> SharedSegment::open(int64_t pid, int64_t fd, size_t bytes) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  Descriptor descriptor(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (descriptor.get() < 0) {
    throwErrno("opening " + path);
  }
  return std::make_shared<SharedSegment>(std::move(descriptor), bytes);
}

SharedArea::SharedArea(const std::vector<size_t>& sizes) {
  // A line for the header, then a line per counter, so that ranks do not take lines from each other.
  size_t offset = roundUp(kLine * (1 + 2 * sizes.size()));
  for (const size_t size : sizes) {
    offsets_.push_back(offset);
    offset += roundUp(size);
  }
  bytes_ = offset;
}

void SharedArea::create(size_t rank, size_t numRanks) {
  rank_ = rank;
  segments_.resize(numRanks);
  processes_.resize(numRanks);
  pids_.assign(numRanks, 0);
  segments_[rank] = SharedSegment::create(bytes_);
}

void SharedArea::open(size_t peer, int64_t pid, int64_t descriptor) {
  pids_[peer] = pid;
  segments_[peer] = SharedSegment::open(pid, descriptor, bytes_);
  processes_[peer] = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0)));
  if (processes_[peer].get() < 0) {
    throwErrno("watching process " + std::to_string(pid));
  }
}

void SharedArea::post(Milestone milestone, size_t index, uint32_t round) {
  Counter& word = counter(rank_, milestone, index);
  word.store(round, std::memory_order_release);
  wakeAll(word);
}

void SharedArea::wait(Milestone milestone, size_t index, uint32_t round, size_t peer,
                      std::chrono::milliseconds timeout) {
  const Counter& word = counter(peer, milestone, index);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  uint32_t found = word.load(std::memory_order_acquire);
  while (!reached(found, round)) {
    sleepWhile(word, found);
    const bool late = std::chrono::steady_clock::now() >= deadline;
    try {
      throwIfHopeless(peer);
      if (late) {
        throw std::runtime_error("timed out after " + std::to_string(timeout.count()) + " ms");
      }
    } catch (const std::runtime_error&) {
      // What it did before it ended counts.
      if (!reached(word.load(std::memory_order_acquire), round)) {
        throw;
      }
    }
    found = word.load(std::memory_order_acquire);
  }
}

void SharedArea::abort() { gaveUp(rank_).store(1, std::memory_order_release); }

SharedArea::Counter& SharedArea::counter(size_t rank, Milestone milestone, size_t index) const {
  std::byte* place = segments_[rank]->data() + kLine * (1 + 2 * index + static_cast<size_t>(milestone));
  return *reinterpret_cast<Counter*>(place);
}

SharedArea::Counter& SharedArea::gaveUp(size_t rank) const {
  return *reinterpret_cast<Counter*>(segments_[rank]->data());
}

void SharedArea::throwIfHopeless(size_t peer) const {
  if (gaveUp(rank_).load(std::memory_order_acquire) != 0) {
    throw std::runtime_error("aborted");
  }
  pollfd process{processes_[peer].get(), POLLIN, 0};
  if (poll(&process, 1, 0) > 0) {
    throw std::runtime_error("its process (pid " + std::to_string(pids_[peer]) + ") has ended");
  }
  if (gaveUp(peer).load(std::memory_order_acquire) != 0) {
    throw std::runtime_error("it gave up; its own error says why");
  }
}

}  // namespace baguarun::engine
