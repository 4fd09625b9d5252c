#include "net/frame.h"

#include "net/bytes.h"

namespace baguarun::net {

FrameHeader encodeFrame(const Frame& frame) {
  FrameHeader bytes{};
  store(&bytes[0], frame.sequence);
  store(&bytes[4], frame.length);
  store(&bytes[8], frame.offset);
  store(&bytes[16], frame.total);
  return bytes;
}

bool decodeFrame(std::span<const uint8_t, kFrameBytes> bytes, uint32_t chunkBytes, Frame& frame) {
  frame.sequence = load<uint32_t>(&bytes[0]);
  frame.length = load<uint32_t>(&bytes[4]);
  frame.offset = load<uint64_t>(&bytes[8]);
  frame.total = load<uint64_t>(&bytes[16]);
  const bool hasProgress = frame.length > 0 || (frame.total == 0 && frame.offset == 0);
  return hasProgress && frame.length <= chunkBytes && frame.total <= kMaxMessageBytes &&
         frame.offset <= frame.total && frame.length <= frame.total - frame.offset;
}

}  // namespace baguarun::net
