#include "net/shm_group.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "net/error.h"
#include "net/shm_layout.h"
#include "net/shm_steps.h"

// Why five slots are enough. exchange(): a rank writes step k after it saw everybody's step k - 2 ready;
// whoever posts k - 2 has read k - 4. reducePipelined(): a rank writes k after it saw everybody's k - 2
// ready; whoever posts k - 2 has gathered k - 5. At the border of two operations a rank has seen the last
// step of the old one ready, or done, and so everybody's reading of all but its last two or three steps.

namespace baguarun::net {

using shm::bytesOf;
using shm::copyBytes;
using shm::Piece;
using shm::stepsFor;
using shm::totalBytes;

namespace {

// Larger data goes through the pipeline.
constexpr size_t kAtOnceBytes = 64 << 10;
// Two ranks' large data does better with chunks that stay in the second-level cache.
constexpr size_t kSmallChunkBytes = 256 << 10;
constexpr size_t kLargeBytes = 4 << 20;
// Between two looks for abort().
constexpr size_t kPieceBytes = 4 << 20;

// The share of a chunk that one rank reduces; shares meet at cache lines.
struct Share {
  size_t begin;
  size_t end;
  Share(size_t bytes, int size, int rank) {
    const auto ranks = static_cast<size_t>(size);
    const size_t width = ((bytes + ranks - 1) / ranks + 63) & ~size_t{63};
    begin = std::min(width * static_cast<size_t>(rank), bytes);
    end = std::min(begin + width, bytes);
  }
};

// A layout is computed here where only its sizes are wanted; nothing is read or written.
std::byte* const kNowhere = reinterpret_cast<std::byte*>(uintptr_t{4096});

template <class T>
T* take(std::byte*& at, size_t count) {
  T* first = reinterpret_cast<T*>(at);
  at += (count * sizeof(T) + 4095) & ~size_t{4095};
  return first;
}

}  // namespace

ShmGroup::Layout::Layout(std::byte* base, int numRanks, size_t arenaBytes) : size(numRanks) {
  const auto ranks = static_cast<size_t>(numRanks);
  std::byte* at = base;
  state = take<ShmState>(at, 1);
  reasons = take<ShmReason>(at, ranks);
  left = take<ShmFlag>(at, ranks);
  sleeping = take<ShmFlag>(at, ranks);
  ready = take<ShmFlag>(at, ranks);
  done = take<ShmFlag>(at, ranks);
  pairFlags = take<ShmFlag>(at, 2 * ranks * ranks);
  headers = take<Header>(at, kSlots * ranks);
  slots = take<std::byte>(at, kSlots * ranks * kSlotBytes);
  cells = take<Cell>(at, ranks * ranks * Cell::kCount);
  arenas = take<std::byte>(at, ranks * arenaBytes);
  end = at;
}

ShmGroup::Layout::Pair ShmGroup::Layout::pair(int from, int to) const {
  const auto index = static_cast<size_t>(from * size + to);
  return {&pairFlags[2 * index], &pairFlags[2 * index + 1], &cells[index * Cell::kCount]};
}

std::string ShmGroup::Header::text() const {
  const Call& said = asked.call.kind == CallKind::kNone ? call : asked.call;
  return said.text() + (offset == kPrivate ? "" : " in the segment");
}

size_t ShmGroup::segmentBytes(int size, size_t arenaBytes) {
  if (size < 1 || size > kMaxRanks) {
    throw Error(Fault::kUsage, "", "size=" + std::to_string(size) + ": want 1 to 64 ranks on one host");
  }
  if (arenaBytes % 4096 != 0 || arenaBytes > (size_t{1} << 40)) {
    throw Error(Fault::kUsage, "",
                "arenaBytes=" + std::to_string(arenaBytes) + ": want a multiple of 4096, at most 2^40");
  }
  const Layout layout(kNowhere, size, arenaBytes);
  return static_cast<size_t>(layout.end - kNowhere);
}

ShmSegment::Options ShmGroup::segmentOptions(const Options& options) {
  if (options.rank < 0 || options.rank >= options.size) {
    throw Error(
        Fault::kUsage, "",
        "rank=" + std::to_string(options.rank) + ": want 0 <= rank < " + std::to_string(options.size));
  }
  const size_t total = segmentBytes(options.size, options.arenaBytes);
  // All but the rings of pairs, which most groups never touch, and the arenas.
  const Layout layout(kNowhere, options.size, options.arenaBytes);
  return {.rank = options.rank,
          .size = options.size,
          .nonce = options.nonce,
          .reservedBytes = static_cast<size_t>(reinterpret_cast<std::byte*>(layout.cells) - kNowhere),
          .totalBytes = total,
          .timeout = options.timeout,
          .labels = options.labels,
          .check = options.check};
}

ShmGroup::ShmGroup(const Options& options, const BlobExchange& exchange)
    : ShmGroup(options, ShmSegment::connect(segmentOptions(options), exchange)) {}

ShmGroup::ShmGroup(const Options& options, std::shared_ptr<ShmSegment> segment)
    : rank_(options.rank),
      size_(options.size),
      arenaBytes_(options.arenaBytes),
      timeout_(options.timeout),
      ownerPid_(getpid()),
      segment_(std::move(segment)),
      layout_(std::make_unique<Layout>(segment_->data(), size_, arenaBytes_)) {
  NET_CHECK(segment_->bytes() >= segmentBytes(size_, arenaBytes_) && segment_->size() == size_);
  waiter_ = std::make_unique<ShmWaiter>(segment_, rank_, layout_->state, layout_->reasons, layout_->left);
}

ShmGroup::~ShmGroup() {
  // A forked child does not leave for its parent.
  if (getpid() != ownerPid_) {
    return;
  }
  waiter_->post(layout_->left[rank_], 1);
  ringAll();
}

void* ShmGroup::slot(uint64_t step, int rank) const {
  const uint64_t index = step % Layout::kSlots * static_cast<uint64_t>(size_) + static_cast<uint64_t>(rank);
  return layout_->slots + index * Layout::kSlotBytes;
}

ShmGroup::Header& ShmGroup::header(uint64_t step, int rank) const {
  return layout_->headers[step % Layout::kSlots * static_cast<uint64_t>(size_) + static_cast<uint64_t>(rank)];
}

uint64_t ShmGroup::beginOperation() {
  waiter_->checkFailure();
  deadline_ = fixedDeadline_.has_value() ? *fixedDeadline_ : Clock::now() + timeout_;
  return step_;
}

void ShmGroup::postReady(uint64_t step) { waiter_->post(layout_->ready[rank_], step + 1); }

void ShmGroup::waitReady(uint64_t step) {
  for (int i = 1; i < size_; ++i) {
    const int peer = (rank_ + i) % size_;
    waiter_->wait(layout_->ready[peer], step + 1, peer, deadline_);
  }
}

void ShmGroup::waitDone(uint64_t step, int peer) {
  waiter_->wait(layout_->done[peer], step + 1, peer, deadline_);
}

// After an operation's first step is ready. Every rank finds the same culprit and says the same.
void ShmGroup::verify(uint64_t step) {
  const Header& first = header(step, 0);
  for (int rank = 1; rank < size_; ++rank) {
    const Header& it = header(step, rank);
    if (!it.matches(first)) {
      const std::string usual = segment_->peerName(0);
      const auto known = difference(it.asked, first.asked, usual);
      waiter_->fail(ShmFailure::kMismatch, rank,
                    known.value_or("calls " + it.text() + ", where " + usual + " calls " + first.text()));
    }
  }
}

void ShmGroup::checkRank(int rank, const char* what) const {
  if (rank < 0 || rank >= size_) {
    throw Error(Fault::kUsage, "",
                std::string(what) + "=" + std::to_string(rank) + ": want 0 <= " + what + " < " +
                    std::to_string(size_));
  }
}

bool ShmGroup::isInSegment(const void* data, size_t bytes) const {
  const std::byte* arena = layout_->arenas + static_cast<size_t>(rank_) * arenaBytes_;
  return bytes > 0 && bytesOf(data) >= arena && bytesOf(data) + bytes <= arena + arenaBytes_;
}

ShmGroup::Header ShmGroup::makeHeader(CallKind kind, uint64_t count, int root) const {
  return {.call = {.sequence = sequence_, .count = count, .root = static_cast<uint32_t>(root), .kind = kind},
          .offset = Header::kPrivate,
          .asked = asked_};
}

void ShmGroup::barrier() {
  exchange(
      makeHeader(CallKind::kBarrier, 0), 1, [](size_t, std::byte*) {}, [](size_t, uint64_t) {});
}

void ShmGroup::allReduce(const void* in, void* out, size_t count, Dtype dtype, ReduceOp op) {
  checkReduction(op, dtype);
  const size_t bytes = totalBytes(count, dtype);
  Header call = makeHeader(CallKind::kAllReduce, count);
  call.call.dtype = dtype;
  call.call.op = op;
  if (in == out && isInSegment(out, bytes)) {
    call.offset = static_cast<uint64_t>(bytesOf(out) - segment_->data());
    reduceInSegment(call, bytesOf(out));
  } else if (bytes <= kAtOnceBytes) {
    reduceAtOnce(call, bytesOf(in), bytesOf(out));
  } else {
    reducePipelined(call, bytesOf(in), bytesOf(out));
  }
}

void ShmGroup::reduce(const void* in, void* out, size_t count, Dtype dtype, ReduceOp op, int root) {
  checkReduction(op, dtype);
  checkRank(root, "root");
  const size_t bytes = totalBytes(count, dtype);
  Header call = makeHeader(CallKind::kReduce, count, root);
  call.call.dtype = dtype;
  call.call.op = op;
  if (bytes <= kAtOnceBytes) {
    reduceAtOnce(call, bytesOf(in), bytesOf(out));
  } else {
    reducePipelined(call, bytesOf(in), bytesOf(out));
  }
}

// Every rank reduces everything: P - 1 slots read, one synchronisation.
void ShmGroup::reduceAtOnce(const Header& call, const std::byte* in, std::byte* out) {
  const size_t bytes = call.call.count * elementBytes(call.call.dtype);
  const bool wanted = call.call.kind == CallKind::kAllReduce || static_cast<int>(call.call.root) == rank_;
  exchange(
      call, 1, [&](size_t, std::byte* own) { copyBytes(own, in, bytes); },
      [&](size_t, uint64_t step) {
        if (!wanted || bytes == 0) {
          return;
        }
        std::array<const void*, kMaxRanks> sources;
        for (int rank = 0; rank < size_; ++rank) {
          sources[static_cast<size_t>(rank)] = rank == rank_ ? in : slot(step, rank);
        }
        void* to = out;
        net::reduce(call.call.op, call.call.dtype, {sources.data(), static_cast<size_t>(size_)}, {&to, 1},
                    call.call.count);
      });
}

// Step k copies chunk k in, reduces the own share of chunk k - 1 and gathers chunk k - 2.
void ShmGroup::reducePipelined(const Header& call, const std::byte* in, std::byte* out) {
  const size_t each = elementBytes(call.call.dtype);
  const size_t bytes = call.call.count * each;
  const size_t chunk = size_ == 2 && bytes >= kLargeBytes ? kSmallChunkBytes : Layout::kSlotBytes;
  const size_t steps = stepsFor(bytes, chunk);
  const bool wanted = call.call.kind == CallKind::kAllReduce || static_cast<int>(call.call.root) == rank_;
  const uint64_t first = beginOperation();
  header(first, rank_) = call;
  std::array<const void*, kMaxRanks> sources;
  for (size_t k = 0; k < steps + 2; ++k) {
    if (k < steps) {
      const Piece piece(k, chunk, bytes);
      const Share own(piece.bytes, size_, rank_);
      std::byte* to = bytesOf(slot(first + k, rank_));
      copyBytes(to, in + piece.offset, own.begin);
      copyBytes(to + own.end, in + piece.offset + own.end, piece.bytes - own.end);
      postReady(first + k);
    }
    if (k >= 1 && k - 1 < steps) {
      const uint64_t step = first + k - 1;
      const Piece piece(k - 1, chunk, bytes);
      const Share own(piece.bytes, size_, rank_);
      waitReady(step);
      if (k == 1) {
        verify(step);
      }
      const std::byte* mine = in + piece.offset + own.begin;
      for (int rank = 0; rank < size_; ++rank) {
        sources[static_cast<size_t>(rank)] = rank == rank_ ? mine : bytesOf(slot(step, rank)) + own.begin;
      }
      const std::array<void*, 2> outs = {bytesOf(slot(step, rank_)) + own.begin,
                                         out + piece.offset + own.begin};
      net::reduce(call.call.op, call.call.dtype, {sources.data(), static_cast<size_t>(size_)},
                  {outs.data(), wanted ? size_t{2} : size_t{1}}, (own.end - own.begin) / each);
      waiter_->post(layout_->done[rank_], step + 1);
    }
    if (k >= 2) {
      const uint64_t step = first + k - 2;
      const Piece piece(k - 2, chunk, bytes);
      for (int i = 1; i < size_; ++i) {
        const int peer = (rank_ + i) % size_;
        const Share theirs(piece.bytes, size_, peer);
        waitDone(step, peer);
        if (wanted) {
          copyBytes(out + piece.offset + theirs.begin, bytesOf(slot(step, peer)) + theirs.begin,
                    theirs.end - theirs.begin);
        }
      }
    }
  }
  step_ += steps;
  ++sequence_;
}

// Each rank reduces its share of everybody's data and writes the result to all.
void ShmGroup::reduceInSegment(const Header& call, std::byte* data) {
  const size_t each = elementBytes(call.call.dtype);
  const uint64_t step = beginOperation();
  header(step, rank_) = call;
  postReady(step);
  waitReady(step);
  verify(step);
  const Share own(call.call.count * each, size_, rank_);
  std::array<void*, kMaxRanks> outs;
  std::array<const void*, kMaxRanks> sources;
  for (size_t at = own.begin; at < own.end; at += kPieceBytes) {
    waiter_->checkFailure();
    for (int rank = 0; rank < size_; ++rank) {
      std::byte* base = rank == rank_ ? data : segment_->data() + header(step, rank).offset;
      outs[static_cast<size_t>(rank)] = base + at;
      sources[static_cast<size_t>(rank)] = base + at;
    }
    // The own data first among the outs: the next ones are copies of what is in the cache.
    std::swap(outs[0], outs[static_cast<size_t>(rank_)]);
    net::reduce(call.call.op, call.call.dtype, {sources.data(), static_cast<size_t>(size_)},
                {outs.data(), static_cast<size_t>(size_)}, std::min(kPieceBytes, own.end - at) / each);
  }
  waiter_->post(layout_->done[rank_], step + 1);
  for (int i = 1; i < size_; ++i) {
    waitDone(step, (rank_ + i) % size_);
  }
  ++step_;
  ++sequence_;
}

void* ShmGroup::allocate(size_t bytes) {
  const size_t rounded = (std::max<size_t>(bytes, 1) + 63) & ~size_t{63};
  if (bytes > arenaBytes_ || rounded > arenaBytes_ - arenaUsed_) {
    throw Error(Fault::kSystem, "",
                "shared memory: " + std::to_string(bytes) + " bytes wanted, " +
                    std::to_string(arenaBytes_ - arenaUsed_) +
                    " of arenaBytes=" + std::to_string(arenaBytes_) + " left: give the group a larger arena");
  }
  checkMemoryLeft(rounded, "an allocation in the segment");
  std::byte* data = layout_->arenas + static_cast<size_t>(rank_) * arenaBytes_ + arenaUsed_;
  arenaUsed_ += rounded;
  return data;
}

void ShmGroup::abort(const std::string& reason) noexcept {
  waiter_->record(ShmFailure::kAborted, rank_, reason.empty() ? "" : ": " + reason);
  ringAll();
}

void ShmGroup::fail(const Error& error) noexcept {
  waiter_->record(error);
  ringAll();
}

void ShmGroup::checkFailure() const { waiter_->checkFailure(); }

void ShmGroup::setHook(ShmHook hook) { waiter_->setHook(std::move(hook)); }

bool ShmGroup::hasLeft(int peer) const noexcept { return layout_->left[peer].value.load() != 0; }

void ShmGroup::expectBell() noexcept { layout_->sleeping[rank_].value.store(1); }

void ShmGroup::ring(int peer) noexcept {
  // All of this is sequentially consistent, what is looked for after expectBell() included: either the
  // sleeper sees what was done before, or we see it.
  if (layout_->sleeping[peer].value.load() != 0 && layout_->sleeping[peer].value.exchange(0) != 0) {
    const uint64_t one = 1;
    // Only a full counter makes it fail, and then the bell rings already.
    [[maybe_unused]] const ssize_t written = write(segment_->peer(peer).doorbell.get(), &one, sizeof(one));
  }
}

void ShmGroup::ringAll() noexcept {
  for (int peer = 0; peer < size_; ++peer) {
    ring(peer);
  }
}

void ShmGroup::answerBell() noexcept {
  layout_->sleeping[rank_].value.store(0);
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = read(segment_->peer(rank_).doorbell.get(), &count, sizeof(count));
}

int ShmGroup::doorbell() const noexcept { return segment_->peer(rank_).doorbell.get(); }

}  // namespace baguarun::net
