// Tensors as the transport wants them: plain memory. For sources of collectives and backend.cpp only.
#pragma once

#include <ATen/ATen.h>

#include <utility>
#include <vector>

namespace baguarun::backend {

inline bool isPlain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

inline at::Tensor toPlain(const at::Tensor& tensor) {
  return tensor.resolve_conj().resolve_neg().contiguous();
}

inline void checkTensor(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "baguanet: found a tensor of layout ", tensor.layout(),
                    "; want a dense one");
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), "baguanet: found a tensor on ", tensor.device(),
                    "; want it on the CPU");
}

inline void checkTensors(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    checkTensor(tensor);
  }
}

// The one tensor that most operations take.
inline at::Tensor& onlyOne(std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "baguanet: found ", tensors.size(), " tensors; want one");
  checkTensor(tensors[0]);
  return tensors[0];
}

// All of `tensors` have the type and number of elements of `model`.
inline void checkAlike(const std::vector<at::Tensor>& tensors, const at::Tensor& model) {
  for (const at::Tensor& tensor : tensors) {
    checkTensor(tensor);
    TORCH_CHECK_VALUE(tensor.scalar_type() == model.scalar_type() && tensor.numel() == model.numel(),
                      "baguanet: found tensors of ", tensor.numel(), " ", tensor.scalar_type(), " and ",
                      model.numel(), " ", model.scalar_type(), "; want them alike");
  }
}

// A tensor that is read and overwritten: itself, or a plain copy that write() puts back.
class InPlace {
 public:
  explicit InPlace(const at::Tensor& tensor)
      : tensor_(tensor), plain_(isPlain(tensor) ? tensor : toPlain(tensor)) {}

  void* data() const { return plain_.mutable_data_ptr(); }

  at::Tensor& plain() { return plain_; }

  void write() {
    if (!plain_.is_same(tensor_)) {
      tensor_.copy_(plain_);
    }
  }

 private:
  at::Tensor tensor_;
  at::Tensor plain_;
};

// A tensor that is overwritten only.
class Output {
 public:
  explicit Output(const at::Tensor& tensor)
      : tensor_(tensor),
        plain_(isPlain(tensor) ? tensor
                               : at::empty(tensor.sizes(), tensor.options(), at::MemoryFormat::Contiguous)) {}

  void* data() const { return plain_.mutable_data_ptr(); }

  void write() {
    if (!plain_.is_same(tensor_)) {
      tensor_.copy_(plain_);
    }
  }

 private:
  at::Tensor tensor_;
  at::Tensor plain_;
};

// Tensors one behind the other in memory: where they lie if they do so, else in a buffer of their own.
class Row {
 public:
  explicit Row(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
    if (!isRow()) {
      int64_t bytes = 0;
      for (const at::Tensor& tensor : tensors_) {
        bytes += static_cast<int64_t>(tensor.nbytes());
      }
      buffer_ = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
      place_ = buffer_.mutable_data_ptr();
    }
  }

  void* data() const { return place_; }

  // Before the operation: the tensors' values to the row.
  void read() {
    if (buffer_.defined()) {
      forEach([](const at::Tensor& slice, const at::Tensor& tensor) { slice.copy_(tensor); });
    }
  }

  // After it: the row's values to the tensors.
  void write() {
    if (buffer_.defined()) {
      forEach([](const at::Tensor& slice, const at::Tensor& tensor) { tensor.copy_(slice); });
    }
  }

 private:
  // Empty tensors lie anywhere.
  bool isRow() {
    const at::Tensor* last = nullptr;
    for (const at::Tensor& tensor : tensors_) {
      if (tensor.numel() == 0) {
        continue;
      }
      if (!isPlain(tensor) || (last != nullptr && !follows(tensor, *last))) {
        return false;
      }
      last = &tensor;
      place_ = place_ != nullptr ? place_ : tensor.mutable_data_ptr();
    }
    return true;
  }

  static bool follows(const at::Tensor& tensor, const at::Tensor& last) {
    return tensor.is_alias_of(last) &&
           tensor.const_data_ptr() == static_cast<const char*>(last.const_data_ptr()) + last.nbytes();
  }

  template <class Copy>
  void forEach(Copy copy) {
    int64_t begin = 0;
    for (const at::Tensor& tensor : tensors_) {
      const auto bytes = static_cast<int64_t>(tensor.nbytes());
      // Slices of mixed sizes may lie at any byte; views of a wider type want theirs aligned.
      at::Tensor slice = buffer_.narrow(0, begin, bytes);
      copy(slice.view(tensor.scalar_type()).view(tensor.sizes()), tensor);
      begin += bytes;
    }
  }

  std::vector<at::Tensor> tensors_;
  at::Tensor buffer_;
  void* place_ = nullptr;
};

}  // namespace baguarun::backend
