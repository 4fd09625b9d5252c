// A fuzz target for all that a stranger or a broken peer can send: hello, welcome, chunk headers, whole
// streams.
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

#include "net/frame.h"
#include "net/hello.h"
#include "net/link.h"
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

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0 || size > 16384) {
    return 0;
  }
  const Input input(data + 1, size - 1);
  switch (data[0] % 4) {
    case 0:
      tryHello(input);
      break;
    case 1:
      tryWelcome(input);
      break;
    case 2:
      tryFrame(input);
      break;
    default:
      tryLink(input);
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
