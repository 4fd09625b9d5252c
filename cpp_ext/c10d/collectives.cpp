// The operations of BaguanetBackend: each checks its arguments and says what the communicator shall do.
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "c10d/backend.h"
#include "c10d/reduction.h"
#include "c10d/tensors.h"

namespace baguarun::backend {

using ::c10d::OpType;
using net::Communicator;
using Tensors = BaguanetBackend::Tensors;
using Result = BaguanetBackend::Result;

namespace {

// The one list of `size` tensors that an operation takes, or none where `wanted` is false.
Tensors onlyList(const std::vector<Tensors>& lists, bool wanted, int size) {
  if (!wanted) {
    TORCH_CHECK_VALUE(lists.empty(), "baguanet: found a list of tensors on a rank that is not the root");
    return {};
  }
  TORCH_CHECK_VALUE(lists.size() == 1 && lists[0].size() == static_cast<size_t>(size), "baguanet: found ",
                    lists.empty() ? 0 : lists[0].size(), " tensors; want one for each of ", size, " ranks");
  return lists[0];
}

// `whole` holds a `part` for each rank.
void checkWhole(const at::Tensor& whole, const at::Tensor& part, int size) {
  checkTensor(whole);
  checkTensor(part);
  TORCH_CHECK_VALUE(whole.scalar_type() == part.scalar_type(), "baguanet: found tensors of ",
                    whole.scalar_type(), " and ", part.scalar_type(), "; want one type");
  TORCH_CHECK_VALUE(whole.numel() == part.numel() * size, "baguanet: found tensors of ", whole.numel(),
                    " and ", part.numel(), " elements; want the former ", size, " times the latter");
}

void checkPairs(const Tensors& left, const Tensors& right) {
  TORCH_CHECK_VALUE(left.size() == right.size() && !left.empty(), "baguanet: found ", left.size(),
                    " outputs and ", right.size(), " inputs; want as many, at least one");
}

void reduceInPlace(Communicator& communicator, const at::Tensor& tensor, const Reduction& reduction,
                   Clock::time_point deadline) {
  InPlace buffer(tensor);
  reduction.scale(buffer.plain());
  communicator.allReduce(buffer.data(), reduction.count(tensor), reduction.dtype, reduction.op, deadline);
  buffer.write();
}

// What reduceInPlace() hands to the communicator, if that is the tensor itself.
std::optional<Collective::AllReduce> asItLies(const at::Tensor& tensor, const Reduction& reduction) {
  if (!isPlain(tensor) || reduction.isScaled()) {
    return std::nullopt;
  }
  // Of a lazy copy this makes a real one, which is what the call finds.
  return Collective::AllReduce{.data = tensor.mutable_data_ptr(),
                               .count = reduction.count(tensor),
                               .dtype = reduction.dtype,
                               .op = reduction.op};
}

void gatherWhole(Communicator& communicator, const at::Tensor& whole, const at::Tensor& part,
                 Clock::time_point deadline) {
  Output out(whole);
  const at::Tensor in = toPlain(part);
  communicator.allGather(in.const_data_ptr(), out.data(), in.nbytes(), deadline);
  out.write();
}

void scatterReduced(Communicator& communicator, const at::Tensor& part, const at::Tensor& whole,
                    const Reduction& reduction, Clock::time_point deadline) {
  Output out(part);
  const at::Tensor in = reduction.scaled(toPlain(whole));
  communicator.reduceScatter(in.const_data_ptr(), out.data(), reduction.count(part), reduction.dtype,
                             reduction.op, deadline);
  out.write();
}

// Bytes per rank of an all-to-all along the first dimension.
std::vector<size_t> splitBytes(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size,
                               const char* what) {
  const auto ranks = static_cast<size_t>(size);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(tensor.dim() > 0 && tensor.size(0) % size == 0, "baguanet: found ", what, " of shape ",
                      tensor.sizes(), "; want a first dimension that ", size, " ranks can share evenly");
    return std::vector<size_t>(ranks, tensor.nbytes() / ranks);
  }
  const int64_t rows = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  const bool negative = std::any_of(splits.begin(), splits.end(), [](int64_t split) { return split < 0; });
  TORCH_CHECK_VALUE(splits.size() == ranks && !negative && tensor.dim() > 0 && rows == tensor.size(0),
                    "baguanet: found split sizes ", splits, " for ", what, " of shape ", tensor.sizes(),
                    "; want ", size, " that add up to the first dimension");
  const size_t rowBytes = rows > 0 ? tensor.nbytes() / static_cast<size_t>(rows) : 0;
  std::vector<size_t> bytes;
  for (const int64_t split : splits) {
    bytes.push_back(static_cast<size_t>(split) * rowBytes);
  }
  return bytes;
}

}  // namespace

