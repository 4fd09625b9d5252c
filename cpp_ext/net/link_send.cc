// The sending half of a link: which stream gets how much.
#include <algorithm>

#include "net/hello.h"
#include "net/link.h"

namespace baguarun::net {

namespace {

// A slow stream's chunks are no smaller: each costs a header and a system call on either side.
constexpr uint32_t kLeastShareBytes = 16 << 10;
// Streams are compared after as many full chunks of each.
constexpr uint64_t kChunksPerComparison = 4;
// Chunks may grow as long as the network takes one in less than this.
constexpr std::chrono::duration<double> kLongestChunk{0.004};

}  // namespace

bool Link::pumpWrites() {
  if (streamCount_.isResuming() && streamCount_.endResuming(Clock::now())) {
    for (Stream& stream : streams_) {
      stream.backlog.measure();
    }
  }
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
  if (!stream.isWritable || brokenWrite_.has_value()) {
    return false;
  }
  const bool isUsed = index < streamCount_.used();
  if (stream.writer.isIdle() && !(isUsed && deal(stream))) {
    return false;
  }
  switch (stream.writer.write(stream.fd.get())) {
    case Visit::kMoved:
      if (stream.writer.isWritten()) {
        credit(stream.writer);
      } else {
        onFull(stream);  // a short write means full
      }
      return true;
    case Visit::kBlocked:
      onFull(stream);
      return false;
    case Visit::kEnded:
    case Visit::kBroken:
      break;
  }
  brokenWrite_ = {.stream = index, .error = stream.writer.error()};
  return false;
}

// The first of what is to be sent, after a rest.
void Link::resume() {
  const auto now = Clock::now();
  if (!StreamCount::isLongRest(now - lastWritten_)) {
    return;
  }
  streamCount_.resume(wayOf(streams_.front().fd.get()).shortestTrip, now);
  if (streamCount_.isResuming()) {
    std::ranges::for_each(std::span(streams_).subspan(1), [this](Stream& stream) { beginWith(stream); });
  }
}

// It was idle and has a small window: a message would wait for a large chunk there.
void Link::beginWith(Stream& stream) { setShare(stream, std::min(kLeastShareBytes, settings_.chunkBytes)); }

void Link::onFull(Stream& stream) {
  stream.isWritable = false;
  stream.wasFull = true;
  const auto now = Clock::now();
  stream.backlog.onFull(stream.fd.get(), streamCount_.buffering(now), now);
}

// Fills an idle writer: one chunk of a long message, or as many short ones as make one.
bool Link::deal(Stream& stream) {
  StreamWriter& writer = stream.writer;
  const uint32_t limit = stream.backlog.limit();
  const size_t share = limit == 0 ? stream.shareBytes : std::min(stream.shareBytes, limit / 2);
  size_t room = share;
  while (dealSequence_ != sends_.posted && !writer.isFull()) {
    const size_t slot = dealSequence_ % kMaxRequests;
    const Request& request = sends_.ring[slot];
    const size_t left = *request.total_ - dealOffset_;
    const size_t length = std::min(left, share);
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
      firstStream_ = (firstStream_ + 1) % streamCount_.used();
    }
  }
  const uint64_t dealt = share - room;
  stream.recentBytes += dealt;
  recentBytes_ += dealt;
  if (recentBytes_ >= kChunksPerComparison * streamCount_.used() * settings_.chunkBytes) {
    rebalance();
  }
  return !writer.isIdle();
}

// Sizes each stream's chunks by what the network let it move lately, so that all streams need about the same
// time for what they hold: a message is not done before its slowest chunk is. A stream that was never full
// was limited by us, not by the network, and gets more. Where the network is so fast that a chunk of the
// agreed size is gone at once, chunks grow: there the calls and wake-ups cost more than the bytes.
void Link::rebalance() {
  const auto used = std::span(streams_).first(streamCount_.used());
  uint64_t most = 1;
  StreamCount::Observed observed{.allFull = true,
                                 .queueing = std::chrono::microseconds::max(),
                                 .isLimited = false,
                                 .areHeldByBuffers = true,
                                 .bytesPerSecond = 0,
                                 .measured = Clock::duration::max()};
  for (const Stream& stream : used) {
    most = std::max(most, stream.recentBytes);
    observed.allFull = observed.allFull && stream.wasFull;
    observed.queueing = std::min(observed.queueing, stream.backlog.queueing());
    observed.isLimited = observed.isLimited || stream.backlog.limit() != 0;
    observed.areHeldByBuffers = observed.areHeldByBuffers && stream.backlog.isHeldByBuffer();
    observed.bytesPerSecond += stream.backlog.bytesPerSecond();
    observed.measured = std::min(observed.measured, stream.backlog.measured());
  }
  const auto now = Clock::now();
  const auto elapsed = std::max<Clock::duration>(now - lastCompared_, Clock::duration{1});
  lastCompared_ = now;
  const auto gone = static_cast<uint64_t>(static_cast<double>(most) * (kLongestChunk / elapsed));
  const uint64_t largest = std::clamp<uint64_t>(gone, settings_.chunkBytes, kMaxChunkBytes);
  const uint32_t least = std::min(kLeastShareBytes, settings_.chunkBytes);
  if (streamCount_.observe(observed, now)) {
    onPhase();
  }
  for (Stream& stream : used) {
    const uint64_t fair =
        stream.wasFull ? largest * stream.recentBytes / most : uint64_t{2} * stream.shareBytes;
    const auto share = static_cast<uint32_t>(std::clamp<uint64_t>(fair, least, largest));
    setShare(stream, share);
    stream.recentBytes = 0;
    stream.wasFull = false;
  }
  recentBytes_ = 0;
}

// No more than a chunk waits in the kernel behind what is under way.
void Link::setShare(Stream& stream, uint32_t bytes) {
  if (bytes != stream.shareBytes) {
    stream.shareBytes = bytes;
    setNotSentLowWater(stream.fd.get(), bytes);
  }
}

// Streams on trial share what one alone had under way, which it has again afterwards.
void Link::onPhase() {
  Stream& one = streams_.front();
  switch (streamCount_.phase()) {
    case StreamCount::Phase::kChange: {
      limitOfOne_ = one.backlog.limit();
      const uint32_t limit = one.backlog.limitOfEach(streamCount_.used());
      for (Stream& stream : std::span(streams_).first(streamCount_.used())) {
        stream.backlog.setLimit(stream.fd.get(), limit);
        if (&stream != &one) {
          beginWith(stream);
        }
      }
      break;
    }
    case StreamCount::Phase::kChangeBack:
    case StreamCount::Phase::kOne:
      one.backlog.setLimit(one.fd.get(), limitOfOne_);
      break;
    case StreamCount::Phase::kAll:
      limitOfOne_ = 0;
      break;
    case StreamCount::Phase::kTrial:
    case StreamCount::Phase::kProof:
      break;
  }
  for (Stream& stream : streams_) {
    stream.backlog.measure();
  }
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

}  // namespace baguarun::net
