// One end of a measured connection; benchmarks/net_tcp.py runs two of them.
//
//   net_tcp_loop serve ADDRESS MODE WAYS SECONDS      prints "PORT NONCE", then the result
//   net_tcp_loop connect ADDRESS:PORT NONCE WAYS SECONDS   nonce "-": static
//
// MODE: link (ours) or static (each message cut into as many equal parts as there are streams, part i on
// stream i, done when all parts are: what NCCL's own transport does). WAYS: 1 (the connecting side sends)
// or 2. Messages are 1 MiB, 4 in flight, as NCCL's rings have them. The result: megabit/s received, core
// seconds per second.
#include <sys/resource.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "net/connector.h"
#include "net/env.h"
#include "net/link.h"
#include "net/listener.h"

namespace {

using namespace baguarun::net;

constexpr size_t kMessageBytes = 1 << 20;
constexpr size_t kInFlight = 4;

double cpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

double secondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Counts what arrives between the first second and the end: slow start and the last messages do not count.
class Meter {
 public:
  explicit Meter(double seconds) : seconds_(seconds), begin_(Clock::now()) {}
  bool isOver() {
    const double now = secondsSince(begin_);
    if (!warm_ && now >= kWarmUpSeconds) {
      warm_ = true;
      from_ = now;
      bytes_ = 0;
      cpu_ = cpuSeconds();
    }
    return now >= kWarmUpSeconds + seconds_;
  }
  void count(size_t bytes) { bytes_ += bytes; }
  void print() const {
    const double passed = secondsSince(begin_) - from_;
    std::printf("%.3f %.4f\n", 8e-6 * static_cast<double>(bytes_) / passed, (cpuSeconds() - cpu_) / passed);
    std::fflush(stdout);
  }

 private:
  static constexpr double kWarmUpSeconds = 1;
  const double seconds_;
  const Clock::time_point begin_;
  bool warm_ = false;
  double from_ = 0;
  size_t bytes_ = 0;
  double cpu_ = 0;
};

// 4 messages in flight in one direction.
class Lane {
 public:
  Lane(Link& link, bool sends) : link_(link), sends_(sends), memory_(kInFlight * kMessageBytes, 1) {
    for (size_t slot = 0; slot < kInFlight; ++slot) {
      post(slot);
    }
  }
  // Bytes done, reposting what is done.
  size_t advance() {
    size_t bytes = 0;
    while (!requests_.empty()) {
      const auto [request, slot] = requests_.front();
      const Status status = link_.test(request);
      if (!status.done) {
        break;
      }
      bytes += status.bytes;
      requests_.pop_front();
      post(slot);
    }
    return bytes;
  }

 private:
  void post(size_t slot) {
    uint8_t* data = memory_.data() + slot * kMessageBytes;
    requests_.emplace_back(sends_ ? link_.isend(data, kMessageBytes) : link_.irecv(data, kMessageBytes),
                           slot);
  }
  Link& link_;
  const bool sends_;
  std::vector<uint8_t> memory_;
  std::deque<std::pair<Request*, size_t>> requests_;
};

void runLink(Link& link, bool isSender, bool isReceiver, double seconds) {
  std::deque<Lane> lanes;
  if (isSender) {
    lanes.emplace_back(link, true);
  }
  const size_t receiving = lanes.size();
  if (isReceiver) {
    lanes.emplace_back(link, false);
  }
  Meter meter(seconds);
  try {
    while (!meter.isOver()) {
      size_t bytes = 0;
      for (size_t lane = 0; lane < lanes.size(); ++lane) {
        const size_t done = lanes[lane].advance();
        bytes += done;
        meter.count(lane == receiving || !isReceiver ? done : 0);
      }
      if (bytes == 0 && !link.progress()) {
        waitReadable(link.pollFd(), std::chrono::milliseconds(100));
      }
    }
  } catch (const Error&) {
    // The other side's time was over first.
  }
  meter.print();
}

// The rival. One direction; blocked parts wait in epoll.
void runStatic(const std::vector<Fd>& fds, bool isSender, double seconds) {
  std::vector<uint8_t> memory(kMessageBytes, 1);
  const size_t part = kMessageBytes / fds.size();
  std::vector<uint64_t> moved(fds.size(), 0);
  Epoll epoll;
  for (size_t index = 0; index < fds.size(); ++index) {
    epoll.add(fds[index].get(), (isSender ? EPOLLOUT : EPOLLIN) | EPOLLET, index);
  }
  std::vector<bool> ready(fds.size(), true);
  uint64_t complete = 0;
  Meter meter(seconds);
  while (!meter.isOver()) {
    bool any = false;
    for (size_t index = 0; index < fds.size(); ++index) {
      // Message m's part may move only while m is in flight.
      while (ready[index] && moved[index] < (complete + kInFlight) * part) {
        const size_t left = part - moved[index] % part;
        uint8_t* at = memory.data() + index * part + moved[index] % part;
        const ssize_t count = isSender ? send(fds[index].get(), at, left, MSG_NOSIGNAL | MSG_DONTWAIT)
                                       : recv(fds[index].get(), at, left, MSG_DONTWAIT);
        if (count == 0 || (count < 0 && errno != EAGAIN)) {
          return meter.print();
        }
        ready[index] = count > 0;
        moved[index] += count > 0 ? static_cast<uint64_t>(count) : 0;
        any |= count > 0;
      }
    }
    uint64_t slowest = moved[0] / part;
    for (const uint64_t bytes : moved) {
      slowest = std::min(slowest, bytes / part);
    }
    meter.count((slowest - complete) * part * fds.size());
    complete = slowest;
    std::array<epoll_event, 64> room;
    for (const epoll_event& event : epoll.wait(room, std::chrono::milliseconds(any ? 0 : 100))) {
      ready[event.data.u64] = true;
    }
  }
  meter.print();
}

std::string hex(const Nonce& nonce) {
  std::string text;
  for (const uint8_t byte : nonce) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", byte);
    text += digits;
  }
  return text;
}

