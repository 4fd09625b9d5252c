// One TCP connection of a link: frames out in batches, frames in through a small stage.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <span>

#include "net/frame.h"
#include "net/socket.h"

namespace baguarun::net {

// How a visit to the socket ended.
enum class Visit {
  kMoved,    // bytes moved; there may be more
  kBlocked,  // nothing more now; the next edge of epoll says when
  kEnded,    // the peer closed its side
  kBroken,   // the connection is gone; error() says why
};

// Frames to be written together by one system call.
struct OutgoingFrame {
  FrameHeader header;
  const uint8_t* payload;
  uint32_t length;
  size_t request;  // number of the request slot that it belongs to
};

// The writing half. Threads: one at a time.
class StreamWriter {
 public:
  static constexpr size_t kMaxFrames = 16;

  bool isIdle() const noexcept { return count_ == 0; }
  bool isFull() const noexcept { return count_ == kMaxFrames; }
  void add(const OutgoingFrame& frame) { frames_[count_++] = frame; }
  std::span<const OutgoingFrame> frames() const noexcept { return std::span(frames_).first(count_); }

  // Writes what is left of the batch. kMoved with isIdle(): all of it; the caller credits frames() before
  // that by calling clear() afterwards.
  Visit write(int fd);
  bool isWritten() const noexcept { return written_ == total(); }
  void clear() noexcept { count_ = written_ = 0; }
  int error() const noexcept { return error_; }

 private:
  size_t total() const noexcept;

  std::array<OutgoingFrame, kMaxFrames> frames_;
  size_t count_ = 0;
  size_t written_ = 0;  // bytes of the batch
  int error_ = 0;
};

// The reading half: a stage of bytes that were read behind the wanted ones. Threads: one at a time.
class StreamReader {
 public:
  // Reads into `payload` first and what follows into the stage. Without payload into the stage alone.
  Visit read(int fd, std::span<uint8_t> payload);
  // Whether the last read took all that the kernel had.
  bool isDrained() const noexcept { return isDrained_; }
  // Of the last read: how many bytes of `payload` were filled.
  size_t filled() const noexcept { return filled_; }

  std::span<const uint8_t> staged() const noexcept {
    return std::span(stage_).subspan(begin_, end_ - begin_);
  }
  void consume(size_t count) noexcept;
  int error() const noexcept { return error_; }

 private:
  static constexpr size_t kStageBytes = 8 << 10;

  std::array<uint8_t, kStageBytes> stage_;
  size_t begin_ = 0;
  size_t end_ = 0;
  size_t filled_ = 0;
  bool isDrained_ = false;
  int error_ = 0;
};

// Whether the machine at the other end of `fd` answers: false when data or a window probe has been sent more
// than once and nothing at all came back for `timeout`. A peer that answers but does not read is alive.
bool peerAnswers(int fd, std::chrono::milliseconds timeout);

}  // namespace baguarun::net
