// The compressing wires on the CPU, block by block, made of the loops of a path.
//
// Each wire has: prepare, what is to be known of a block before it is written; emit, which writes it to the
// chunk; decode; sum, of the same block of several chunks; and addTo, which adds these to numbers, one chunk
// after the other.
//
// Threads: objects live for one call.
#pragma once

#include <algorithm>
#include <functional>
#include <variant>

#include "cpu_path.h"
#include "signs.h"
#include "sparse.h"

namespace baguarun::codec {

// One block of `numel` numbers: `n` of them, beginning with number `first`.
struct Span {
  size_t numel;
  size_t block;
  size_t first;
  size_t n;
};

inline Span spanOf(size_t numel, size_t block) {
  return {numel, block, block * kBlockElems, blockLength(numel, block)};
}

template <class Pointer>
Pointer* advance(Pointer* start, size_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<Pointer>, const char, char>;
  return static_cast<Pointer*>(static_cast<Byte*>(start) + bytes);
}

// Item `index` of an array of T that begins `offset` bytes into a chunk.
template <class T>
T itemAt(const void* chunk, size_t offset, size_t index) {
  T item;
  std::memcpy(&item, advance(chunk, offset + index * sizeof item), sizeof item);
  return item;
}

template <class T>
void setItemAt(void* chunk, size_t offset, size_t index, T item) {
  std::memcpy(advance(chunk, offset + index * sizeof item), &item, sizeof item);
}

// Room for one block in fp32.
struct alignas(64) Wide {
  float numbers[kBlockElems];
};

// Adds up chunks in groups of as many as a loop of a path takes: `add(group, first)` adds one, and multiplies
// all so far by the group's scale. Unless the sum is new, there is something that it is added to.
template <class Add>
void sumInGroups(Sum sum, bool isNew, Add add) {
  size_t done = 0;
  for (; sum.count - done > kMostTerms; done += kMostTerms) {
    add(Sum{sum.src + done, kMostTerms, 1.0f, sum.termScale}, isNew && done == 0);
  }
  add(Sum{sum.src + done, sum.count - done, sum.scale, sum.termScale}, isNew && done == 0);
}

// f32, f16, bf16.
class PlainWire {
 public:
  using Prepared = std::monostate;
  PlainWire(const CpuPath& path, DType dtype)
      : path_(path), dtype_(dtype), size_(dtype == DType::f32 ? sizeof(float) : sizeof(uint16_t)) {}

  Prepared prepare(const float*, Span) const { return {}; }
  void emit(const float* x, Prepared, Span at, void* chunk) const {
    path_.narrow(dtype_, x, at.n, advance(chunk, at.first * size_));
  }
  void decode(const void* chunk, Span at, float* dst) const {
    path_.widen(dtype_, advance(chunk, at.first * size_), at.n, dst);
  }
  void sum(Sum sum, Span at, float* dst) const { path_.sumNumbers(dtype_, sum, at.first, at.n, dst); }
  void addTo(Sum sum, Span at, float* dst) const {
    for (size_t k = 0; k < sum.count; ++k) {
      Wide term;
      decode(sum.src[k], at, term.numbers);
      path_.add(dst, term.numbers, at.n, dst);
    }
  }

 private:
  const CpuPath& path_;
  DType dtype_;
  size_t size_;
};

// minmax8 and minmax4: a grid of `levels` points.
template <unsigned levels>
class MinMaxWire {
 public:
  using Prepared = Grid;
  explicit MinMaxWire(const CpuPath& path) : path_(path) {}

  Prepared prepare(const float* x, Span at) const { return path_.measure(levels, x, at.n); }

  void emit(const float* x, Prepared grid, Span at, void* chunk) const {
    write(grid, at, chunk, [&](uint8_t* q) { path_.quantise(x, at.n, grid, q); });
  }

  // Emits a block and prepares a later one.
  Prepared emitAndPrepare(const float* x, Prepared grid, Span at, void* chunk, const float* next,
                          Span nextAt) const {
    Prepared prepared;
    if (nextAt.n == kBlockElems) {
      write(grid, at, chunk,
            [&](uint8_t* q) { prepared = path_.quantiseAndMeasure(x, grid, q, levels, next); });
    } else {
      prepared = prepare(next, nextAt);
      emit(x, grid, at, chunk);
    }
    return prepared;
  }

