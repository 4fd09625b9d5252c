#include "net/link.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "net/hello.h"

namespace baguarun::net {

namespace {

constexpr std::chrono::milliseconds kSilenceCheckEvery{1000};
// How many bytes of a frame to sleep for; the kernel makes the receive buffer at least twice as large, so
// that the peer goes on sending, and wakes us earlier where it can't. Who trains beside a slow wire loses
// less to wake-ups than with 32 KiB: 6.6 % of the cores go to an all-reduce on four hosts of two cores at 100
// Mbit/s, in place of 7.6 %.
constexpr size_t kMaxWakeBytes = 128 << 10;
// For fewer the change costs more than it saves.
constexpr size_t kLeastWakeBytes = 4 << 10;
constexpr uint32_t kWatched = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;

}  // namespace

Link::Link(std::vector<Fd> streams, Settings settings)
    : settings_(std::move(settings)),
      ownerPid_(getpid()),
      streams_(streams.size()),
      streamCount_(streams.size()),
      lastMoved_(Clock::now()),
      lastWritten_(lastMoved_),
      lastChecked_(lastMoved_),
      lastCompared_(lastMoved_) {
  NET_CHECK(!streams.empty());
  for (size_t index = 0; index < streams.size(); ++index) {
    setStreamOptions(streams[index].get(), settings_.peerTimeout);
    setNotSentLowWater(streams[index].get(), settings_.chunkBytes);
    streams_[index].shareBytes = settings_.chunkBytes;
    epoll_.add(streams[index].get(), kWatched, index);
    streams_[index].fd = std::move(streams[index]);
  }
}

Link::~Link() {
  // Descriptors may also be open in a forked child, so closing ours would not end the connection.
  if (getpid() == ownerPid_) {
    shutdownStreams();
  }
}

void Link::abort() noexcept {
  isAborted_.store(true);
  shutdownStreams();
}

void Link::shutdownStreams() noexcept {
  for (const Stream& stream : streams_) {
    shutdown(stream.fd.get(), SHUT_RDWR);
  }
}

Way Link::way() const noexcept {
  Way found = wayOf(streams_.front().fd.get());
  for (size_t index = 1; index < streamCount_.used(); ++index) {
    found.bytesPerSecond += wayOf(streams_[index].fd.get()).bytesPerSecond;
  }
  return found;
}

bool Link::peerHasClosed() const noexcept {
  return std::ranges::any_of(streams_, [](const Stream& stream) { return stream.isHungUp; });
}

void Link::throwIfBroken() const {
  if (isAborted_.load()) {
    throw Error(Fault::kAborted, settings_.peer, "the link was aborted");
  }
  if (failure_.has_value()) {
    throw *failure_;
  }
}

void Link::breakWith(Fault fault, const std::string& message) {
  throwIfBroken();  // an abort closes the streams, and is the reason then
  failure_.emplace(fault, settings_.peer, message);
  shutdownStreams();
  throw *failure_;
}

void Link::breakStream(size_t index, const std::string& doing, int error) {
  breakWith(Fault::kRemote, "stream " + std::to_string(index) + " of " + std::to_string(streams_.size()) +
                                " broke " + doing + ": " + errnoText(error));
}

Request* Link::post(Lane& lane, bool isSend, void* data, size_t size) {
  throwIfBroken();
  if (size > kMaxMessageBytes) {
    throw Error(Fault::kUsage, settings_.peer,
                "a message of " + std::to_string(size) + " bytes: want at most 2^48");
  }
  Request& request = lane.ring[lane.posted % kMaxRequests];
  if (request.state_ != Request::State::kFree) {
    return nullptr;
  }
  if (numPending_ == 0) {
    lastMoved_ = Clock::now();
  }
  if (isSend && lane.numActive == 0) {
    resume();
  }
  request.link_ = this;
  request.state_ = Request::State::kActive;
  request.isSend_ = isSend;
  request.sequence_ = lane.posted++;
  request.data_ = static_cast<uint8_t*>(data);
  request.capacity_ = size;
  request.total_ = isSend ? std::optional<size_t>(size) : std::nullopt;
  request.moved_ = 0;
  ++lane.numActive;
  ++numPending_;
  return &request;
}

Request* Link::isend(const void* data, size_t size) {
  return post(sends_, true, const_cast<void*>(data), size);
}

Request* Link::irecv(void* data, size_t capacity) { return post(receives_, false, data, capacity); }

void Link::finish(Lane& lane, Request& request) noexcept {
  request.state_ = Request::State::kDone;
  --lane.numActive;
  --numPending_;
}

Status Link::test(Request* request) {
  NET_CHECK(request->state_ != Request::State::kFree);
  if (request->state_ == Request::State::kActive) {
    progress();
    if (request->state_ == Request::State::kActive) {
      return {};
    }
  }
  request->state_ = Request::State::kFree;
  return {.done = true, .bytes = *request->total_};
}

size_t Link::wait(Request* request, Clock::time_point deadline) {
  for (;;) {
    if (const Status status = test(request); status.done) {
      return status.bytes;
    }
    const auto now = Clock::now();
    if (now >= deadline) {
      throw Error(Fault::kTimeout, settings_.peer, "no end of the operation before the deadline");
    }
    // test() may have stopped at its limit of visits: sleep only after a call that moved nothing.
    if (!progress()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - now);
      waitReadable(epoll_.fd(), std::min(left, kSilenceCheckEvery));
    }
  }
}