Result BaguanetBackend::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) {
  const at::Tensor tensor = onlyOne(tensors);
  checkRank(opts.rootRank, "root");
  const int root = static_cast<int>(opts.rootRank);
  return submit({OpType::BROADCAST, "broadcast", "baguanet:broadcast", opts.timeout, opts.asyncOp}, tensors,
                tensors, [=](Communicator& communicator, Deadline deadline) {
                  InPlace buffer(tensor);
                  communicator.broadcast(buffer.data(), tensor.nbytes(), root, deadline);
                  buffer.write();
                });
}

Result BaguanetBackend::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  TORCH_CHECK_VALUE(!opts.sparseIndices, "baguanet: sparse tensors are not supported");
  const at::Tensor tensor = onlyOne(tensors);
  const Reduction reduction(opts.reduceOp, tensor);
  return submit(
      {OpType::ALLREDUCE, "all_reduce", "baguanet:all_reduce", opts.timeout, opts.asyncOp}, tensors, tensors,
      [=](Communicator& communicator, Deadline deadline) {
        reduceInPlace(communicator, tensor, reduction, deadline);
      },
      asItLies(tensor, reduction));
}

Result BaguanetBackend::allreduce_sparse(Tensors& /*tensors*/, const ::c10d::AllreduceOptions& /*opts*/) {
  TORCH_CHECK_VALUE(false, "baguanet: sparse tensors are not supported; want dense ones (to_dense())");
}

Result BaguanetBackend::allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) {
  checkTensors(tensors);
  std::vector<Reduction> reductions;
  for (const at::Tensor& tensor : tensors) {
    reductions.emplace_back(opts.reduceOp, tensor);
  }
  return submit({OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced", "baguanet:all_reduce_coalesced",
                 opts.timeout, opts.asyncOp},
                tensors, tensors, [all = tensors, reductions](Communicator& communicator, Deadline deadline) {
                  for (size_t i = 0; i < all.size(); ++i) {
                    reduceInPlace(communicator, all[i], reductions[i], deadline);
                  }
                });
}

Result BaguanetBackend::reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) {
  const at::Tensor tensor = onlyOne(tensors);
  checkRank(opts.rootRank, "root");
  const int root = static_cast<int>(opts.rootRank);
  const bool isRoot = root == rank_;
  return submit(
      {OpType::REDUCE, "reduce", "baguanet:reduce", opts.timeout, opts.asyncOp}, tensors, tensors,
      [=, reduction = Reduction(opts.reduceOp, tensor)](Communicator& communicator, Deadline deadline) {
        // The others' values stay as they are.
        at::Tensor plain = reduction.scaled(toPlain(tensor));
        communicator.reduce(plain.mutable_data_ptr(), reduction.count(tensor), reduction.dtype, reduction.op,
                            root, deadline);
        if (isRoot && !plain.is_same(tensor)) {
          tensor.copy_(plain);
        }
      });
}

Result BaguanetBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const ::c10d::AllgatherOptions& opts) {
  const at::Tensor input = onlyOne(inputs);
  const Tensors list = onlyList(outputs, true, size_);
  checkAlike(list, input);
  return submit({OpType::ALLGATHER, "all_gather", "baguanet:all_gather", opts.timeout, opts.asyncOp}, inputs,
                list, [=](Communicator& communicator, Deadline deadline) {
                  Row row(list);
                  const at::Tensor in = toPlain(input);
                  communicator.allGather(in.const_data_ptr(), row.data(), in.nbytes(), deadline);
                  row.write();
                });
}

Result BaguanetBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                        const ::c10d::AllgatherOptions& opts) {
  checkWhole(output, input, size_);
  return submit({OpType::_ALLGATHER_BASE, "all_gather_into_tensor", "baguanet:all_gather_into_tensor",
                 opts.timeout, opts.asyncOp},
                {input}, {output}, [output, input](Communicator& communicator, Deadline deadline) {
                  gatherWhole(communicator, output, input, deadline);
                });
}