  // Emits a block, and sums up and prepares a later one in `next`.
  Prepared emitAndSum(const float* x, Prepared grid, Span at, void* chunk, Sum sum, Span nextAt,
                      float* next) const {
    if (sum.count > kMostTerms || nextAt.n < kBlockElems) {
      this->sum(sum, nextAt, next);
      return emitAndPrepare(x, grid, at, chunk, next, nextAt);
    }
    const Blocks terms(*this, sum, nextAt);
    Prepared prepared;
    write(grid, at, chunk, [&](uint8_t* q) {
      prepared = path_.quantiseAndSum(x, grid, q, levels, terms.blocks, sum.count, sum.scale, next);
    });
    return prepared;
  }

  void decode(const void* chunk, Span at, float* dst) const {
    Bytes room;
    path_.decodeLevels({itemAt<Header>(chunk, 0, at.block), payloadIn(chunk, at, room)}, at.n, dst);
  }

  // The same sum, scaled before it is taken if that comes to the same: once per block in place of per number.
  static Sum scaledFirst(Sum sum, size_t numel) {
    bool exact = isLittlePower(sum.scale);
    for (size_t k = 0; exact && k < sum.count; ++k) {
      for (size_t block = 0; block < blockCount(numel); ++block) {
        exact &= scalesExactly(itemAt<Header>(sum.src[k], 0, block));
      }
    }
    return exact ? Sum{sum.src, sum.count, 1.0f, sum.scale} : sum;
  }

  void sum(Sum sum, Span at, float* dst) const { addUp(sum, true, at, dst); }
  void addTo(Sum sum, Span at, float* dst) const { addUp(sum, false, at, dst); }

 private:
  // Levels that were packed, one per byte.
  struct alignas(64) Unpacked {
    uint8_t q[kBlockElems];
  };
  using Bytes = std::conditional_t<levels == 256, std::monostate, Unpacked>;

  // Writes a block whose levels `quantise(q)` computes, one per byte.
  template <class Quantise>
  void write(Grid grid, Span at, void* chunk, Quantise quantise) const {
    setItemAt(chunk, 0, at.block, grid.header);
    auto* payload = static_cast<uint8_t*>(chunk) + levelsOffset(levels, blockCount(at.numel), at.block);
    if constexpr (levels == 256) {
      quantise(payload);
    } else {
      Unpacked unpacked;
      quantise(unpacked.q);
      path_.packLevels(unpacked.q, at.n, payload);
    }
  }

  const uint8_t* payloadIn(const void* chunk, Span at, [[maybe_unused]] Bytes& room) const {
    const auto* payload =
        static_cast<const uint8_t*>(chunk) + levelsOffset(levels, blockCount(at.numel), at.block);
    if constexpr (levels != 256) {
      path_.unpackLevels(payload, at.n, room.q);
      payload = room.q;
    }
    return payload;
  }

  void addUp(Sum sum, bool isNew, Span at, float* dst) const {
    sumInGroups(sum, isNew, [&](Sum group, bool first) {
      const Blocks terms(*this, group, at);
      path_.sumLevels(terms.blocks, group.count, first, group.scale, at.n, dst);
    });
  }

  // The same block of several chunks.
  struct Blocks {
    Levels blocks[kMostTerms];
    Bytes rooms[kMostTerms];

    Blocks(const MinMaxWire& wire, Sum sum, Span at) {
      for (size_t k = 0; k < sum.count; ++k) {
        const auto [base, scale] = itemAt<Header>(sum.src[k], 0, at.block);
        const Header header{base * sum.termScale, scale * sum.termScale};
        blocks[k] = {header, wire.payloadIn(sum.src[k], at, rooms[k])};
      }
    }
  };

  const CpuPath& path_;
};

class SignWire {
 public:
  using Prepared = float;
  explicit SignWire(const CpuPath& path) : path_(path) {}

