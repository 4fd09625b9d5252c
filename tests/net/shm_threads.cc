// Ranks as threads over one mapping, so that a sanitizer sees all of them. Exits with 0 where all came out
// right.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "net/error.h"
#include "net/shm_group.h"

using baguarun::net::Dtype;
using baguarun::net::Error;
using baguarun::net::Fault;
using baguarun::net::ReduceOp;
using baguarun::net::ShmGroup;
using baguarun::net::ShmSegment;

namespace {

constexpr size_t kArenaBytes = 1 << 20;

void expect(bool condition, const char* what) {
  if (!condition) {
    std::fprintf(stderr, "not so: %s\n", what);
    std::exit(1);
  }
}

bool all(const std::vector<float>& values, float want) {
  for (float value : values) {
    if (value != want) {
      return false;
    }
  }
  return true;
}

void work(ShmGroup& group) {
  const auto size = static_cast<size_t>(group.size());
  const auto rank = static_cast<float>(group.rank());
  const float sum = static_cast<float>(size * (size - 1)) / 2;
  for (size_t count : {size_t{0}, size_t{1}, size_t{16384}, size_t{16385}, size_t{700001}}) {
    std::vector<float> data(count, rank);
    group.allReduce(data.data(), data.data(), count, Dtype::kFloat32, ReduceOp::kSum);
    expect(all(data, sum), "all-reduce");
    std::vector<float> blocks(count * size, rank);
    group.reduceScatter(blocks.data(), data.data(), count, Dtype::kFloat32, ReduceOp::kMax);
    expect(all(data, static_cast<float>(size - 1)), "reduce-scatter");
    group.allGather(data.data(), blocks.data(), count * sizeof(float));
    expect(all(blocks, static_cast<float>(size - 1)), "all-gather");
    std::vector<float> other(count * size);
    group.allToAll(blocks.data(), other.data(), count * sizeof(float));
    expect(other == blocks, "all-to-all");
    group.broadcast(data.data(), count * sizeof(float), group.size() - 1);
  }
  auto* inside = static_cast<float*>(group.allocate(60000 * sizeof(float)));
  for (int round = 1; round <= 3; ++round) {
    std::fill(inside, inside + 60000, 1.0f);
    group.allReduce(inside, inside, 60000, Dtype::kFloat32, ReduceOp::kSum);
    expect(inside[0] == static_cast<float>(size) && inside[59999] == inside[0], "in the segment");
  }
  group.barrier();
}

void endAborted(ShmGroup& group) {
  std::vector<float> data(100000, 1.0f);
  try {
    for (;;) {
      group.allReduce(data.data(), data.data(), data.size(), Dtype::kFloat32, ReduceOp::kMax);
    }
  } catch (const Error& error) {
    const bool ours = group.rank() == 0;
    expect(error.fault() == (ours ? Fault::kAborted : Fault::kRemote), error.what());
  }
}

void run(int size) {
  const auto segment = ShmSegment::forThreads(size, ShmGroup::segmentBytes(size, kArenaBytes));
  std::vector<std::unique_ptr<ShmGroup>> groups;
  for (int rank = 0; rank < size; ++rank) {
    const ShmGroup::Options options{.rank = rank,
                                    .size = size,
                                    .nonce = "threads",
                                    .timeout = std::chrono::seconds(60),
                                    .arenaBytes = kArenaBytes};
    groups.push_back(std::make_unique<ShmGroup>(options, segment));
  }
  for (void (*phase)(ShmGroup&) : {&work, &endAborted}) {
    std::vector<std::thread> threads;
    for (auto& group : groups) {
      threads.emplace_back(phase, std::ref(*group));
    }
    if (phase == &endAborted) {
      groups[0]->abort();
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
}

}  // namespace

int main() {
  for (int size : {1, 2, 4}) {
    run(size);
  }
  return 0;
}
