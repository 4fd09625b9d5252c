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
// Visits per stream and call, so that one busy stream or link does not keep the caller from the others.
constexpr int kMaxVisits = 4;
// A slow stream's chunks are no smaller: each costs a header and a system call on either side.
constexpr uint32_t kLeastShareBytes = 16 << 10;
// Streams are compared after as many full chunks of each.
constexpr uint64_t kChunksPerComparison = 4;
// Chunks may grow as long as the network takes one in less than this.
constexpr std::chrono::duration<double> kLongestChunk{0.004};
constexpr uint32_t kWatched = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;

}  // namespace

Link::Link(std::vector<Fd> streams, Settings settings)
    : settings_(std::move(settings)),
      ownerPid_(getpid()),
      streams_(streams.size()),
      lastMoved_(Clock::now()),
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

bool Link::pumpWrites() {
  bool moved = false;
  for (int round = 0; round < kMaxVisits; ++round) {
    bool movedNow = false;
    const size_t first = firstStream_;
    for (size_t step = 0; step < streams_.size(); ++step) {
      movedNow |= writeTo((first + step) % streams_.size());
    }
    moved |= movedNow;
    if (!movedNow) {
      break;
    }
  }
  return moved;
}

// One visit to one stream: the rest of its batch, or the next chunk.
bool Link::writeTo(size_t index) {
  Stream& stream = streams_[index];
  if (!stream.isWritable || brokenWrite_.has_value() || (stream.writer.isIdle() && !deal(stream))) {
    return false;
  }
  switch (stream.writer.write(stream.fd.get())) {
    case Visit::kMoved:
      if (stream.writer.isWritten()) {
        credit(stream.writer);
      } else {
        stream.isWritable = false;  // a short write means full
        stream.wasFull = true;
      }
      return true;
    case Visit::kBlocked:
      stream.isWritable = false;
      stream.wasFull = true;
      return false;
    case Visit::kEnded:
    case Visit::kBroken:
      break;
  }
  brokenWrite_ = {.stream = index, .error = stream.writer.error()};
  return false;
}

// Fills an idle writer: one chunk of a long message, or as many short ones as make one.
bool Link::deal(Stream& stream) {
  StreamWriter& writer = stream.writer;
  size_t room = stream.shareBytes;
  while (dealSequence_ != sends_.posted && !writer.isFull()) {
    const size_t slot = dealSequence_ % kMaxRequests;
    const Request& request = sends_.ring[slot];
    const size_t left = *request.total_ - dealOffset_;
    const size_t length = std::min<size_t>(left, stream.shareBytes);
    if (length > room) {
      break;
    }
    const Frame frame{.sequence = dealSequence_,
                      .length = static_cast<uint32_t>(length),
                      .offset = dealOffset_,
                      .total = *request.total_};
    writer.add({.header = encodeFrame(frame),
                .payload = request.data_ + dealOffset_,
                .length = frame.length,
                .request = slot});
    room -= length;
    dealOffset_ += length;
    if (dealOffset_ == *request.total_) {
      ++dealSequence_;
      dealOffset_ = 0;
    } else {
      firstStream_ = (firstStream_ + 1) % streams_.size();
    }
  }
  const uint64_t dealt = stream.shareBytes - room;
  stream.recentBytes += dealt;
  recentBytes_ += dealt;
  if (recentBytes_ >= kChunksPerComparison * streams_.size() * settings_.chunkBytes) {
    rebalance();
  }
  return !writer.isIdle();
}

// Sizes each stream's chunks by what the network let it move lately, so that all streams need about the same
// time for what they hold: a message is not done before its slowest chunk is. A stream that was never full
// was limited by us, not by the network, and gets more. Where the network is so fast that a chunk of the
// agreed size is gone at once, chunks grow: there the calls and wake-ups cost more than the bytes.
void Link::rebalance() {
  uint64_t most = 1;
  for (const Stream& stream : streams_) {
    most = std::max(most, stream.recentBytes);
  }
  const auto now = Clock::now();
  const auto elapsed = std::max<Clock::duration>(now - lastCompared_, Clock::duration{1});
  lastCompared_ = now;
  const auto gone = static_cast<uint64_t>(static_cast<double>(most) * (kLongestChunk / elapsed));
  const uint64_t largest = std::clamp<uint64_t>(gone, settings_.chunkBytes, kMaxChunkBytes);
  const uint32_t least = std::min(kLeastShareBytes, settings_.chunkBytes);
  for (Stream& stream : streams_) {
    const uint64_t fair =
        stream.wasFull ? largest * stream.recentBytes / most : uint64_t{2} * stream.shareBytes;
    const auto share = static_cast<uint32_t>(std::clamp<uint64_t>(fair, least, largest));
    if (share != stream.shareBytes) {
      stream.shareBytes = share;
      setNotSentLowWater(stream.fd.get(), share);
    }
    stream.recentBytes = 0;
    stream.wasFull = false;
  }
  recentBytes_ = 0;
}

void Link::credit(StreamWriter& writer) {
  for (const OutgoingFrame& frame : writer.frames()) {
    Request& request = sends_.ring[frame.request];
    request.moved_ += frame.length;
    if (request.moved_ == *request.total_) {
      finish(sends_, request);
    }
  }
  writer.clear();
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
      return true;
    case Visit::kBlocked:
      stream.isReadable = false;
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
  // What is still under way on other streams is worth waiting for, unless it stays away.
  const bool isStuck = Clock::now() - lastMoved_ > settings_.peerTimeout;
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