Result BaguanetBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                            const ::c10d::AllgatherOptions& opts) {
  // A list of tensors per rank; gathered as one row per tensor.
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(size_), "baguanet: found ", outputs.size(),
                    " lists of outputs; want one for each of ", size_, " ranks");
  checkTensors(inputs);
  std::vector<Tensors> rows(inputs.size());
  Tensors flat;
  for (const Tensors& list : outputs) {
    checkPairs(list, inputs);
    for (size_t i = 0; i < inputs.size(); ++i) {
      checkAlike({list[i]}, inputs[i]);
      rows[i].push_back(list[i]);
      flat.push_back(list[i]);
    }
  }
  return submit({OpType::ALLGATHER_COALESCED, "all_gather_coalesced", "baguanet:all_gather_coalesced",
                 opts.timeout, opts.asyncOp},
                inputs, flat, [rows, ins = inputs](Communicator& communicator, Deadline deadline) {
                  for (size_t i = 0; i < ins.size(); ++i) {
                    Row row(rows[i]);
                    const at::Tensor in = toPlain(ins[i]);
                    communicator.allGather(in.const_data_ptr(), row.data(), in.nbytes(), deadline);
                    row.write();
                  }
                });
}

Result BaguanetBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const ::c10d::AllgatherOptions& opts) {
  checkPairs(outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    checkWhole(outputs[i], inputs[i], size_);
  }
  return submit({OpType::COALESCED, "all_gather_into_tensor_coalesced",
                 "baguanet:all_gather_into_tensor_coalesced", opts.timeout, opts.asyncOp},
                inputs, outputs,
                [outs = outputs, ins = inputs](Communicator& communicator, Deadline deadline) {
                  for (size_t i = 0; i < ins.size(); ++i) {
                    gatherWhole(communicator, outs[i], ins[i], deadline);
                  }
                });
}

Result BaguanetBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                               const ::c10d::GatherOptions& opts) {
  const at::Tensor input = onlyOne(inputs);
  checkRank(opts.rootRank, "root");
  const int root = static_cast<int>(opts.rootRank);
  const Tensors list = onlyList(outputs, root == rank_, size_);
  checkAlike(list, input);
  return submit({OpType::GATHER, "gather", "baguanet:gather", opts.timeout, opts.asyncOp}, inputs, list,
                [=](Communicator& communicator, Deadline deadline) {
                  Row row(list);
                  const at::Tensor in = toPlain(input);
                  communicator.gather(in.const_data_ptr(), row.data(), in.nbytes(), root, deadline);
                  row.write();
                });
}

Result BaguanetBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                const ::c10d::ScatterOptions& opts) {
  const at::Tensor output = onlyOne(outputs);
  checkRank(opts.rootRank, "root");
  const int root = static_cast<int>(opts.rootRank);
  const Tensors list = onlyList(inputs, root == rank_, size_);
  checkAlike(list, output);
  return submit({OpType::SCATTER, "scatter", "baguanet:scatter", opts.timeout, opts.asyncOp}, list, outputs,
                [=](Communicator& communicator, Deadline deadline) {
                  Row row(list);
                  row.read();
                  Output out(output);
                  communicator.scatter(row.data(), out.data(), output.nbytes(), root, deadline);
                  out.write();
                });
}

Result BaguanetBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                       const ::c10d::ReduceScatterOptions& opts) {
  const at::Tensor output = onlyOne(outputs);
  const Tensors list = onlyList(inputs, true, size_);
  checkAlike(list, output);
  return submit(
      {OpType::REDUCE_SCATTER, "reduce_scatter", "baguanet:reduce_scatter", opts.timeout, opts.asyncOp}, list,
      outputs,
      [=, reduction = Reduction(opts.reduceOp, output)](Communicator& communicator, Deadline deadline) {
        Tensors scaled;
        for (const at::Tensor& tensor : list) {
          scaled.push_back(reduction.scaled(tensor));
        }
        Row row(std::move(scaled));
        row.read();
        Output out(output);
        communicator.reduceScatter(row.data(), out.data(), reduction.count(output), reduction.dtype,
                                   reduction.op, deadline);
        out.write();
      });
}

