// What two sides say before a stream carries data. Pure functions on bytes; the sockets are in listener.cc
// and connector.cc.
//
// The listener makes a nonce and gives it away with its address, by a channel that only members of the job
// read (NCCL's bootstrap, c10d's store). The connecting side says, on every stream,
//
//   Hello (96 bytes, little endian): magic "BAGUANET", u16 version, u16 stream, u16 streams, u16 0,
//     u32 chunk bytes, u32 0, nonce[16], link id[16], u64 sender, tag[32]
//
// and gets
//
//   Welcome (56 bytes): magic "BAGUANET", u16 version, u16 verdict, u16 streams, u16 0, u32 chunk bytes, u32
//   0,
//     tag[32]
//
// Stream 0 goes first with the number of streams and the chunk size it wants; its welcome has what was
// agreed, the smaller of both sides' wishes. The other streams then say the agreed numbers.
//
// Tags are HMAC-SHA256 under the job's secret, over the hello, and over hello and welcome. HMAC rather than a
// secret sent as it is: whoever listens on the wire, or makes us connect to the wrong port, learns nothing.
// It authenticates the set-up, not the data that follows.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

namespace baguarun::net {

using Nonce = std::array<uint8_t, 16>;

inline constexpr uint16_t kWireVersion = 1;
inline constexpr size_t kHelloBytes = 96;
inline constexpr size_t kWelcomeBytes = 56;
inline constexpr int kMaxStreams = 64;
inline constexpr uint32_t kMinChunkBytes = 4096;
inline constexpr uint32_t kMaxChunkBytes = 1 << 20;

struct Hello {
  uint16_t stream = 0;
  uint16_t numStreams = 0;
  uint32_t chunkBytes = 0;
  Nonce nonce{};        // the listener's
  Nonce linkId{};       // made by the connecting side, the same on all streams of one link
  uint64_t sender = 0;  // whatever the connecting side wants to be known by, a rank for instance
};

struct Welcome {
  uint16_t numStreams = 0;
  uint32_t chunkBytes = 0;
};

using HelloBytes = std::array<uint8_t, kHelloBytes>;
using WelcomeBytes = std::array<uint8_t, kWelcomeBytes>;

HelloBytes encodeHello(const Hello& hello, const std::string& secret);

// What the bytes received so far are.
enum class HelloVerdict {
  kIncomplete,    // a hello as far as can be seen
  kStranger,      // not of this job, or not our protocol: drop without an answer
  kOtherVersion,  // our protocol, another version: answer with kVersionRefusal and drop
  kWelcome,       // `hello` is filled
};
HelloVerdict decodeHello(std::span<const uint8_t> received, const Nonce& nonce, const std::string& secret,
                         Hello& hello);

// The answer to `hello`, which offered no less than what `welcome` agrees to.
WelcomeBytes encodeWelcome(const HelloBytes& hello, const Welcome& welcome, const std::string& secret);

// The answer to a hello of another version.
WelcomeBytes encodeVersionRefusal();

enum class WelcomeVerdict { kIncomplete, kStranger, kOtherVersion, kAgreed };
WelcomeVerdict decodeWelcome(std::span<const uint8_t> received, const HelloBytes& hello,
                             const std::string& secret, Welcome& welcome);

}  // namespace baguarun::net