  Prepared prepare(const float* x, Span at) const { return signScale(path_.sumMagnitudes(x, at.n), at.n); }

  void emit(const float* x, Prepared scale, Span at, void* chunk) const {
    write(scale, at, chunk, [&](uint8_t* bits) { path_.takeSigns(x, at.n, bits); });
  }

  // Encodes x + residual, and leaves in the residual what the chunk lacks of it.
  void encodeWithResidual(const float* x, float* residual, Span at, void* chunk) const {
    Wide sums;
    const float scale = signScale(path_.addAndSumMagnitudes(x, residual, at.n, sums.numbers), at.n);
    write(scale, at, chunk,
          [&](uint8_t* bits) { path_.takeSignsWithResidual(sums.numbers, scale, at.n, residual, bits); });
  }

  void decode(const void* chunk, Span at, float* dst) const {
    path_.decodeSigns(signsIn(chunk, at), at.n, dst);
  }

  void sum(Sum sum, Span at, float* dst) const { addUp(sum, true, at, dst); }
  void addTo(Sum sum, Span at, float* dst) const { addUp(sum, false, at, dst); }

  // Encodes the sum of at most kMostCounted chunks, by the rules of signs.h.
  void encodeCounted(Sum sum, Span at, void* chunk) const {
    Signs blocks[kMostCounted];
    SignTerms terms{{}, static_cast<unsigned>(sum.count), sum.scale};
    for (unsigned k = 0; k < terms.count; ++k) {
      blocks[k] = signsIn(sum.src[k], at);
      terms.scales[k] = blocks[k].scale;
    }
    float values[kKinds] = {};
    for (unsigned kind = 0; kind < terms.kinds(); ++kind) values[kind] = terms.valueOf(kind);
    uint32_t counts[kKinds] = {};
    uint8_t bits[kBlockElems / 8];
    path_.countSigns(blocks, sum.count, at.n, values, counts, bits);
    write(signScale(sumOfKinds(counts, values), at.n), at, chunk,
          [&](uint8_t* to) { std::memcpy(to, bits, (at.n + 7) / 8); });
  }

 private:
  // Writes a block, its bits by `take` if they can mean anything.
  template <class Take>
  static void write(Prepared scale, Span at, void* chunk, Take take) {
    setItemAt(chunk, 0, at.block, scale);
    auto* bits = static_cast<uint8_t*>(chunk) + signsOffset(blockCount(at.numel), at.block);
    if (isFinite(scale)) {
      take(bits);
    } else {
      std::memset(bits, 0, (at.n + 7) / 8);
    }
  }

  void addUp(Sum sum, bool isNew, Span at, float* dst) const {
    sumInGroups(sum, isNew, [&](Sum group, bool first) {
      Signs blocks[kMostTerms];
      for (size_t k = 0; k < group.count; ++k) blocks[k] = signsIn(group.src[k], at);
      path_.sumSigns(blocks, group.count, first, group.scale, at.n, dst);
    });
  }

  Signs signsIn(const void* chunk, Span at) const {
    return {itemAt<float>(chunk, 0, at.block),
            static_cast<const uint8_t*>(chunk) + signsOffset(blockCount(at.numel), at.block)};
  }

  const CpuPath& path_;
};

// Calls `use(place, value)` for the numbers of a block that were kept; `placeOf(j)` says where number j lies.
template <class PlaceOf, class Use>
void forKept(const void* chunk, Span at, uint32_t keep, PlaceOf placeOf, Use use) {
  for (uint32_t j = 0; j < keptOf(keep, at.n); ++j) {
    const uint32_t place = placeOf(j);
    if (place < at.n) use(place, itemAt<float>(chunk, 0, at.block * keep + j));
  }
}

inline void scaleBy(float factor, size_t n, float* x) {
  for (size_t i = 0; i < n; ++i) x[i] *= factor;
}

class TopKWire {
  auto placesIn(const void* chunk, Span at) const {
    return [offset = placesOffset(at), first = at.block * keep_, chunk](uint32_t j) -> uint32_t {
      return itemAt<uint16_t>(chunk, offset, first + j);
    };
  }