bool Link::progress() {
  throwIfBroken();
  pollEvents();
  const bool wrote = pumpWrites();
  const bool read = pumpReads();
  if (wrote || read) {
    lastMoved_ = Clock::now();
    lastWritten_ = wrote ? lastMoved_ : lastWritten_;
    return true;
  }
  checkBrokenWrite();
  if (numPending_ > 0) {
    checkEnded();
    checkSilence();
  }
  return false;
}

void Link::pollEvents() {
  std::array<epoll_event, 16> events;
  for (const epoll_event& event : epoll_.wait(events, std::chrono::milliseconds(0))) {
    Stream& stream = streams_[event.data.u64];
    // Errors and hang-ups are found by reading and writing.
    const bool isOver = (event.events & (EPOLLERR | EPOLLHUP | EPOLLRDHUP)) != 0;
    stream.isHungUp |= isOver;
    stream.isReadable |= isOver || (event.events & EPOLLIN) != 0;
    stream.isWritable |= isOver || (event.events & EPOLLOUT) != 0;
  }
}

bool Link::pumpReads() {
  bool moved = false;
  for (size_t index = 0; index < streams_.size(); ++index) {
    for (int visit = 0; visit < kMaxVisits && readFrom(index); ++visit) {
      moved = true;
    }
  }
  return moved;
}

// One visit to one stream. False: nothing came, or what came waits for its irecv().
bool Link::readFrom(size_t index) {
  Stream& stream = streams_[index];
  const bool consumed = consumeStage(stream, index);
  const Request* request = stream.frame.has_value() ? findReceiver(*stream.frame, index) : nullptr;
  if (!stream.isReadable || (stream.frame.has_value() && request == nullptr)) {
    return consumed;
  }
  std::span<uint8_t> payload;
  if (request != nullptr) {
    payload = {request->data_ + stream.frame->offset + stream.frameFilled,
               stream.frame->length - stream.frameFilled};
  }
  switch (stream.reader.read(stream.fd.get(), payload)) {
    case Visit::kMoved:
      if (stream.frame.has_value()) {
        advanceFrame(stream, stream.reader.filled());
      }
      consumeStage(stream, index);
      // The end may have come with the last bytes; no edge tells of it again.
      if (stream.reader.isDrained() && !stream.isHungUp) {
        onDrained(stream);
      }
      return true;
    case Visit::kBlocked:
      onDrained(stream);
      return consumed;
    case Visit::kEnded:
      stream.isReadable = false;
      stream.isHungUp = true;
      if (stream.frame.has_value() || !stream.reader.staged().empty()) {
        breakWith(Fault::kRemote, "closed the connection in the middle of a message");
      }
      return consumed;
    case Visit::kBroken:
      break;
  }
  breakStream(index, "while receiving", stream.reader.error());
}

// The kernel has no more of it for now. Where the network is slow packets come one by one: to wake up for
// each would cost more than to move it.
void Link::onDrained(Stream& stream) {
  stream.isReadable = false;
  // What is staged has left the kernel, though its receive may not be posted yet.
  const size_t here = stream.frameFilled + stream.reader.staged().size();
  const size_t whole = stream.frame.has_value() ? stream.frame->length : 0;
  const size_t missing = whole - std::min(here, whole);
  const auto wanted = static_cast<uint32_t>(missing < kLeastWakeBytes ? 1 : std::min(missing, kMaxWakeBytes));
  if (wanted != stream.wakeBytes) {
    setReceiveLowWater(stream.fd.get(), wanted);
    stream.wakeBytes = wanted;
  }
}

