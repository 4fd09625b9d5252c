// What needs threads, or the core without NCCL's face: one scenario per run, also under sanitizers.
//
//   scenarios NAME      exit code 0, or a message and 1
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "net/backlog.h"
#include "net/connector.h"
#include "net/env.h"
#include "net/frame.h"
#include "net/link.h"
#include "net/listener.h"

namespace {

using namespace baguarun::net;
using namespace std::chrono_literals;

#define EXPECT(condition)                                                                \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (false)

Clock::time_point patience() { return Clock::now() + 60s; }

struct Pair {
  std::unique_ptr<Link> left;
  std::unique_ptr<Link> right;
};

Pair makePair(const Env& env) {
  Listener listener(Address::parse("127.0.0.1:0"), env);
  Connector connector(
      {.address = listener.address(), .nonce = listener.nonce(), .sender = 7, .peer = "rank 1"}, env);
  Pair pair;
  while (!pair.left || !pair.right) {
    if (!pair.left) {
      pair.left = connector.poll();
    }
    if (auto accepted = listener.accept()) {
      EXPECT(accepted->sender == 7);
      pair.right = std::move(accepted->link);
      pair.right->namePeer("rank 0");
    }
  }
  return pair;
}

Env withStreams(int numStreams, uint32_t chunkBytes = 16384) {
  return Env{.numStreams = numStreams, .chunkBytes = chunkBytes};
}

std::vector<uint8_t> noise(uint64_t seed, size_t size) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> bytes(size);
  for (uint8_t& byte : bytes) {
    byte = static_cast<uint8_t>(random());
  }
  return bytes;
}

