#include "engine/tensor_reduction.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "engine/errors.h"

namespace baguarun::engine {

namespace {

// Pieces of this size follow each other through encoder, wire and decoder.
constexpr int64_t kPieceBytes = int64_t{4} << 20;

}  // namespace

TensorReduction::TensorReduction(const Group& group, const std::vector<at::Tensor>& tensors,
                                 const OperationSpec& operation, uint32_t round) {
  std::vector<Bucket> pieces;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_contiguous() || tensor.device() != tensors.front().device()) {
      throw UsageFailure("a reduction of tensors: want contiguous ones on one device");
    }
    const at::Tensor flat = tensor.detach().view({-1});
    const int64_t most = kPieceBytes / flat.element_size();
    for (int64_t first = 0; first < flat.numel(); first += most) {
      Bucket& piece = pieces.emplace_back();
      piece.index = pieces.size() - 1;
      piece.label = std::to_string(piece.index) + " of a reduction";
      piece.flat = flat.narrow(0, first, std::min(most, flat.numel() - first));
      piece.bytes = piece.flat.nbytes();
      piece.operation = operation;
    }
  }
  if (pieces.empty()) {
    throw UsageFailure("a reduction of tensors: want at least one number");
  }
  schedule_ =
      tensors.front().is_cpu() ? makeHostSchedule({group}, pieces) : makeStreamSchedule(group, pieces);
  for (const Bucket& piece : pieces) {
    schedule_->stored(piece.index);
    schedule_->launch(piece.index, round);
  }
}

}  // namespace baguarun::engine