// Takes frames and payload out of the stage as far as their receives are posted. True: something was taken.
bool Link::consumeStage(Stream& stream, size_t index) {
  bool consumed = false;
  for (;;) {
    const std::span<const uint8_t> staged = stream.reader.staged();
    if (!stream.frame.has_value()) {
      if (staged.size() < kFrameBytes) {
        return consumed;
      }
      Frame frame;
      if (!decodeFrame(staged.first<kFrameBytes>(), kMaxChunkBytes, frame)) {
        breakWith(Fault::kRemote,
                  "sent a chunk header that means nothing: another program or a broken network");
      }
      stream.frame = frame;
      stream.frameFilled = 0;
      stream.reader.consume(kFrameBytes);
      consumed = true;
      continue;
    }
    Request* request = findReceiver(*stream.frame, index);
    if (request == nullptr) {
      return consumed;
    }
    const size_t count = std::min<size_t>(staged.size(), stream.frame->length - stream.frameFilled);
    if (count == 0 && stream.frame->length > 0) {
      return consumed;
    }
    if (count > 0) {
      std::memcpy(request->data_ + stream.frame->offset + stream.frameFilled, staged.data(), count);
      stream.reader.consume(count);
    }
    advanceFrame(stream, count);
    consumed = true;
  }
}

// The request that `frame` is for, nullptr where it is not posted yet.
Request* Link::findReceiver(const Frame& frame, size_t index) {
  if (static_cast<int32_t>(frame.sequence - receives_.posted) >= 0) {
    return nullptr;
  }
  Request& request = receives_.ring[frame.sequence % kMaxRequests];
  const bool isExpected = request.state_ == Request::State::kActive && request.sequence_ == frame.sequence &&
                          request.total_.value_or(frame.total) == frame.total;
  if (!isExpected) {
    breakWith(Fault::kRemote, "sent a chunk of message " + std::to_string(frame.sequence) + " on stream " +
                                  std::to_string(index) + ", which is complete or has another size");
  }
  if (frame.total > request.capacity_) {
    breakWith(Fault::kUsage, "sent a message of " + std::to_string(frame.total) + " bytes into room for " +
                                 std::to_string(request.capacity_));
  }
  request.total_ = frame.total;
  return &request;
}

// `bytes` more of the stream's frame have arrived.
void Link::advanceFrame(Stream& stream, size_t bytes) {
  Request& request = receives_.ring[stream.frame->sequence % kMaxRequests];
  stream.frameFilled += static_cast<uint32_t>(bytes);
  request.moved_ += bytes;
  if (request.moved_ > *request.total_) {
    breakWith(Fault::kRemote, "sent parts of message " + std::to_string(request.sequence_) + " twice");
  }
  if (stream.frameFilled == stream.frame->length) {
    stream.frame.reset();
    if (request.moved_ == *request.total_) {
      finish(receives_, request);
    }
  }
}

void Link::checkBrokenWrite() {
  if (brokenWrite_.has_value()) {
    breakStream(brokenWrite_->stream, "while sending", brokenWrite_->error);
  }
}

// With nothing left to move: is somebody waited for who has gone? What a stream that hung up still holds then
// is for receives that are not posted.
void Link::checkEnded() {
  const bool allEnded = std::ranges::all_of(streams_, [](const Stream& stream) { return stream.isHungUp; });
  const bool someEnded = peerHasClosed();
  if (someEnded && !someEndedAt_.has_value()) {
    someEndedAt_ = Clock::now();
  }
  // What is still under way on other streams is worth waiting for, unless it stays away.
  const bool isStuck =
      someEnded && Clock::now() - std::max(lastMoved_, *someEndedAt_) > settings_.peerTimeout;
  if (allEnded || (someEnded && (receives_.numActive == 0 || isStuck))) {
    breakWith(Fault::kRemote, "closed the connection (has it died?) with " +
                                  std::to_string(receives_.numActive) + " receives and " +
                                  std::to_string(sends_.numActive) + " sends outstanding");
  }
}

void Link::checkSilence() {
  const auto now = Clock::now();
  if (now - lastMoved_ < kSilenceCheckEvery || now - lastChecked_ < kSilenceCheckEvery) {
    return;
  }
  lastChecked_ = now;
  for (size_t index = 0; index < streams_.size(); ++index) {
    if (!peerAnswers(streams_[index].fd.get(), settings_.peerTimeout)) {
      breakWith(Fault::kRemote, "its machine has not answered on stream " + std::to_string(index) + " for " +
                                    std::to_string(settings_.peerTimeout.count()) +
                                    " ms: is it down, or the network cut?");
    }
  }
}

}  // namespace baguarun::net