Nonce unhex(const std::string& text) {
  Nonce nonce{};
  for (size_t index = 0; index < nonce.size(); ++index) {
    nonce[index] = static_cast<uint8_t>(std::stoul(text.substr(2 * index, 2), nullptr, 16));
  }
  return nonce;
}

void preparePlain(const Fd& fd, const Env& env) {
  setStreamOptions(fd.get(), env.peerTimeout);
  setNotSentLowWater(fd.get(), env.chunkBytes);
}

// Plain connections for the rival, in any order: its parts carry no names.
std::vector<Fd> acceptPlain(int listening, const Env& env) {
  std::vector<Fd> fds;
  while (fds.size() < static_cast<size_t>(env.numStreams)) {
    waitReadable(listening, std::chrono::milliseconds(100));
    Fd fd(accept4(listening, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) {
      preparePlain(fd, env);
      fds.push_back(std::move(fd));
    }
  }
  return fds;
}

std::vector<Fd> connectPlain(const Address& address, const Env& env) {
  std::vector<Fd> fds;
  for (int index = 0; index < env.numStreams; ++index) {
    Fd fd(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (connect(fd.get(), address.raw(), address.rawSize()) != 0) {
      throw Error(Fault::kSystem, "", "connect: " + errnoText(errno));
    }
    preparePlain(fd, env);
    fds.push_back(std::move(fd));
  }
  return fds;
}

void serve(const Address& address, bool isLink, bool bothWays, double seconds) {
  const Env env = Env::read();
  if (isLink) {
    Listener listener(address, env);
    std::printf("%d %s\n", listener.address().port(), hex(listener.nonce()).c_str());
    std::fflush(stdout);
    for (;;) {
      if (auto accepted = listener.accept()) {
        return runLink(*accepted->link, bothWays, true, seconds);
      }
      waitReadable(listener.pollFd(), std::chrono::milliseconds(100));
    }
  }
  Fd listening(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (bind(listening.get(), address.raw(), address.rawSize()) != 0 || listen(listening.get(), 64) != 0) {
    throw Error(Fault::kSystem, "", "listen: " + errnoText(errno));
  }
  std::printf("%d -\n", localAddress(listening.get()).port());
  std::fflush(stdout);
  runStatic(acceptPlain(listening.get(), env), false, seconds);
}

void connectTo(const Address& address, const std::string& nonce, bool bothWays, double seconds) {
  const Env env = Env::read();
  if (nonce == "-") {
    return runStatic(connectPlain(address, env), true, seconds);
  }
  Connector connector({.address = address, .nonce = unhex(nonce), .sender = 0, .peer = ""}, env);
  for (;;) {
    if (const auto link = connector.poll()) {
      return runLink(*link, true, bothWays, seconds);
    }
    waitReadable(connector.pollFd(), std::chrono::milliseconds(100));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  try {
    if (words.size() == 5 && words[0] == "serve") {
      serve(Address::parse(words[1]), words[2] == "link", words[3] == "2", std::stod(words[4]));
      return 0;
    }
    if (words.size() == 5 && words[0] == "connect") {
      connectTo(Address::parse(words[1]), words[2], words[3] == "2", std::stod(words[4]));
      return 0;
    }
    std::fprintf(stderr, "usage: see the head of net_tcp_loop.cpp\n");
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
