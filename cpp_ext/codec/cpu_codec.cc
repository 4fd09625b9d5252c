// Walks over the blocks of a chunk; what is done with a block is in cpu_wires.h.
#include "cpu_codec.h"

#include <stdexcept>

#include "cpu_wires.h"

namespace baguarun::codec::cpu {
namespace {

size_t sizeOf(DType dtype) { return dtype == DType::f32 ? sizeof(float) : sizeof(uint16_t); }

// Calls `use` with the wire that the format means.
template <class Use>
void withWire(const CpuPath& path, Format format, Use use) {
  switch (format.wire) {
    case Wire::f32:
      return use(PlainWire(path, DType::f32));
    case Wire::f16:
      return use(PlainWire(path, DType::f16));
    case Wire::bf16:
      return use(PlainWire(path, DType::bf16));
    case Wire::minmax8:
      return use(MinMaxWire<256>(path));
    case Wire::minmax4:
      return use(MinMaxWire<16>(path));
    case Wire::sign1:
      return use(SignWire(path));
    case Wire::topk:
      return use(TopKWire(path, format));
    case Wire::randomk:
      return use(RandomKWire(path, format));
  }
  throw std::logic_error("codec: no such wire");
}

bool isPlain(Wire wire) { return wire == Wire::f32 || wire == Wire::f16 || wire == Wire::bf16; }

// The type of the numbers in a plain wire.
DType plainType(Wire wire) {
  if (wire == Wire::f32) return DType::f32;
  return wire == Wire::f16 ? DType::f16 : DType::bf16;
}

void convert(const CpuPath& path, DType from, const void* src, DType to, size_t numel, void* dst) {
  if (from == to) {
    if (src != dst) std::memcpy(dst, src, numel * sizeOf(to));
  } else if (from == DType::f32) {
    path.narrow(to, static_cast<const float*>(src), numel, dst);
  } else if (to == DType::f32) {
    path.widen(from, src, numel, static_cast<float*>(dst));
  } else {
    for (size_t block = 0; block < blockCount(numel); ++block) {
      const Span at = spanOf(numel, block);
      Wide wide;
      path.widen(from, advance(src, at.first * sizeOf(from)), at.n, wide.numbers);
      path.narrow(to, wide.numbers, at.n, advance(dst, at.first * sizeOf(to)));
    }
  }
}

// The numbers of a block in fp32: where they are, or widened in `room`.
const float* numbersIn(const CpuPath& path, DType dtype, const void* src, Span at, float* room) {
  const void* numbers = advance(src, at.first * sizeOf(dtype));
  if (dtype == DType::f32) return static_cast<const float*>(numbers);
  path.widen(dtype, numbers, at.n, room);
  return room;
}

// The sum of a block's terms in fp32: where it is, or in `room`.
template <class AnyWire>
const float* summedIn(const CpuPath& path, const AnyWire& wire, const Terms& terms, Span at, float* room) {
  const float* own = numbersIn(path, terms.dtype, terms.own, at, room);
  if (terms.others.count == 0) return own;
  if (own != room) std::copy_n(own, at.n, room);
  wire.addTo(terms.others, at, room);
  return room;
}

// A block that is to be written.
template <class AnyWire>
struct Ready {
  Span at;
  const float* numbers;
  typename AnyWire::Prepared prepared;
};

// Emits one block and prepares a later one, together if the wire can.
template <class AnyWire>
void emitAndPrepare(const AnyWire& wire, const Ready<AnyWire>& now, void* dst, Ready<AnyWire>& later) {
  if constexpr (requires {
                  wire.emitAndPrepare(now.numbers, now.prepared, now.at, dst, later.numbers, later.at);
                }) {
    later.prepared = wire.emitAndPrepare(now.numbers, now.prepared, now.at, dst, later.numbers, later.at);
  } else {
    later.prepared = wire.prepare(later.numbers, later.at);
    wire.emit(now.numbers, now.prepared, now.at, dst);
  }
}

// How many blocks are prepared before one is written. What prepare computes last (the extremes and two
// divisions of a grid) takes as long as a quarter of a block, but no time of its own if nothing waits for it.
constexpr size_t kAhead = 2;

// Encodes the blocks that `numbersOf(span, room)` yields, in `room` or elsewhere, and calls `after(span,
// numbers)` when one is written.
template <class AnyWire, class NumbersOf, class After>
void encodeBlocks(const AnyWire& wire, size_t numel, void* dst, NumbersOf numbersOf, After after) {
  Ready<AnyWire> ready[kAhead];
  Wide rooms[kAhead + 1];
  const auto read = [&](size_t block, Ready<AnyWire>& to) {
    to.at = spanOf(numel, block);
    to.numbers = numbersOf(to.at, rooms[block % (kAhead + 1)].numbers);
  };
  const size_t count = blockCount(numel);
  for (size_t block = 0; block < std::min(count, kAhead); ++block) {
    read(block, ready[block]);
    ready[block].prepared = wire.prepare(ready[block].numbers, ready[block].at);
  }
  for (size_t block = 0; block < count; ++block) {
    Ready<AnyWire>& slot = ready[block % kAhead];
    const Ready<AnyWire> now = slot;
    if (block + kAhead < count) {
      read(block + kAhead, slot);
      emitAndPrepare(wire, now, dst, slot);
    } else {
      wire.emit(now.numbers, now.prepared, now.at, dst);
    }
    after(now.at, now.numbers);
  }
}

// Encodes the blocks of a sum, with a wire that emits one while it sums up the next.
template <class AnyWire>
void encodeSum(const AnyWire& wire, Sum sum, size_t numel, void* dst) {
  sum = wire.scaledFirst(sum, numel);
  Wide rooms[2];
  const auto roomOf = [&](size_t block) { return rooms[block % 2].numbers; };
  const size_t count = blockCount(numel);
  if (count == 0) return;
  wire.sum(sum, spanOf(numel, 0), roomOf(0));
  auto prepared = wire.prepare(roomOf(0), spanOf(numel, 0));
  for (size_t block = 0; block + 1 < count; ++block) {
    prepared = wire.emitAndSum(roomOf(block), prepared, spanOf(numel, block), dst, sum,
                               spanOf(numel, block + 1), roomOf(block + 1));
  }
  wire.emit(roomOf(count - 1), prepared, spanOf(numel, count - 1), dst);
}

void nothing(Span, const float*) {}

// Block after block, none ahead: numbers and residuals of more blocks would not stay in the first cache.
void encodeSignsWithResidual(const CpuPath& path, const Terms& terms, float* residual, size_t numel,
                             void* dst) {
  const SignWire wire(path);
  Wide room;
  for (size_t block = 0; block < blockCount(numel); ++block) {
    const Span at = spanOf(numel, block);
    const float* numbers = summedIn(path, wire, terms, at, room.numbers);
    wire.encodeWithResidual(numbers, residual + at.first, at, dst);
  }
}

// What is not kept is owed as it is: the residual is written with the sum, and once more where one was kept.
void encodeHighestWithResidual(const CpuPath& path, Format format, const Terms& terms, float* residual,
                               size_t numel, void* dst) {
  const TopKWire wire(path, format);
  Wide room;
  Wide sums;
  for (size_t block = 0; block < blockCount(numel); ++block) {
    const Span at = spanOf(numel, block);
    float* const owed = residual + at.first;
    path.addAndOwe(summedIn(path, wire, terms, at, room.numbers), owed, at.n, sums.numbers);
    wire.emit(sums.numbers, {}, at, dst);
    wire.forEachKept(dst, at, [&](uint32_t place, float sent) {
      const float left = sums.numbers[place] - sent;
      if (isFinite(left)) owed[place] = left;
    });
  }
}

// Writes the blocks that `fill(span, destination)` computes as numbers of `dtype`.
template <class Fill>
void writeBlocks(const CpuPath& path, DType dtype, size_t numel, void* dst, Fill fill) {
  for (size_t block = 0; block < blockCount(numel); ++block) {
    const Span at = spanOf(numel, block);
    void* numbers = advance(dst, at.first * sizeOf(dtype));
    if (dtype == DType::f32) {
      fill(at, static_cast<float*>(numbers));
      continue;
    }
    Wide wide;
    fill(at, wide.numbers);
    path.narrow(dtype, wide.numbers, at.n, numbers);
  }
}

}  // namespace

void encode(const CpuPath& path, Format format, DType dtype, const void* src, size_t numel, void* dst) {
  if (isPlain(format.wire)) return convert(path, dtype, src, plainType(format.wire), numel, dst);
  withWire(path, format, [&](const auto& wire) {
    const auto numbersOf = [&](Span at, float* room) { return numbersIn(path, dtype, src, at, room); };
    encodeBlocks(wire, numel, dst, numbersOf, nothing);
  });
}

void encodeWithResidual(const CpuPath& path, Format format, const Terms& terms, float* residual, size_t numel,
                        void* dst) {
  if (format.wire == Wire::sign1) return encodeSignsWithResidual(path, terms, residual, numel, dst);
  if (format.wire == Wire::topk) {
    return encodeHighestWithResidual(path, format, terms, residual, numel, dst);
  }
  withWire(path, format, [&](const auto& wire) {
    const auto numbersOf = [&](Span at, float* room) -> const float* {
      path.add(summedIn(path, wire, terms, at, room), residual + at.first, at.n, room);
      return room;
    };
    const auto after = [&](Span at, const float* x) {
      Wide decoded;
      wire.decode(dst, at, decoded.numbers);
      path.updateResidual(x, decoded.numbers, at.n, residual + at.first);
    };
    encodeBlocks(wire, numel, dst, numbersOf, after);
  });
}

void decode(const CpuPath& path, Format format, DType dtype, const void* src, size_t numel, void* dst) {
  if (isPlain(format.wire)) return convert(path, plainType(format.wire), src, dtype, numel, dst);
  withWire(path, format, [&](const auto& wire) {
    writeBlocks(path, dtype, numel, dst, [&](Span at, float* numbers) { wire.decode(src, at, numbers); });
  });
}

void reduceEncode(const CpuPath& path, Format format, Sum sum, size_t numel, void* dst) {
  // Straight to where they belong, not by way of a room.
  if (isPlain(format.wire)) return reduceDecode(path, format, plainType(format.wire), sum, numel, dst);
  if (format.wire == Wire::sign1 && sum.count <= kMostCounted) {
    const SignWire wire(path);
    for (size_t block = 0; block < blockCount(numel); ++block) {
      wire.encodeCounted(sum, spanOf(numel, block), dst);
    }
    return;
  }
  withWire(path, format, [&](const auto& wire) {
    if constexpr (requires { wire.scaledFirst(sum, numel); }) {
      encodeSum(wire, sum, numel, dst);
    } else {
      const auto numbersOf = [&](Span at, float* room) -> const float* {
        wire.sum(sum, at, room);
        return room;
      };
      encodeBlocks(wire, numel, dst, numbersOf, nothing);
    }
  });
}

void reduceDecode(const CpuPath& path, Format format, DType dtype, Sum sum, size_t numel, void* dst) {
  withWire(path, format, [&](const auto& wire) {
    if constexpr (requires { wire.scaledFirst(sum, numel); }) sum = wire.scaledFirst(sum, numel);
    writeBlocks(path, dtype, numel, dst, [&](Span at, float* numbers) { wire.sum(sum, at, numbers); });
  });
}

}  // namespace baguarun::codec::cpu
