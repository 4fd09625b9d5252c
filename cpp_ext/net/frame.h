// The header before every chunk. Pure functions on bytes.
//
// Frame (24 bytes, little endian): u32 sequence, u32 length, u64 offset, u64 total; then `length` bytes. The
// message `sequence` (counted from 0 per direction, modulo 2^32) has `total` bytes, of which these are the
// `length` from `offset` on. Within one stream sequence numbers never go back.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace baguarun::net {

inline constexpr size_t kFrameBytes = 24;
// More than any memory, far below where offset + length could wrap.
inline constexpr uint64_t kMaxMessageBytes = uint64_t{1} << 48;

struct Frame {
  uint32_t sequence = 0;
  uint32_t length = 0;
  uint64_t offset = 0;
  uint64_t total = 0;
};

using FrameHeader = std::array<uint8_t, kFrameBytes>;

FrameHeader encodeFrame(const Frame& frame);

// False where the numbers cannot be those of a peer that keeps to the protocol.
bool decodeFrame(std::span<const uint8_t, kFrameBytes> bytes, uint32_t chunkBytes, Frame& frame);

}  // namespace baguarun::net
