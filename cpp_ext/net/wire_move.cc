// The operations of WireGroup that move data from rank to rank.
#include <algorithm>
#include <numeric>

#include "net/error.h"
#include "net/shm_steps.h"
#include "net/wire_group.h"

namespace baguarun::net {

using shm::bytesOf;
using shm::copyBytes;

namespace {

constexpr size_t kSegmentBytes = 256 << 10;
// Received and not yet handed on.
constexpr size_t kWindow = 16;

}  // namespace

void WireGroup::allGather(const Call& call, const void* in, void* out, size_t bytes) {
  WireCall wire(context_, members_, place_, call);
  std::byte* const own = bytesOf(out) + place_ * bytes;
  copyBytes(own, in, bytes);
  if (bytes * size() > kSmallBytes) {
    ring(wire, {.in = bytesOf(out),
                .data = bytesOf(out),
                .blockBytes = bytes,
                .totalBytes = bytes * size(),
                .shift = 0,
                .reduceSteps = 0,
                .steps = size() - 1,
                .reduction = {.dtype = Dtype::kUint8, .op = ReduceOp::kSum}});
    return;
  }
  for (size_t i = 1; i < size(); ++i) {
    const size_t to = (place_ + i) % size();
    const size_t from = (place_ + size() - i) % size();
    wire.send(to, own, bytes);
    wire.receive(from, bytesOf(out) + from * bytes, bytes);
  }
  wire.finish();
}

// Small: a binomial tree. Large: a chain in which each hands on what has come.
void WireGroup::broadcast(const Call& call, void* data, size_t bytes, size_t root) {
  WireCall wire(context_, members_, place_, call);
  const size_t position = (place_ + size() - root) % size();
  const auto placeAt = [&](size_t at) { return (root + at) % size(); };
  if (bytes <= kSmallBytes) {
    size_t reach = 1;  // positions below it have the data
    if (position > 0) {
      while (2 * reach <= position) {
        reach *= 2;
      }
      wire.receive(placeAt(position - reach), data, bytes);
      wire.waitReceived(placeAt(position - reach), 1);
      reach *= 2;
    }
    for (; position + reach < size(); reach *= 2) {
      wire.send(placeAt(position + reach), data, bytes);
    }
    wire.finish();
    return;
  }
  const size_t total = (bytes + kSegmentBytes - 1) / kSegmentBytes;
  const auto sizeOf = [&](size_t k) { return std::min(kSegmentBytes, bytes - k * kSegmentBytes); };
  size_t posted = 0;
  for (size_t k = 0; k < total; ++k) {
    if (position > 0) {
      const size_t previous = placeAt(position - 1);
      for (; posted < std::min(total, k + kWindow); ++posted) {
        wire.receive(previous, bytesOf(data) + posted * kSegmentBytes, sizeOf(posted));
      }
      wire.waitReceived(previous, k + 1);
    }
    if (position + 1 < size()) {
      wire.send(placeAt(position + 1), bytesOf(data) + k * kSegmentBytes, sizeOf(k));
    }
  }
  wire.finish();
}

void WireGroup::gather(const Call& call, const void* in, void* out, size_t bytes, size_t root) {
  WireCall wire(context_, members_, place_, call);
  if (place_ != root) {
    wire.send(root, in, bytes);
    wire.finish();
    return;
  }
  copyBytes(bytesOf(out) + place_ * bytes, in, bytes);
  for (size_t i = 1; i < size(); ++i) {
    const size_t from = (root + i) % size();
    wire.receive(from, bytesOf(out) + from * bytes, bytes);
  }
  wire.finish();
}

void WireGroup::scatter(const Call& call, const void* in, void* out, size_t bytes, size_t root) {
  WireCall wire(context_, members_, place_, call);
  if (place_ != root) {
    wire.receive(root, out, bytes);
    wire.finish();
    return;
  }
  copyBytes(out, bytesOf(in) + place_ * bytes, bytes);
  for (size_t i = 1; i < size(); ++i) {
    const size_t to = (root + i) % size();
    wire.send(to, bytesOf(in) + to * bytes, bytes);
  }
  wire.finish();
}

// The header says how much will come, so that a mistake is found before anything is written.
void WireGroup::allToAllV(const Call& call, const void* in, std::span<const size_t> sendBytes, void* out,
                          std::span<const size_t> recvBytes) {
  WireCall wire(context_, members_, place_, call);
  std::vector<size_t> sendAt(size());
  std::vector<size_t> recvAt(size());
  std::exclusive_scan(sendBytes.begin(), sendBytes.end(), sendAt.begin(), size_t{0});
  std::exclusive_scan(recvBytes.begin(), recvBytes.end(), recvAt.begin(), size_t{0});
  for (size_t i = 1; i < size(); ++i) {
    const size_t to = (place_ + i) % size();
    wire.note(to, sendBytes[to]);
    wire.greet(to);
  }
  const auto check = [&](size_t from, uint64_t sent) {
    if (sent != recvBytes[from]) {
      throw Error(Fault::kUsage, context_.mesh().name(members_[from]),
                  "all-to-all: sends " + std::to_string(sent) + " bytes to " +
                      context_.mesh().name(members_[place_]) + ", which expects " +
                      std::to_string(recvBytes[from]));
    }
  };
  check(place_, sendBytes[place_]);
  for (size_t i = 1; i < size(); ++i) {
    const size_t from = (place_ + size() - i) % size();
    check(from, wire.waitNote(from));
  }
  for (size_t i = 1; i < size(); ++i) {
    const size_t to = (place_ + i) % size();
    const size_t from = (place_ + size() - i) % size();
    if (sendBytes[to] > 0) {
      wire.send(to, bytesOf(in) + sendAt[to], sendBytes[to]);
    }
    if (recvBytes[from] > 0) {
      wire.receive(from, bytesOf(out) + recvAt[from], recvBytes[from]);
    }
  }
  copyBytes(bytesOf(out) + recvAt[place_], bytesOf(in) + sendAt[place_], sendBytes[place_]);
  wire.finish();
}

// In round k everybody hears from the one 2^k before it, and so of all before that one.
void WireGroup::barrier(const Call& call) {
  WireCall wire(context_, members_, place_, call);
  for (size_t distance = 1; distance < size(); distance *= 2) {
    wire.greet((place_ + distance) % size());
    wire.waitNote((place_ + size() - distance) % size());
  }
  wire.finish();
}

}  // namespace baguarun::net
