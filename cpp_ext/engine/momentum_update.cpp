#include "engine/momentum_update.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "engine/clones.h"

namespace baguarun::engine {

namespace {

// Numbers of momentum are copied while they are in the first cache. Reading stands still meanwhile: a core
// that has memory to itself takes a fifth more time with blocks of 256, and two fifths with 2048.
constexpr int64_t kBlockElems = 64;
// Per thread, at the least.
constexpr int64_t kGrainElems = 32 << 10;

// Numbers [begin, end) in blocks: `use(first, n)`.
template <class Use>
void forBlocks(int64_t begin, int64_t end, const Use& use) {
  for (int64_t first = begin; first < end; first += kBlockElems) {
    use(first, std::min(kBlockElems, end - first));
  }
}

// Past the caches, where that can be.
void stream(const float* from, int64_t n, float* to) {
#if defined(__x86_64__)
  constexpr uintptr_t kVectorBytes = 16;
  int64_t i = 0;
  for (; i < n && reinterpret_cast<uintptr_t>(to + i) % kVectorBytes != 0; ++i) {
    to[i] = from[i];
  }
  for (; i + 4 <= n; i += 4) {
    _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
  }
  std::copy(from + i, from + n, to + i);
#else
  std::copy(from, from + n, to);
#endif
}

// What this thread has streamed is there for others.
void endStream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// All bits of the exponent, which only infinities and NaN have.
constexpr uint32_t kInfiniteExponent = 0x7f800000;

BAGUARUN_CLONES uint32_t greatestExponent(const float* x, int64_t n) {
  uint32_t greatest = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, x + i, sizeof bits);
    greatest = std::max(greatest, bits & kInfiniteExponent);
  }
  return greatest;
}

// Returns the greatest exponent of the momentum.
BAGUARUN_CLONES uint32_t step(const float* momentum, const float* denominator, float size, int64_t n,
                              float* parameter) {
  uint32_t greatest = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, momentum + i, sizeof bits);
    greatest = std::max(greatest, bits & kInfiniteExponent);
    parameter[i] += size * momentum[i] / denominator[i];
  }
  return greatest;
}

BAGUARUN_CLONES void addDecay(const float* momentum, const float* parameter, float decay, int64_t n,
                              float* sum) {
  for (int64_t i = 0; i < n; ++i) {
    sum[i] = momentum[i] + decay * parameter[i];
  }
}

bool isFloats(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.scalar_type() == at::kFloat && tensor.is_non_overlapping_and_dense();
}

bool isAlike(const MomentumUpdate& update) {
  const auto fits = [&](const at::Tensor& other) {
    return isFloats(other) && other.sizes() == update.parameter.sizes() &&
           other.strides() == update.parameter.strides();
  };
  return isFloats(update.parameter) && fits(update.momentum) && fits(update.average) &&
         fits(update.denominator);
}

bool updateFloats(const MomentumUpdate& update) {
  auto* const parameter = update.parameter.data_ptr<float>();
  auto* const average = update.average.data_ptr<float>();
  const auto* const momentum = update.momentum.const_data_ptr<float>();
  const auto* const denominator = update.denominator.const_data_ptr<float>();
  const auto size = static_cast<float>(update.size);
  const auto decay = static_cast<float>(update.decay);
  std::atomic<bool> finite{true};
  at::parallel_for(0, update.parameter.numel(), kGrainElems, [&](int64_t begin, int64_t end) {
    uint32_t greatest = 0;
    std::array<float, kBlockElems> decayed;
    forBlocks(begin, end, [&](int64_t first, int64_t n) {
      const float* all = momentum + first;
      if (decay != 0) {
        addDecay(all, parameter + first, decay, n, decayed.data());
        all = decayed.data();
      }
      greatest = std::max(greatest, step(all, denominator + first, size, n, parameter + first));
      stream(all, n, average + first);
    });
    endStream();
    if (greatest == kInfiniteExponent) {
      finite.store(false, std::memory_order_relaxed);
    }
  });
  // As any change in place does, for those whose backward still needs the old values.
  update.parameter.unsafeGetTensorImpl()->bump_version();
  update.average.unsafeGetTensorImpl()->bump_version();
  return finite.load();
}

bool isFinite(const at::Tensor& tensor) {
  if (!isFloats(tensor)) {
    if (tensor.numel() == 0) {
      return true;
    }
    // Makes no tensor as large as this one. Of a NaN both ends are NaN.
    const auto [least, greatest] = at::aminmax(tensor);
    return std::isfinite(least.item<double>()) && std::isfinite(greatest.item<double>());
  }
  std::atomic<bool> finite{true};
  const auto* const x = tensor.const_data_ptr<float>();
  at::parallel_for(0, tensor.numel(), kGrainElems, [&](int64_t begin, int64_t end) {
    if (greatestExponent(x + begin, end - begin) == kInfiniteExponent) {
      finite.store(false, std::memory_order_relaxed);
    }
  });
  return finite.load();
}

}  // namespace

bool update(const std::vector<MomentumUpdate>& updates) {
  const at::NoGradGuard noGrad;
  bool finite = true;
  for (const MomentumUpdate& each : updates) {
    if (isAlike(each)) {
      finite = updateFloats(each) && finite;
    } else {
      at::Tensor average = each.average;
      at::Tensor parameter = each.parameter;
      average.copy_(each.momentum);
      if (each.decay != 0) {
        average.add_(parameter, each.decay);
      }
      finite = isFinite(average) && finite;
      parameter.addcdiv_(average, each.denominator, each.size);
    }
  }
  return finite;
}

bool allFinite(const std::vector<at::Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), isFinite);
}

}  // namespace baguarun::engine
