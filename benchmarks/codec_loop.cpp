// Times the codecs against memcpy. Prints one line "path name numel best_ns" per measurement;
// benchmarks/codec.py reads it.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <string>
#include <utility>

#include "codec.h"

namespace codec = baguarun::codec;

namespace {

constexpr codec::Exec kCpu{codec::Device::cpu, nullptr};
constexpr size_t kInputs = 4;
// topk and randomk keep 1 % of the numbers.
constexpr std::pair<const char*, codec::Format> kCompressing[] = {
    {"minmax8", codec::Wire::minmax8}, {"minmax4", codec::Wire::minmax4}, {"sign1", codec::Wire::sign1},
    {"topk", codec::Wire::topk},       {"randomk", codec::Wire::randomk},
};

// Memory on huge pages where the system grants them: page size alone moves memcpy by 1.4 times.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_((bytes + kHugePage - 1) / kHugePage * kHugePage) {
    data_ = std::aligned_alloc(kHugePage, bytes_);
    if (data_ == nullptr) throw std::bad_alloc();
    madvise(data_, bytes_, MADV_HUGEPAGE);
    std::memset(data_, 1, bytes_);
  }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* get() const { return data_; }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  size_t bytes_;
  void* data_;
};

// The best of `rounds` averages over `calls` calls, in nanoseconds per call.
template <class Call>
double bestNs(int rounds, int calls, Call call) {
  double best = 1e30;
  for (int round = 0; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) call();
    const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
    best = std::min(best, spent.count() / calls);
  }
  return best;
}

void measure(size_t numel, int rounds) {
  const int calls = numel > (size_t{1} << 20) ? 1 : 50;
  const size_t bytes = numel * sizeof(float);
  Buffer numbers(bytes), other(bytes), out(bytes);
  auto* x = static_cast<float*>(numbers.get());
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < numel; ++i) x[i] = normal(random);
  std::memcpy(other.get(), x, bytes);

  Buffer residual(bytes), chunk0(bytes), chunk1(bytes), chunk2(bytes), chunk3(bytes);
  const void* chunks[kInputs] = {chunk0.get(), chunk1.get(), chunk2.get(), chunk3.get()};
  const void* floats[2] = {x, other.get()};

  const auto report = [&](const char* path, const char* name, auto call) {
    call();
    std::printf("%s %s %zu %.1f\n", path, name, numel, bestNs(rounds, calls, call));
  };
  const auto reportWire = [&](const char* path, const std::string& wire, codec::Format format) {
    for (const void* chunk : chunks) {
      codec::encode(kCpu, format, codec::DType::f32, x, numel, const_cast<void*>(chunk));
    }
    std::memset(residual.get(), 0, bytes);
    report(path, (wire + "-encode").c_str(),
           [&] { codec::encode(kCpu, format, codec::DType::f32, x, numel, out.get()); });
    report(path, (wire + "-encode-residual").c_str(), [&] {
      codec::encodeWithResidual(kCpu, format, codec::DType::f32, x, static_cast<float*>(residual.get()),
                                numel, out.get());
    });
    report(path, (wire + "-decode").c_str(),
           [&] { codec::decode(kCpu, format, codec::DType::f32, chunks[0], numel, out.get()); });
    report(path, (wire + "-reduce4-encode").c_str(),
           [&] { codec::reduceEncode(kCpu, format, chunks, kInputs, 0.25f, numel, out.get()); });
    report(path, (wire + "-reduce4-decode").c_str(), [&] {
      codec::reduceDecode(kCpu, format, codec::DType::f32, chunks, kInputs, 0.25f, numel, out.get());
    });
  };
  report("-", "memcpy", [&] { std::memcpy(out.get(), x, bytes); });
  for (const char* path : {"avx512", "avx2", "portable"}) {
    if (!codec::usePath(path)) continue;
    using codec::DType;
    using codec::Wire;
    for (const auto& [name, format] : kCompressing) reportWire(path, name, format);
    report(path, "f16-encode", [&] { codec::encode(kCpu, Wire::f16, DType::f32, x, numel, out.get()); });
    report(path, "bf16-encode", [&] { codec::encode(kCpu, Wire::bf16, DType::f32, x, numel, out.get()); });
    report(path, "f32-reduce2-in-place",
           [&] { codec::reduceEncode(kCpu, Wire::f32, floats, 2, 0.5f, numel, other.get()); });
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 31;
  measure(size_t{64} << 10, rounds);
  measure(size_t{8} << 20, rounds);
}
