#include "net/hello.h"

#include <algorithm>
#include <vector>

#include "net/bytes.h"
#include "net/sha256.h"

namespace baguarun::net {

namespace {

constexpr std::array<uint8_t, 8> kMagic{'B', 'A', 'G', 'U', 'A', 'N', 'E', 'T'};
constexpr size_t kVersionAt = 8;
constexpr size_t kVersionEnd = 10;
constexpr size_t kHelloTagAt = 64;
constexpr size_t kWelcomeTagAt = 24;

enum WireVerdict : uint16_t { kAccepted = 0, kVersionRefused = 1 };

std::span<const uint8_t> asBytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// Whether what arrived begins as our messages do, as far as it goes.
bool startsLikeOurs(std::span<const uint8_t> received) {
  const size_t known = std::min(received.size(), kMagic.size());
  return std::equal(received.begin(), received.begin() + static_cast<ptrdiff_t>(known), kMagic.begin());
}

Digest tagWelcome(const HelloBytes& hello, std::span<const uint8_t> body, const std::string& secret) {
  std::vector<uint8_t> signedBytes(hello.begin(), hello.end());
  signedBytes.insert(signedBytes.end(), body.begin(), body.end());
  return hmacSha256(asBytes(secret), signedBytes);
}

bool isInRange(uint16_t numStreams, uint32_t chunkBytes) {
  return numStreams >= 1 && numStreams <= kMaxStreams && chunkBytes >= kMinChunkBytes &&
         chunkBytes <= kMaxChunkBytes;
}

}  // namespace

HelloBytes encodeHello(const Hello& hello, const std::string& secret) {
  HelloBytes bytes{};
  std::ranges::copy(kMagic, bytes.begin());
  store(&bytes[kVersionAt], kWireVersion);
  store(&bytes[10], hello.stream);
  store(&bytes[12], hello.numStreams);
  store(&bytes[16], hello.chunkBytes);
  std::ranges::copy(hello.nonce, &bytes[24]);
  std::ranges::copy(hello.linkId, &bytes[40]);
  store(&bytes[56], hello.sender);
  const Digest tag = hmacSha256(asBytes(secret), std::span(bytes).first(kHelloTagAt));
  std::ranges::copy(tag, &bytes[kHelloTagAt]);
  return bytes;
}

HelloVerdict decodeHello(std::span<const uint8_t> received, const Nonce& nonce, const std::string& secret,
                         Hello& hello) {
  if (!startsLikeOurs(received)) {
    return HelloVerdict::kStranger;
  }
  if (received.size() < kVersionEnd) {
    return HelloVerdict::kIncomplete;
  }
  if (load<uint16_t>(&received[kVersionAt]) != kWireVersion) {
    return HelloVerdict::kOtherVersion;
  }
  if (received.size() < kHelloBytes) {
    return HelloVerdict::kIncomplete;
  }
  const Digest tag = hmacSha256(asBytes(secret), received.first(kHelloTagAt));
  const bool isOfThisJob = equalInConstantTime(tag, received.subspan(kHelloTagAt, tag.size())) &&
                           equalInConstantTime(nonce, received.subspan(24, nonce.size()));
  if (!isOfThisJob || received.size() > kHelloBytes) {
    return HelloVerdict::kStranger;
  }
  hello.stream = load<uint16_t>(&received[10]);
  hello.numStreams = load<uint16_t>(&received[12]);
  hello.chunkBytes = load<uint32_t>(&received[16]);
  hello.nonce = nonce;
  std::ranges::copy(received.subspan(40, hello.linkId.size()), hello.linkId.begin());
  hello.sender = load<uint64_t>(&received[56]);
  const bool isSane = isInRange(hello.numStreams, hello.chunkBytes) && hello.stream < hello.numStreams;
  return isSane ? HelloVerdict::kWelcome : HelloVerdict::kStranger;
}

WelcomeBytes encodeWelcome(const HelloBytes& hello, const Welcome& welcome, const std::string& secret) {
  WelcomeBytes bytes{};
  std::ranges::copy(kMagic, bytes.begin());
  store(&bytes[kVersionAt], kWireVersion);
  store<uint16_t>(&bytes[10], kAccepted);
  store(&bytes[12], welcome.numStreams);
  store(&bytes[16], welcome.chunkBytes);
  const Digest tag = tagWelcome(hello, std::span(bytes).first(kWelcomeTagAt), secret);
  std::ranges::copy(tag, &bytes[kWelcomeTagAt]);
  return bytes;
}

WelcomeBytes encodeVersionRefusal() {
  WelcomeBytes bytes{};
  std::ranges::copy(kMagic, bytes.begin());
  store(&bytes[kVersionAt], kWireVersion);
  store<uint16_t>(&bytes[10], kVersionRefused);
  return bytes;
}

WelcomeVerdict decodeWelcome(std::span<const uint8_t> received, const HelloBytes& hello,
                             const std::string& secret, Welcome& welcome) {
  if (!startsLikeOurs(received)) {
    return WelcomeVerdict::kStranger;
  }
  if (received.size() < kVersionEnd) {
    return WelcomeVerdict::kIncomplete;
  }
  if (load<uint16_t>(&received[kVersionAt]) != kWireVersion) {
    return WelcomeVerdict::kOtherVersion;
  }
  if (received.size() < kWelcomeBytes) {
    return WelcomeVerdict::kIncomplete;
  }
  const Digest tag = tagWelcome(hello, received.first(kWelcomeTagAt), secret);
  if (load<uint16_t>(&received[10]) != kAccepted ||
      !equalInConstantTime(tag, received.subspan(kWelcomeTagAt, tag.size()))) {
    return WelcomeVerdict::kStranger;
  }
  welcome.numStreams = load<uint16_t>(&received[12]);
  welcome.chunkBytes = load<uint32_t>(&received[16]);
  return isInRange(welcome.numStreams, welcome.chunkBytes) ? WelcomeVerdict::kAgreed
                                                           : WelcomeVerdict::kStranger;
}

}  // namespace baguarun::net
