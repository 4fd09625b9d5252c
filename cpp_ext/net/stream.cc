#include "net/stream.h"

#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "net/error.h"

namespace baguarun::net {

namespace {

// Retransmissions or probes in a row without an answer before silence counts.
constexpr int kUnanswered = 2;

bool isTransient(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

size_t StreamWriter::total() const noexcept {
  size_t bytes = 0;
  for (const OutgoingFrame& frame : frames()) {
    bytes += kFrameBytes + frame.length;
  }
  return bytes;
}

Visit StreamWriter::write(int fd) {
  std::array<iovec, 2 * kMaxFrames> parts;
  size_t numParts = 0;
  size_t skip = written_;
  const auto append = [&](const uint8_t* data, size_t size) {
    const size_t done = std::min(skip, size);
    skip -= done;
    if (done < size) {
      parts[numParts++] = {.iov_base = const_cast<uint8_t*>(data + done), .iov_len = size - done};
    }
  };
  for (const OutgoingFrame& frame : frames()) {
    append(frame.header.data(), kFrameBytes);
    append(frame.payload, frame.length);
  }
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = numParts;
  const ssize_t count = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (count < 0) {
    if (isTransient(errno)) {
      return errno == EINTR ? Visit::kMoved : Visit::kBlocked;
    }
    error_ = errno;
    return Visit::kBroken;
  }
  written_ += static_cast<size_t>(count);
  return Visit::kMoved;
}

Visit StreamReader::read(int fd, std::span<uint8_t> payload) {
  NET_CHECK(payload.empty() || begin_ == end_);
  if (begin_ > 0) {
    std::memmove(stage_.data(), stage_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  std::array<iovec, 2> parts{{{.iov_base = payload.data(), .iov_len = payload.size()},
                              {.iov_base = stage_.data() + end_, .iov_len = stage_.size() - end_}}};
  const size_t first = payload.empty() ? 1 : 0;
  msghdr message{};
  message.msg_iov = parts.data() + first;
  message.msg_iovlen = parts.size() - first;
  filled_ = 0;
  const ssize_t count = recvmsg(fd, &message, MSG_DONTWAIT);
  if (count < 0) {
    if (isTransient(errno)) {
      return errno == EINTR ? Visit::kMoved : Visit::kBlocked;
    }
    error_ = errno;
    return Visit::kBroken;
  }
  if (count == 0) {
    return Visit::kEnded;
  }
  isDrained_ = static_cast<size_t>(count) < payload.size() + stage_.size() - end_;
  filled_ = std::min(payload.size(), static_cast<size_t>(count));
  end_ += static_cast<size_t>(count) - filled_;
  return Visit::kMoved;
}

void StreamReader::consume(size_t count) noexcept {
  begin_ += count;
  if (begin_ == end_) {
    begin_ = end_ = 0;
  }
}

bool peerAnswers(int fd, std::chrono::milliseconds timeout) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) {
    throw Error(Fault::kSystem, "", "cannot ask for the state of a connection: " + errnoText(errno));
  }
  const bool isUnanswered = info.tcpi_retransmits >= kUnanswered || info.tcpi_probes >= kUnanswered;
  return !isUnanswered || std::chrono::milliseconds(info.tcpi_last_ack_recv) < timeout;
}

}  // namespace baguarun::net