Result BaguanetBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                             const ::c10d::ReduceScatterOptions& opts) {
  checkWhole(input, output, size_);
  return submit({OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", "baguanet:reduce_scatter_tensor",
                 opts.timeout, opts.asyncOp},
                {input}, {output},
                [output, input, reduction = Reduction(opts.reduceOp, output)](Communicator& communicator,
                                                                              Deadline deadline) {
                  scatterReduced(communicator, output, input, reduction, deadline);
                });
}

Result BaguanetBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const ::c10d::ReduceScatterOptions& opts) {
  checkPairs(outputs, inputs);
  std::vector<Reduction> reductions;
  for (size_t i = 0; i < inputs.size(); ++i) {
    checkWhole(inputs[i], outputs[i], size_);
    reductions.emplace_back(opts.reduceOp, outputs[i]);
  }
  return submit({OpType::COALESCED, "reduce_scatter_tensor_coalesced",
                 "baguanet:reduce_scatter_tensor_coalesced", opts.timeout, opts.asyncOp},
                inputs, outputs,
                [outs = outputs, ins = inputs, reductions](Communicator& communicator, Deadline deadline) {
                  for (size_t i = 0; i < ins.size(); ++i) {
                    scatterReduced(communicator, outs[i], ins[i], reductions[i], deadline);
                  }
                });
}

Result BaguanetBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                      std::vector<int64_t>& outputSplits, std::vector<int64_t>& inputSplits,
                                      const ::c10d::AllToAllOptions& opts) {
  checkTensors({output, input});
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), "baguanet: found tensors of ",
                    output.scalar_type(), " and ", input.scalar_type(), "; want one type");
  auto sends = splitBytes(input, inputSplits, size_, "an input");
  auto receives = splitBytes(output, outputSplits, size_, "an output");
  return submit(
      {OpType::ALLTOALL_BASE, "all_to_all_single", "baguanet:all_to_all_single", opts.timeout, opts.asyncOp},
      {input}, {output},
      [output, input, sends = std::move(sends), receives = std::move(receives)](Communicator& communicator,
                                                                                Deadline deadline) {
        Output out(output);
        const at::Tensor in = toPlain(input);
        communicator.allToAllV(in.const_data_ptr(), sends, out.data(), receives, deadline);
        out.write();
      });
}

Result BaguanetBackend::alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) {
  const auto ranks = static_cast<size_t>(size_);
  TORCH_CHECK_VALUE(outputs.size() == ranks && inputs.size() == ranks, "baguanet: found ", outputs.size(),
                    " outputs and ", inputs.size(), " inputs; want one of each for each of ", size_,
                    " ranks");
  checkTensors(outputs);
  checkTensors(inputs);
  std::vector<size_t> sends;
  std::vector<size_t> receives;
  for (size_t rank = 0; rank < ranks; ++rank) {
    TORCH_CHECK_VALUE(outputs[rank].scalar_type() == inputs[0].scalar_type() &&
                          inputs[rank].scalar_type() == inputs[0].scalar_type(),
                      "baguanet: found tensors of several types; want one");
    sends.push_back(inputs[rank].nbytes());
    receives.push_back(outputs[rank].nbytes());
  }
  return submit({OpType::ALLTOALL, "all_to_all", "baguanet:all_to_all", opts.timeout, opts.asyncOp}, inputs,
                outputs,
                [outs = outputs, ins = inputs, sends = std::move(sends), receives = std::move(receives)](
                    Communicator& communicator, Deadline deadline) {
                  Row in(ins);
                  in.read();
                  Row out(outs);
                  communicator.allToAllV(in.data(), sends, out.data(), receives, deadline);
                  out.write();
                });
}

Result BaguanetBackend::barrier(const ::c10d::BarrierOptions& opts) {
  return submit({OpType::BARRIER, "barrier", "baguanet:barrier", opts.timeout, opts.asyncOp}, {}, {},
                [](Communicator& communicator, Deadline deadline) { communicator.barrier(deadline); });
}

void BaguanetBackend::monitoredBarrier(const ::c10d::BarrierOptions& opts, bool /*waitAllRanks*/) {
  submit({OpType::BARRIER, "monitored_barrier", "baguanet:monitored_barrier", opts.timeout, false}, {}, {},
         [](Communicator& communicator, Deadline deadline) { communicator.barrier(deadline); });
}

}  // namespace baguarun::backend
