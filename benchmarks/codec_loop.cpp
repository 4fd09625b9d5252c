// Times the codecs against memcpy of the same fp32 bytes. Prints one line "path name numel best_ns memcpy_ns"
// per measurement; benchmarks/codec.py reads it.
//
// memcpy and the codec take turns, some hundred microseconds each, over buffers that both have just touched,
// and the best turn of each counts: what else runs on the machine, or its clock rate, then hits both alike.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu_path.h"

namespace codec = baguarun::codec;

namespace {

constexpr codec::Exec kCpu{codec::Device::cpu, nullptr};
constexpr size_t kInputs = 4;
constexpr size_t kJudgedNumel = size_t{64} << 10;
// In the first cache, in the second one, in the third one, and in memory.
constexpr size_t kSizes[] = {size_t{4} << 10, kJudgedNumel, size_t{1} << 20, size_t{8} << 20};
constexpr const codec::CpuPath* kPaths[] = {
#if defined(__x86_64__)
    &codec::kAvx512Path, &codec::kAvx2Path,
#endif
    &codec::kPortablePath};
constexpr double kTurnNs = 2e5;
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
  float* floats() const { return static_cast<float*>(data_); }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  size_t bytes_;
  void* data_;
};

// Nanoseconds per call.
template <class Call>
double averageNs(int calls, Call call) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) {
    call();
    asm volatile("" ::: "memory");
  }
  const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
  return spent.count() / calls;
}

template <class Call>
int callsInTurn(Call call) {
  call();
  return std::max(1, static_cast<int>(kTurnNs / averageNs(1, call)));
}

