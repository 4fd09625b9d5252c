#include "elastic/committed.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/_foreach_copy.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>

namespace baguarun::elastic {

namespace {

// Whether its bytes, in a row, are all that it is.
bool isPlainMemory(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() && !tensor.is_conj() &&
         !tensor.is_neg() && !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

at::CPUGeneratorImpl& generator() {
  return *at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
}

}  // namespace

void TensorCopies::take(const std::vector<at::Tensor>& live) {
  const c10::AutoGradMode withoutGradients(false);
  if (!areOf(live)) {
    kept_.clear();
    for (const at::Tensor& tensor : live) {
      kept_.push_back({tensor, tensor.detach().clone()});
    }
    return;
  }
  std::vector<at::Tensor> others;
  std::vector<at::Tensor> copies;
  for (const Kept& kept : kept_) {
    if (isPlainMemory(kept.live) && isPlainMemory(kept.copy)) {
      if (kept.live.numel() > 0) {
        std::memcpy(kept.copy.data_ptr(), kept.live.const_data_ptr(), kept.live.nbytes());
      }
    } else {
      others.push_back(kept.live);
      copies.push_back(kept.copy);
    }
  }
  if (!others.empty()) {
    at::_foreach_copy_(copies, others);
  }
}

void TensorCopies::putBack(const std::vector<at::Tensor>& live) const {
  if (live.size() != kept_.size()) {
    throw std::invalid_argument(std::to_string(kept_.size()) + " tensors were taken, " +
                                std::to_string(live.size()) + " are to be put back");
  }
  const c10::AutoGradMode withoutGradients(false);
  for (size_t i = 0; i < live.size(); ++i) {
    live[i].copy_(kept_[i].copy);
  }
}

bool TensorCopies::areOf(const std::vector<at::Tensor>& live) const {
  return std::ranges::equal(kept_, live, [](const Kept& kept, const at::Tensor& tensor) {
    return kept.live.is_same(tensor) && kept.copy.sizes() == tensor.sizes() &&
           kept.copy.scalar_type() == tensor.scalar_type() && kept.copy.device() == tensor.device();
  });
}

MemoryCopy::MemoryCopy(uintptr_t address, size_t bytes)
    : live_(reinterpret_cast<const char*>(address)), size_(bytes) {}

bool MemoryCopy::take() {
  if (bytes_.size() == size_ && std::memcmp(bytes_.data(), live_, size_) == 0) {
    return false;
  }
  bytes_.assign(live_, size_);
  return true;
}

void CpuRandomState::take() {
  at::CPUGeneratorImpl& here = generator();
  const std::scoped_lock lock(here.mutex_);
  engine_ = here.engine();
  nextFloat_ = here.next_float_normal_sample();
  nextDouble_ = here.next_double_normal_sample();
  isTaken_ = true;
}

void CpuRandomState::putBack() const {
  if (!isTaken_) {
    return;
  }
  at::CPUGeneratorImpl& here = generator();
  const std::scoped_lock lock(here.mutex_);
  here.set_engine(engine_);
  here.set_next_float_normal_sample(nextFloat_);
  here.set_next_double_normal_sample(nextDouble_);
}

}  // namespace baguarun::elastic
