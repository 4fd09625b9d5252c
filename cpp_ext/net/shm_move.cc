// The operations of ShmGroup that move data from rank to rank; reduce-scatter is all-to-all with a reduction.
#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include "net/error.h"
#include "net/shm_group.h"
#include "net/shm_layout.h"
#include "net/shm_steps.h"

namespace baguarun::net {

using shm::bytesOf;
using shm::copyBytes;
using shm::Piece;
using shm::stepsFor;
using shm::totalBytes;

void ShmGroup::reduceScatter(const void* in, void* out, size_t count, Dtype dtype, ReduceOp op) {
  checkReduction(op, dtype);
  const size_t bytes = totalBytes(count, dtype);
  const auto ranks = static_cast<size_t>(size_);
  const size_t portion = Layout::kSlotBytes / ranks & ~size_t{63};
  Header call = makeHeader(CallKind::kReduceScatter, count);
  call.call.dtype = dtype;
  call.call.op = op;
  exchange(
      call, stepsFor(bytes, portion),
      [&](size_t k, std::byte* own) {
        const Piece piece(k, portion, bytes);
        for (size_t q = 0; q < ranks; ++q) {
          if (static_cast<int>(q) != rank_) {
            copyBytes(own + q * portion, bytesOf(in) + q * bytes + piece.offset, piece.bytes);
          }
        }
      },
      [&](size_t k, uint64_t step) {
        const Piece piece(k, portion, bytes);
        const size_t mine = static_cast<size_t>(rank_);
        std::array<const void*, kMaxRanks> sources;
        for (int rank = 0; rank < size_; ++rank) {
          sources[static_cast<size_t>(rank)] = rank == rank_ ? bytesOf(in) + mine * bytes + piece.offset
                                                             : bytesOf(slot(step, rank)) + mine * portion;
        }
        if (piece.bytes > 0) {
          void* to = bytesOf(out) + piece.offset;
          net::reduce(op, dtype, {sources.data(), ranks}, {&to, 1}, piece.bytes / elementBytes(dtype));
        }
      });
}

void ShmGroup::allGather(const void* in, void* out, size_t bytes) {
  exchange(
      makeHeader(CallKind::kAllGather, bytes), stepsFor(bytes, Layout::kSlotBytes),
      [&](size_t k, std::byte* own) {
        const Piece piece(k, Layout::kSlotBytes, bytes);
        copyBytes(own, bytesOf(in) + piece.offset, piece.bytes);
      },
      [&](size_t k, uint64_t step) {
        const Piece piece(k, Layout::kSlotBytes, bytes);
        for (int i = 0; i < size_; ++i) {
          const int rank = (rank_ + i) % size_;
          copyBytes(bytesOf(out) + static_cast<size_t>(rank) * bytes + piece.offset,
                    rank == rank_ ? bytesOf(in) + piece.offset : bytesOf(slot(step, rank)), piece.bytes);
        }
      });
}

void ShmGroup::broadcast(void* data, size_t bytes, int root) {
  // Weights at the start, and mostly little or nothing more: slots half full, as fast with four ranks and
  // three quarters as fast with two, leave half as much memory touched for good.
  constexpr size_t kChunkBytes = Layout::kSlotBytes / 2;
  checkRank(root, "root");
  exchange(
      makeHeader(CallKind::kBroadcast, bytes, root), stepsFor(bytes, kChunkBytes),
      [&](size_t k, std::byte* own) {
        const Piece piece(k, kChunkBytes, bytes);
        if (rank_ == root) {
          copyBytes(own, bytesOf(data) + piece.offset, piece.bytes);
        }
      },
      [&](size_t k, uint64_t step) {
        const Piece piece(k, kChunkBytes, bytes);
        if (rank_ != root) {
          copyBytes(bytesOf(data) + piece.offset, slot(step, root), piece.bytes);
        }
      });
}

void ShmGroup::gather(const void* in, void* out, size_t bytes, int root) {
  checkRank(root, "root");
  exchange(
      makeHeader(CallKind::kGather, bytes, root), stepsFor(bytes, Layout::kSlotBytes),
      [&](size_t k, std::byte* own) {
        const Piece piece(k, Layout::kSlotBytes, bytes);
        if (rank_ != root) {
          copyBytes(own, bytesOf(in) + piece.offset, piece.bytes);
        }
      },
      [&](size_t k, uint64_t step) {
        const Piece piece(k, Layout::kSlotBytes, bytes);
        for (int rank = 0; rank_ == root && rank < size_; ++rank) {
          copyBytes(bytesOf(out) + static_cast<size_t>(rank) * bytes + piece.offset,
                    rank == rank_ ? bytesOf(in) + piece.offset : bytesOf(slot(step, rank)), piece.bytes);
        }
      });
}

void ShmGroup::scatter(const void* in, void* out, size_t bytes, int root) {
  checkRank(root, "root");
  const auto ranks = static_cast<size_t>(size_);
  const size_t portion = Layout::kSlotBytes / ranks & ~size_t{63};
  exchange(
      makeHeader(CallKind::kScatter, bytes, root), stepsFor(bytes, portion),
      [&](size_t k, std::byte* own) {
        const Piece piece(k, portion, bytes);
        for (size_t q = 0; rank_ == root && q < ranks; ++q) {
          copyBytes(own + q * portion, bytesOf(in) + q * bytes + piece.offset, piece.bytes);
        }
      },
      [&](size_t k, uint64_t step) {
        const Piece piece(k, portion, bytes);
        copyBytes(bytesOf(out) + piece.offset,
                  bytesOf(slot(step, root)) + static_cast<size_t>(rank_) * portion, piece.bytes);
      });
}

void ShmGroup::allToAll(const void* in, void* out, size_t bytes) {
  const std::vector<size_t> sizes(static_cast<size_t>(size_), bytes);
  allToAllV(in, sizes, out, sizes);
}

void ShmGroup::allToAllV(const void* in, std::span<const size_t> sendBytes, void* out,
                         std::span<const size_t> recvBytes) {
  const auto ranks = static_cast<size_t>(size_);
  if (sendBytes.size() != ranks || recvBytes.size() != ranks) {
    throw Error(Fault::kUsage, "",
                "all-to-all of " + std::to_string(sendBytes.size()) + " and " +
                    std::to_string(recvBytes.size()) + " sizes: want one per rank, " + std::to_string(ranks));
  }
  // Everybody learns what everybody wants to send and expects, and finds the same mistake.
  std::vector<uint64_t> plan(2 * ranks);
  std::copy(sendBytes.begin(), sendBytes.end(), plan.begin());
  std::copy(recvBytes.begin(), recvBytes.end(), plan.begin() + static_cast<std::ptrdiff_t>(ranks));
  std::vector<uint64_t> plans(2 * ranks * ranks);
  allGather(plan.data(), plans.data(), plan.size() * sizeof(uint64_t));
  uint64_t most = 0;
  for (size_t from = 0; from < ranks; ++from) {
    for (size_t to = 0; to < ranks; ++to) {
      const uint64_t sent = plans[2 * ranks * from + to];
      const uint64_t expected = plans[2 * ranks * to + ranks + from];
      most = std::max(most, sent);
      if (sent != expected) {
        waiter_->fail(ShmFailure::kMismatch, static_cast<int>(from),
                      "all-to-all: sends " + std::to_string(sent) + " bytes to " +
                          segment_->peerName(static_cast<int>(to)) + ", which expects " +
                          std::to_string(expected));
      }
    }
  }
  std::vector<size_t> sendAt(ranks);
  std::vector<size_t> recvAt(ranks);
  std::exclusive_scan(sendBytes.begin(), sendBytes.end(), sendAt.begin(), size_t{0});
  std::exclusive_scan(recvBytes.begin(), recvBytes.end(), recvAt.begin(), size_t{0});
  const size_t portion = Layout::kSlotBytes / ranks & ~size_t{63};
  const auto mine = static_cast<size_t>(rank_);
  exchange(
      makeHeader(CallKind::kAllToAll, most), stepsFor(most, portion),
      [&](size_t k, std::byte* own) {
        for (size_t q = 0; q < ranks; ++q) {
          const Piece piece(k, portion, sendBytes[q]);
          copyBytes(own + q * portion, bytesOf(in) + sendAt[q] + piece.offset, q == mine ? 0 : piece.bytes);
        }
      },
      [&](size_t k, uint64_t step) {
        for (size_t i = 0; i < ranks; ++i) {
          const size_t q = (mine + i) % ranks;
          const Piece piece(k, portion, recvBytes[q]);
          copyBytes(bytesOf(out) + recvAt[q] + piece.offset,
                    q == mine ? bytesOf(in) + sendAt[q] + piece.offset
                              : bytesOf(slot(step, static_cast<int>(q))) + mine * portion,
                    piece.bytes);
        }
      });
}

std::byte* ShmGroup::packetRoom(int to) const noexcept {
  const Layout::Pair pair = layout_->pair(rank_, to);
  const uint64_t number = pair.sent->value.load(std::memory_order_relaxed);
  const bool isFull = number - pair.read->value.load() >= Cell::kCount;
  return isFull ? nullptr : pair.cells[number % Cell::kCount].data;
}

void ShmGroup::postPacket(int to) noexcept {
  layout_->pair(rank_, to).sent->value.fetch_add(1);
  ring(to);
}

const std::byte* ShmGroup::nextPacket(int from) const noexcept {
  const Layout::Pair pair = layout_->pair(from, rank_);
  const uint64_t number = pair.read->value.load(std::memory_order_relaxed);
  const bool isEmpty = pair.sent->value.load() == number;
  return isEmpty ? nullptr : pair.cells[number % Cell::kCount].data;
}

void ShmGroup::dropPacket(int from) noexcept {
  layout_->pair(from, rank_).read->value.fetch_add(1);
  ring(from);
}

}  // namespace baguarun::net