class Case {
 public:
  Case(size_t numel, int rounds)
      : numel_(numel), rounds_(rounds), x_(bytes()), other_(bytes()), out_(bytes()), residual_(bytes()) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < numel; ++i) x_.floats()[i] = normal(random);
    std::memcpy(other_.get(), x_.get(), bytes());
    for (size_t k = 0; k < kInputs; ++k) chunks_.push_back(std::make_unique<Buffer>(bytes()));
  }

  // What the targets are about.
  void measureJudged(const codec::CpuPath& path) {
    prepareChunks(codec::Wire::minmax8);
    reportEncode(path.name, "minmax8", codec::Wire::minmax8);
    reportDecode(path.name, "minmax8", codec::Wire::minmax8);
    reportReduceEncode(path.name, "minmax8", codec::Wire::minmax8);
    accumulateLevels(path);
    reportEncodeWithResidual(path.name, "sign1", codec::Wire::sign1);
    accumulateSigns(path);
    reportEncode(path.name, "topk", codec::Wire::topk);
  }

  void measure(const codec::CpuPath& path) {
    for (const auto& [name, format] : kCompressing) measureWire(path.name, name, format);
    accumulateLevels(path);
    accumulateSigns(path);
    using codec::DType;
    using codec::Wire;
    report(path.name, "f16-encode",
           [&] { codec::encode(kCpu, Wire::f16, DType::f32, x_.get(), numel_, out_.get()); });
    report(path.name, "bf16-encode",
           [&] { codec::encode(kCpu, Wire::bf16, DType::f32, x_.get(), numel_, out_.get()); });
    const void* floats[2] = {x_.get(), other_.get()};
    report(path.name, "f32-reduce2-in-place",
           [&] { codec::reduceEncode(kCpu, Wire::f32, floats, 2, 0.5f, numel_, other_.get()); });
  }

  // What the machine does with nothing to compute: a decoder writes as many numbers, an accumulating one
  // reads and writes them.
  void measureBounds(const codec::CpuPath& path) {
    report(path.name, "fill", [&] { std::memset(out_.get(), 0, bytes()); });
    const Buffer block(codec::kBlockElems * sizeof(float));
    std::memset(block.get(), 0, codec::kBlockElems * sizeof(float));
    report(path.name, "add-one-block", [&] {
      for (size_t i = 0; i < codec::blockCount(numel_); ++i) {
        path.add(outBlock(i), block.floats(), codec::blockLength(numel_, i), outBlock(i));
      }
    });
  }

 private:
  size_t bytes() const { return numel_ * sizeof(float); }

  template <class Call>
  void report(const char* path, const std::string& name, Call call) {
    const auto copy = [&] { std::memcpy(out_.get(), x_.get(), bytes()); };
    const int copies = callsInTurn(copy);
    const int calls = callsInTurn(call);
    double best = 1e30, bestCopy = 1e30;
    for (int round = 0; round < rounds_; ++round) {
      bestCopy = std::min(bestCopy, averageNs(copies, copy));
      call();
      best = std::min(best, averageNs(calls, call));
    }
    std::printf("%s %s %zu %.1f %.1f\n", path, name.c_str(), numel_, best, bestCopy);
  }

  void measureWire(const char* path, const std::string& wire, codec::Format format) {
    prepareChunks(format);
    reportEncode(path, wire, format);
    reportEncodeWithResidual(path, wire, format);
    reportDecode(path, wire, format);
    reportReduceEncode(path, wire, format);
    report(path, wire + "-reduce4-decode", [&] {
      codec::reduceDecode(kCpu, format, codec::DType::f32, inputs_, kInputs, 0.25f, numel_, out_.get());
    });
  }

  void prepareChunks(codec::Format format) {
    for (size_t k = 0; k < kInputs; ++k) {
      inputs_[k] = chunks_[k]->get();
      codec::encode(kCpu, format, codec::DType::f32, x_.get(), numel_, chunks_[k]->get());
    }
  }

  void reportEncode(const char* path, const std::string& wire, codec::Format format) {
    report(path, wire + "-encode",
           [&] { codec::encode(kCpu, format, codec::DType::f32, x_.get(), numel_, out_.get()); });
  }

  void reportEncodeWithResidual(const char* path, const std::string& wire, codec::Format format) {
    std::memset(residual_.get(), 0, bytes());
    report(path, wire + "-encode-residual", [&] {
      codec::encodeWithResidual(kCpu, format, codec::DType::f32, x_.get(), residual_.floats(), numel_,
                                out_.get());
    });
  }

  void reportDecode(const char* path, const std::string& wire, codec::Format format) {
    report(path, wire + "-decode",
           [&] { codec::decode(kCpu, format, codec::DType::f32, inputs_[0], numel_, out_.get()); });
  }

  void reportReduceEncode(const char* path, const std::string& wire, codec::Format format) {
    report(path, wire + "-reduce4-encode",
           [&] { codec::reduceEncode(kCpu, format, inputs_, kInputs, 0.25f, numel_, out_.get()); });
  }

  // out += decoded: the loop that a reduction of more than four chunks runs for the others.
  void accumulateLevels(const codec::CpuPath& path) {
    prepareChunks(codec::Wire::minmax8);
    const auto* chunk = static_cast<const uint8_t*>(inputs_[0]);
    report(path.name, "minmax8-decode-accumulate", [&] {
      for (size_t block = 0; block < codec::blockCount(numel_); ++block) {
        codec::Levels levels{{}, chunk + codec::levelsOffset(256, numel_, block)};
        std::memcpy(&levels.header, chunk + block * sizeof levels.header, sizeof levels.header);
        path.sumLevels(&levels, 1, false, 1.0f, codec::blockLength(numel_, block), outBlock(block));
      }
    });
  }

  void accumulateSigns(const codec::CpuPath& path) {
    prepareChunks(codec::Wire::sign1);
    const auto* chunk = static_cast<const uint8_t*>(inputs_[0]);
    report(path.name, "sign1-decode-accumulate", [&] {
      for (size_t block = 0; block < codec::blockCount(numel_); ++block) {
        codec::Signs signs{0.0f, chunk + codec::signsOffset(numel_, block)};
        std::memcpy(&signs.scale, chunk + block * sizeof signs.scale, sizeof signs.scale);
        path.sumSigns(&signs, 1, false, 1.0f, codec::blockLength(numel_, block), outBlock(block));
      }
    });
  }

  float* outBlock(size_t block) const { return out_.floats() + block * codec::kBlockElems; }

  size_t numel_;
  int rounds_;
  Buffer x_, other_, out_, residual_;
  std::vector<std::unique_ptr<Buffer>> chunks_;
  const void* inputs_[kInputs];
};

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 31;
  for (const size_t numel : kSizes) {
    Case numbers(numel, rounds);
    for (const codec::CpuPath* path : kPaths) {
      if (!codec::usePath(path->name)) continue;
      if (numel == kJudgedNumel) {
        numbers.measureBounds(*path);
        numbers.measure(*path);
      } else if (path != &codec::kPortablePath) {
        numbers.measureJudged(*path);
      }
    }
  }
}