// Sends `count` messages and receives as many, both at once, a few of each in flight.
void converse(Link& link, uint64_t mySeed, uint64_t theirSeed, size_t count) {
  constexpr size_t kInFlight = 5;
  const auto sizeOf = [](uint64_t seed, size_t number) {
    return std::mt19937_64(seed * 1000 + number)() % (number % 3 == 0 ? 200'000 : 300);
  };
  std::vector<std::vector<uint8_t>> out(count);
  std::vector<std::vector<uint8_t>> in(count);
  std::vector<Request*> sends(count);
  std::vector<Request*> receives(count);
  size_t posted = 0;
  for (size_t done = 0; done < count; ++done) {
    for (; posted < count && posted < done + kInFlight; ++posted) {
      out[posted] = noise(mySeed + posted, sizeOf(mySeed, posted));
      in[posted].resize(sizeOf(theirSeed, posted) + 10);
      receives[posted] = link.irecv(in[posted].data(), in[posted].size());
      sends[posted] = link.isend(out[posted].data(), out[posted].size());
      EXPECT(receives[posted] != nullptr && sends[posted] != nullptr);
    }
    const std::vector<uint8_t> expected = noise(theirSeed + done, sizeOf(theirSeed, done));
    EXPECT(link.wait(receives[done], patience()) == expected.size());
    EXPECT(std::memcmp(in[done].data(), expected.data(), expected.size()) == 0);
    EXPECT(link.wait(sends[done], patience()) == out[done].size());
    in[done].clear();
    in[done].shrink_to_fit();
  }
}

// Both ends in threads of their own, both directions at once.
void bothWays() {
  for (const int numStreams : {1, 3, 8}) {
    Pair pair = makePair(withStreams(numStreams));
    std::thread other([&] { converse(*pair.right, 1'000'000, 2'000'000, 60); });
    converse(*pair.left, 2'000'000, 1'000'000, 60);
    other.join();
  }
}

// Links have nothing in common: one pair per thread, both ends driven by it in turns.
void manyThreads() {
  std::vector<std::thread> threads;
  for (uint64_t number = 0; number < 4; ++number) {
    threads.emplace_back([number] {
      Pair pair = makePair(withStreams(2));
      for (size_t round = 0; round < 30; ++round) {
        const std::vector<uint8_t> data = noise(number * 100 + round, round * 5000);
        std::vector<uint8_t> room(data.size());
        Request* received = pair.right->irecv(room.data(), room.size());
        Request* sent = pair.left->isend(data.data(), data.size());
        bool isSent = false;
        bool isReceived = false;
        while (!isSent || !isReceived) {
          isSent = isSent || pair.left->test(sent).done;
          isReceived = isReceived || pair.right->test(received).done;
        }
        EXPECT(room == data);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

template <typename Call>
Error failureOf(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  std::fprintf(stderr, "no error where one was expected\n");
  std::exit(1);
}

// abort() from another thread ends a wait that sleeps, and the other side learns of it.
void abortEndsAWait() {
  for (int round = 0; round < 20; ++round) {
    Pair pair = makePair(withStreams(3));
    std::vector<uint8_t> room(100);
    std::atomic<bool> isWaiting{false};
    std::thread waiting([&] {
      Request* request = pair.left->irecv(room.data(), room.size());
      isWaiting.store(true);
      const Error error = failureOf([&] { pair.left->wait(request, patience()); });
      EXPECT(error.fault() == Fault::kAborted);
      EXPECT(error.peer() == "rank 1");
      EXPECT(failureOf([&] { pair.left->isend(room.data(), 1); }).fault() == Fault::kAborted);
    });
    while (!isWaiting.load()) {
      std::this_thread::yield();
    }
    pair.left->abort();
    waiting.join();
    Request* request = pair.right->irecv(room.data(), room.size());
    const Error error = failureOf([&] { pair.right->wait(request, patience()); });
    EXPECT(error.fault() == Fault::kRemote);
    EXPECT(error.peer() == "rank 0");
  }
}

// abort() while bytes move in both directions at full speed.
void abortInTheMiddle() {
  for (int round = 0; round < 10; ++round) {
    Pair pair = makePair(withStreams(4));
    const std::vector<uint8_t> data(4 << 20, 1);
    const auto pump = [&](Link& link) {
      std::vector<uint8_t> room(data.size());
      return failureOf([&] {
        for (;;) {
          Request* received = link.irecv(room.data(), room.size());
          Request* sent = link.isend(data.data(), data.size());
          link.wait(received, patience());
          link.wait(sent, patience());
        }
      });
    };
    std::atomic<int> numRemote{0};
    std::thread other([&] { numRemote += pump(*pair.right).fault() == Fault::kRemote; });
    std::thread aborting([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(round));
      pair.left->abort();
    });
    EXPECT(pump(*pair.left).fault() == Fault::kAborted);
    aborting.join();
    other.join();
    EXPECT(numRemote == 1);
  }
}

void deadlineEndsAWait() {
  Pair pair = makePair(withStreams(2));
  uint8_t byte = 0;
  Request* request = pair.right->irecv(&byte, 1);
  const Error error = failureOf([&] { pair.right->wait(request, Clock::now() + 20ms); });
  EXPECT(error.fault() == Fault::kTimeout);
  const uint8_t late = 42;
  pair.left->wait(pair.left->isend(&late, 1), patience());
  EXPECT(pair.right->wait(request, patience()) == 1 && byte == 42);
}

// Nothing to do costs nothing: progress() says so, and pollFd() stays quiet until there is something.
void idleIsQuiet() {
  Pair pair = makePair(withStreams(4));
  uint8_t byte = 0;
  Request* request = pair.right->irecv(&byte, 1);
  while (pair.right->progress()) {
  }
  epoll_event event{};
  EXPECT(epoll_wait(pair.right->pollFd(), &event, 1, 50) == 0);
  pair.left->wait(pair.left->isend(&byte, 1), patience());
  waitReadable(pair.right->pollFd(), 60s);
  EXPECT(pair.right->progress());
  EXPECT(pair.right->test(request).done);
  EXPECT(!pair.right->hasPending());
}

size_t countDescriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

void nothingLeaks() {
  makePair(withStreams(4));
  const size_t before = countDescriptors();
  for (int round = 0; round < 100; ++round) {
    Pair pair = makePair(withStreams(4));
    uint8_t byte = 1;
    pair.left->isend(&byte, 1);
    pair.left->progress();
  }
  EXPECT(countDescriptors() == before);
  const std::filesystem::directory_iterator threads("/proc/self/task");
  EXPECT(std::distance(begin(threads), end(threads)) == 1);
}

// More than 2^31 bytes in one message. Both sides map one page many times, so that it fits into any machine.
void huge() {
  constexpr size_t kSize = (size_t{1} << 31) + 12345;
  const int file = memfd_create("huge", MFD_CLOEXEC);
  constexpr size_t kWindow = 1 << 20;
  EXPECT(file >= 0 && ftruncate(file, kWindow) == 0);
  const auto map = [&] {
    auto* base = static_cast<uint8_t*>(
        mmap(nullptr, kSize + kWindow, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (size_t offset = 0; offset < kSize; offset += kWindow) {
      EXPECT(mmap(base + offset, kWindow, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) !=
             MAP_FAILED);
    }
    return base;
  };
  uint8_t* const memory = map();
  Pair pair = makePair(withStreams(4, 1 << 20));
  Request* received = pair.right->irecv(memory, kSize);
  Request* sent = pair.left->isend(memory, kSize);
  bool isSent = false;
  Status status;
  while (!status.done) {
    isSent = isSent || pair.left->test(sent).done;
    status = pair.right->test(received);
  }
  EXPECT(isSent && status.bytes == kSize);
}

// Members do not wait for a job that is not theirs, and taken ports are named.
void clearErrors() {
  const Env env = withStreams(1);
  Listener listener(Address::parse("127.0.0.1:0"), env);
  const Error taken = failureOf([&] { Listener(listener.address(), env); });
  EXPECT(taken.fault() == Fault::kSystem);
  EXPECT(std::string(taken.what()) ==
         "cannot listen on " + listener.address().toString() + ": Address already in use");
  const Error foreign = failureOf([&] { Listener(Address::parse("192.0.2.1:0"), env); });
  EXPECT(std::string(foreign.what()).starts_with("cannot listen on 192.0.2.1:0: "));
  const Error refused = failureOf([&] {
    Connector connector(
        {.address = Address::parse("127.0.0.1:1"), .nonce = {}, .sender = 0, .peer = "rank 5"}, env);
    while (!connector.poll()) {
    }
  });
  EXPECT(refused.peer() == "rank 5" && refused.fault() == Fault::kRemote);
}

// The end of one stream is seen long after anything moved, and before a message on another.
void aLateEndLosesNothing() {
  const Fd listener(::socket(AF_INET, SOCK_STREAM, 0));
  EXPECT(listen(listener.get(), 2) == 0);
  const Address address = localAddress(listener.get());
  std::vector<Fd> theirs;
  std::vector<Fd> ours;
  for (int index = 0; index < 2; ++index) {
    theirs.emplace_back(::socket(AF_INET, SOCK_STREAM, 0));
    EXPECT(connect(theirs.back().get(), address.raw(), address.rawSize()) == 0);
    ours.emplace_back(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK));
  }
  Link link(std::move(ours), {.chunkBytes = 16384, .peerTimeout = 500ms, .peer = "rank 1"});
  std::array<uint8_t, 8> room{};
  Request* request = link.irecv(room.data(), room.size());
  link.progress();
  std::this_thread::sleep_for(700ms);
  theirs.front() = Fd();
  EXPECT(!link.test(request).done);
  const FrameHeader header = encodeFrame({.sequence = 0, .length = 1, .offset = 0, .total = 1});
  EXPECT(send(theirs.back().get(), header.data(), header.size(), 0) == kFrameBytes);
  EXPECT(send(theirs.back().get(), "x", 1, 0) == 1);
  EXPECT(link.wait(request, patience()) == 1 && room.front() == 'x');
  request = link.irecv(room.data(), room.size());
  const auto begun = Clock::now();
  EXPECT(failureOf([&] { link.wait(request, patience()); }).fault() == Fault::kRemote);
  EXPECT(Clock::now() - begun < 30s);
}

// -1: the kernel does not know it.
int option(int fd, int name) {
  int value = -1;
  socklen_t size = sizeof(value);
  EXPECT(getsockopt(fd, SOL_SOCKET, name, &value, &size) == 0 || errno == ENOPROTOOPT);
  return value;
}

constexpr int kBufLock = 72;  // SO_BUF_LOCK, of Linux 5.14

// Who cannot take a limit back sets none. The kernel is made to look older than it is.
void noLimitsOnOldKernels() {
  std::array<sock_filter, 6> program{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_setsockopt, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[2])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kBufLock, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOPROTOOPT),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog filter{.len = program.size(), .filter = program.data()};
  EXPECT(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  EXPECT(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
  const Fd socket(::socket(AF_INET, SOCK_STREAM, 0));
  const int before = option(socket.get(), SO_SNDBUF);
  Backlog backlog;
  for (int round = 0; round < 2; ++round) {
    backlog.setLimit(socket.get(), 192 << 10);
    EXPECT(backlog.limit() == 0 && option(socket.get(), SO_SNDBUF) == before);
  }
}

// A limit is what it says, and one that the kernel would cut is none.
void limits() {
  const Fd socket(::socket(AF_INET, SOCK_STREAM, 0));
  // Before Linux 5.14 there are none.
  if (option(socket.get(), kBufLock) < 0) {
    return;
  }
  const auto isLocked = [&](bool wanted) { return option(socket.get(), kBufLock) == wanted; };
  Backlog backlog;
  for (const uint32_t tooMuch : {UINT32_MAX, UINT32_MAX, 0u}) {
    backlog.setLimit(socket.get(), 192 << 10);
    EXPECT(backlog.limit() == 192 << 10);
    EXPECT(option(socket.get(), SO_SNDBUF) == 192 << 10 && isLocked(true));
    backlog.setLimit(socket.get(), tooMuch);
    EXPECT(backlog.limit() == 0 && isLocked(false));
  }
}

const std::map<std::string, std::function<void()>> kScenarios{
    {"both-ways", bothWays},
    {"many-threads", manyThreads},
    {"abort-ends-a-wait", abortEndsAWait},
    {"abort-midway", abortInTheMiddle},
    {"deadline-ends-a-wait", deadlineEndsAWait},
    {"idle-is-quiet", idleIsQuiet},
    {"nothing-leaks", nothingLeaks},
    {"huge", huge},
    {"clear-errors", clearErrors},
    {"limits", limits},
    {"no-limits-on-old-kernels", noLimitsOnOldKernels},
    {"a-late-end-loses-nothing", aLateEndLosesNothing},
};

}  // namespace

int main(int argc, char** argv) {
  const auto found = argc == 2 ? kScenarios.find(argv[1]) : kScenarios.end();
  if (found == kScenarios.end()) {
    std::fprintf(stderr, "usage: scenarios NAME; see the end of scenarios.cpp\n");
    return 2;
  }
  found->second();
  return 0;
}