 public:
  using Prepared = std::monostate;
  TopKWire(const CpuPath& path, Format format) : path_(path), keep_(format.keep) {}

  Prepared prepare(const float*, Span) const { return {}; }

  void emit(const float* x, Prepared, Span at, void* chunk) const {
    const size_t kept = keptOf(keep_, at.n);
    uint16_t places[kMostKept];
    path_.keepHighest(x, at.n, kept, hint_, places);
    const size_t first = at.block * keep_;
    const size_t offset = placesOffset(at);
    for (size_t j = 0; j < kept; ++j) {
      setItemAt(chunk, 0, first + j, keptValue(x[places[j]]));
      setItemAt(chunk, offset, first + j, places[j]);
    }
  }

  // Calls `use(place, value)` for what a chunk has of a block.
  template <class Use>
  void forEachKept(const void* chunk, Span at, Use use) const {
    forKept(chunk, at, keep_, placesIn(chunk, at), use);
  }

  void decode(const void* chunk, Span at, float* dst) const {
    std::fill_n(dst, at.n, 0.0f);
    forEachKept(chunk, at, [&](uint32_t place, float x) { dst[place] = x; });
  }

  void sum(Sum sum, Span at, float* dst) const {
    if (sum.count == 1) {
      // What was not kept is scaled once for all. -0 becomes 0, as in any sum.
      std::fill_n(dst, at.n, 0.0f * sum.scale);
      forEachKept(sum.src[0], at, [&](uint32_t place, float x) { dst[place] = (0.0f + x) * sum.scale; });
      return;
    }
    std::fill_n(dst, at.n, 0.0f);
    addTo(sum, at, dst);
    scaleBy(sum.scale, at.n, dst);
  }
  void addTo(Sum sum, Span at, float* dst) const {
    for (size_t k = 0; k < sum.count; ++k) {
      forEachKept(sum.src[k], at, [&](uint32_t place, float x) { dst[place] += x; });
    }
  }

 private:
  size_t placesOffset(Span at) const { return keptInAll(keep_, at.numel) * sizeof(float); }

  const CpuPath& path_;
  uint32_t keep_;
  mutable uint32_t hint_ = 0;
};

class RandomKWire {
 public:
  using Prepared = std::monostate;
  RandomKWire(const CpuPath& path, Format format) : path_(path), keep_(format.keep), seed_(format.seed) {}

  Prepared prepare(const float*, Span) const { return {}; }

  void emit(const float* x, Prepared, Span at, void* chunk) const {
    const bool finite = path_.allFinite(x, at.n);
    const RandomOrder order(seed_, at.block, at.n);
    for (uint32_t j = 0; j < keptOf(keep_, at.n); ++j) {
      setItemAt(chunk, 0, at.block * keep_ + j, finite ? keptValue(x[order.at(j)]) : floatOf(kQuietNan));
    }
  }

  void decode(const void* chunk, Span at, float* dst) const {
    std::fill_n(dst, at.n, 0.0f);
    const RandomOrder order(seed_, at.block, at.n);
    const auto placeOf = [&](uint32_t j) { return order.at(j); };
    forKept(chunk, at, keep_, placeOf, [&](uint32_t place, float x) { dst[place] = x; });
  }

  void sum(Sum sum, Span at, float* dst) const {
    std::fill_n(dst, at.n, 0.0f);
    addTo(sum, at, dst);
    scaleBy(sum.scale, at.n, dst);
  }
  void addTo(Sum sum, Span at, float* dst) const {
    const RandomOrder order(seed_, at.block, at.n);
    uint32_t places[kMostKept];
    for (uint32_t j = 0; j < keptOf(keep_, at.n); ++j) places[j] = order.at(j);
    const auto placeOf = [&](uint32_t j) { return places[j]; };
    for (size_t k = 0; k < sum.count; ++k) {
      forKept(sum.src[k], at, keep_, placeOf, [&](uint32_t place, float x) { dst[place] += x; });
    }
  }

 private:
  const CpuPath& path_;
  uint32_t keep_;
  uint64_t seed_;
};

}  // namespace baguarun::codec
