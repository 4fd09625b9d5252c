// A fuzz target for all that a stranger or a broken peer can send: hello, welcome, chunk headers, whole
// streams, and what several of them do to a listener.
//
// With clang: -fsanitize=fuzzer. Without: -DSTANDALONE gives a main() that mutates seeds, `fuzz_wire RUNS
// SEED`.
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "net/connector.h"
#include "net/frame.h"
#include "net/hello.h"
#include "net/link.h"
#include "net/listener.h"
#include "net/sha256.h"
#include "net/socket.h"

namespace {

using namespace baguarun::net;
using Input = std::span<const uint8_t>;

#define REQUIRE(condition)                                    \
  do {                                                        \
    if (!(condition)) {                                       \
      std::fprintf(stderr, "%s does not hold\n", #condition); \
      std::abort();                                           \
    }                                                         \
  } while (false)

const std::string kSecret = "secret";
const Nonce kNonce{1, 2, 3};

void requireSane(const Hello& hello) {
  REQUIRE(hello.numStreams >= 1 && hello.numStreams <= kMaxStreams && hello.stream < hello.numStreams);
  REQUIRE(hello.chunkBytes >= kMinChunkBytes && hello.chunkBytes <= kMaxChunkBytes);
}

void tryHello(Input input) {
  Hello hello;
  REQUIRE(decodeHello(input, kNonce, kSecret, hello) != HelloVerdict::kWelcome ||
          input.size() == kHelloBytes);
  // The same with the right nonce and tag: as a member of the job that sends nonsense.
  HelloBytes bytes = encodeHello({.nonce = kNonce}, kSecret);
  std::copy_n(input.begin(), std::min<size_t>(input.size(), 8), bytes.begin() + 10);
  std::copy_n(input.begin(), std::min<size_t>(input.size(), 8), bytes.begin() + 14);
  const Digest tag = hmacSha256({reinterpret_cast<const uint8_t*>(kSecret.data()), kSecret.size()},
                                std::span(bytes).first(64));
  std::ranges::copy(tag, bytes.begin() + 64);
  if (decodeHello(bytes, kNonce, kSecret, hello) == HelloVerdict::kWelcome) {
    requireSane(hello);
  }
}

void tryWelcome(Input input) {
  static const HelloBytes hello = encodeHello({.nonce = kNonce}, kSecret);
  Welcome welcome;
  REQUIRE(decodeWelcome(input, hello, kSecret, welcome) != WelcomeVerdict::kAgreed);
}

void tryFrame(Input input) {
  FrameHeader bytes{};
  std::copy_n(input.begin(), std::min(input.size(), bytes.size()), bytes.begin());
  Frame frame;
  if (decodeFrame(bytes, 4096, frame)) {
    REQUIRE(frame.length <= 4096 && frame.offset + frame.length <= frame.total);
    REQUIRE(encodeFrame(frame) == bytes);
  }
}

// Two connected sockets.
std::pair<Fd, Fd> connectedSockets() {
  static const Fd listening = [] {
    Fd fd = makeTcpSocket(AF_INET);
    const Address any = Address::parse("127.0.0.1:0");
    REQUIRE(bind(fd.get(), any.raw(), any.rawSize()) == 0 && listen(fd.get(), 8) == 0);
    return fd;
  }();
  static const Address address = localAddress(listening.get());
  Fd one = makeTcpSocket(AF_INET);
  connect(one.get(), address.raw(), address.rawSize());
  waitReadable(listening.get(), std::chrono::seconds(10));
  Fd other(accept4(listening.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  REQUIRE(other);
  // No TIME_WAIT: there are more runs than ports.
  const linger abortive{.l_onoff = 1, .l_linger = 0};
  setsockopt(one.get(), SOL_SOCKET, SO_LINGER, &abortive, sizeof(abortive));
  setsockopt(other.get(), SOL_SOCKET, SO_LINGER, &abortive, sizeof(abortive));
  return {std::move(one), std::move(other)};
}

// `input` as what a peer sends behind its hello, into rooms with guards.
void tryLink(Input input) {
  constexpr std::array<size_t, 4> kRooms{0, 1, 100, 9000};
  constexpr size_t kGuard = 64;
  auto [ours, theirs] = connectedSockets();
  std::vector<Fd> fds;
  fds.push_back(std::move(ours));
  Link link(std::move(fds), {.chunkBytes = 4096, .peerTimeout = std::chrono::seconds(10), .peer = "fuzzer"});
  std::vector<std::vector<uint8_t>> rooms;
  std::vector<Request*> requests;
  for (const size_t size : kRooms) {
    rooms.emplace_back(size + kGuard, 0xA5);
    requests.push_back(link.irecv(rooms.back().data(), size));
  }
  REQUIRE(send(theirs.get(), input.data(), input.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(input.size()));
  shutdown(theirs.get(), SHUT_WR);
  try {
    for (Request* request : requests) {
      const size_t bytes = link.wait(request, Clock::now() + std::chrono::seconds(10));
      REQUIRE(bytes <= kRooms[static_cast<size_t>(std::ranges::find(requests, request) - requests.begin())]);
    }
  } catch (const Error& error) {
    REQUIRE(error.fault() == Fault::kRemote || error.fault() == Fault::kUsage);
    REQUIRE(error.peer() == "fuzzer");
  }
  for (size_t index = 0; index < rooms.size(); ++index) {
    REQUIRE(std::all_of(rooms[index].begin() + static_cast<ptrdiff_t>(kRooms[index]), rooms[index].end(),
                        [](uint8_t byte) { return byte == 0xA5; }));
  }
}

// Reads numbers from the front of an input; zeros behind its end.
class Script {
 public:
  explicit Script(Input input) : left_(input) {}
  bool isOver() const { return left_.empty(); }
  Input take(size_t count) {
    const Input taken = left_.first(std::min(count, left_.size()));
    left_ = left_.subspan(taken.size());
    return taken;
  }
  template <typename Number>
  Number number() {
    Number value = 0;
    const Input bytes = take(sizeof(value));
    std::memcpy(&value, bytes.data(), bytes.size());
    return value;
  }

 private:
  Input left_;
};

const Env kListenerEnv{.numStreams = 3, .chunkBytes = 8192, .secret = kSecret};

Fd dial(const Listener& listener) {
  Fd fd = makeTcpSocket(AF_INET);
  const linger abortive{.l_onoff = 1, .l_linger = 0};
  setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &abortive, sizeof(abortive));
  connect(fd.get(), listener.address().raw(), listener.address().rawSize());
  return fd;
}

// One step of somebody on the port: bytes, a hello that only its numbers may spoil, an end.
void act(Fd& fd, Script& script, const Listener& listener) {
  const auto say = [&](Input bytes) {
    send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  };
  switch (script.number<uint8_t>() % 4) {
    case 0:
      say(script.take(script.number<uint8_t>()));
      break;
    case 1: {
      const Hello hello{.stream = script.number<uint16_t>(),
                        .numStreams = script.number<uint16_t>(),
                        .chunkBytes = script.number<uint32_t>(),
                        .nonce = listener.nonce(),
                        .linkId = {static_cast<uint8_t>(script.number<uint8_t>() % 2)}};
      say(encodeHello(hello, kSecret));
      break;
    }
    case 2:
      shutdown(fd.get(), SHUT_WR);
      break;
    default:
      fd = Fd();
      break;
  }
}

// `input` as what three others do on a port; an honest peer must get in all the same. Not tried on every
// input: what ends in order leaves the kernel with connections in TIME_WAIT, and many of them make it slow.
void tryListener(Input input) {
  Listener listener(Address::parse("127.0.0.1:0"), kListenerEnv);
  std::array<Fd, 3> others;
  Script script(input);
  const auto accept = [&] {
    auto accepted = listener.accept();
    if (accepted.has_value()) {
      REQUIRE(accepted->link->numStreams() >= 1 && accepted->link->numStreams() <= 3);
      REQUIRE(accepted->link->chunkBytes() >= kMinChunkBytes && accepted->link->chunkBytes() <= 8192);
    }
    return accepted;
  };
  for (int step = 0; step < 24 && !script.isOver(); ++step) {
    Fd& other = others[script.number<uint8_t>() % others.size()];
    if (!other) {
      other = dial(listener);
    }
    act(other, script, listener);
    accept();
  }
  if (input.size() % 8 != 0) {
    return;
  }
  Connector connector(
      {.address = listener.address(), .nonce = listener.nonce(), .sender = 99, .peer = "listener"},
      kListenerEnv);
  const auto deadline = Clock::now() + std::chrono::seconds(10);
  std::unique_ptr<Link> near;
  std::unique_ptr<Link> far;
  while (!near || !far) {
    REQUIRE(Clock::now() < deadline);
    if (!near) {
      near = connector.poll();
    }
    if (auto accepted = accept(); accepted.has_value() && accepted->sender == 99) {
      far = std::move(accepted->link);
    }
  }
  REQUIRE(near->numStreams() == 3 && far->numStreams() == 3);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0 || size > 16384) {
    return 0;
  }
  const Input input(data + 1, size - 1);
  switch (data[0] % 5) {
    case 0:
      tryHello(input);
      break;
    case 1:
      tryWelcome(input);
      break;
    case 2:
      tryFrame(input);
      break;
    case 3:
      tryLink(input);
      break;
    default:
      tryListener(input);
      break;
  }
  return 0;
}

#ifdef STANDALONE
namespace {

std::vector<uint8_t> makeInput(std::mt19937_64& random) {
  std::vector<uint8_t> input{static_cast<uint8_t>(random())};
  const auto append = [&](const auto& bytes) { input.insert(input.end(), bytes.begin(), bytes.end()); };
  if (random() % 2 == 0) {
    append(encodeHello({.numStreams = 4, .chunkBytes = 4096, .nonce = kNonce}, random() % 2 ? kSecret : ""));
  }
  for (size_t step = 0; step < random() % 6; ++step) {
    // As tryListener() reads it: who, a hello, its numbers and link.
    append(std::array<uint8_t, 11>{static_cast<uint8_t>(random() % 3), 1, static_cast<uint8_t>(random() % 4),
                                   0, static_cast<uint8_t>(random() % 5), 0, 0, 0x20, 0, 0,
                                   static_cast<uint8_t>(random())});
  }
  for (uint32_t sequence = 0; sequence < random() % 6; ++sequence) {
    const uint64_t total = random() % 5 == 0 ? random() % 10000 : random() % 120;
    const auto length = static_cast<uint32_t>(std::min<uint64_t>(total, random() % 4097));
    append(encodeFrame({.sequence = sequence, .length = length, .offset = 0, .total = total}));
    append(std::vector<uint8_t>(length, 7));
  }
  for (size_t change = 0; change < random() % 4; ++change) {
    input[random() % input.size()] = static_cast<uint8_t>(random());
  }
  if (random() % 4 == 0) {
    input.resize(1 + random() % input.size());
  }
  return input;
}

}  // namespace

int main(int, char** argv) {
  std::mt19937_64 random(std::stoull(argv[2]));
  for (uint64_t left = std::stoull(argv[1]); left > 0; --left) {
    const std::vector<uint8_t> input = makeInput(random);
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  return 0;
}
#endif
