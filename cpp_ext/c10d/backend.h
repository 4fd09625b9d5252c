// `baguanet` for torch: a c10d backend for CPU tensors over net::Communicator.
//
// Collectives run in the order of the calls, which must be the same on all ranks. One that is synchronous and
// finds nothing under way runs on the calling thread; others on the group's progress thread. Tensors need not
// be contiguous: those that are not, and lists of tensors that do not lie one behind the other, go through a
// copy. Reductions know the types and operations of net/reduce.h; complex numbers and unsigned integers
// where pairs of floats and signed integers give the same bits. What only moves knows every type.
//
// Failures that concern the group are c10::DistBackendError naming the operation and the rank to blame, and
// final: destroy the group and make another with a fresh store prefix. Wrong arguments are ValueErrors of the
// caller's alone.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "c10d/driver.h"
#include "c10d/work.h"

namespace baguarun::backend {

// Threads: any; the order of the collectives is that of the calls.
class BaguanetBackend final : public ::c10d::Backend {
 public:
  static constexpr const char* kName = "baguanet";
  using Tensors = std::vector<at::Tensor>;
  using Result = c10::intrusive_ptr<::c10d::Work>;

  struct Options final : ::c10d::Backend::Options {
    Options(std::chrono::milliseconds timeout, std::string group, std::vector<uint64_t> globalRanks,
            size_t arenaBytes);

    // Room for allocateTensor(), the same on all ranks. Costs memory when it is allocated and used.
    const size_t arenaBytes;
  };

  // Joins the others through `store`, whose prefix must be fresh. Takes up to the timeout of the options, but
  // not less than five seconds. With `over`, a group of the same ranks, the store is not needed: it is a
  // collective of that group. Throws c10::DistBackendError.
  BaguanetBackend(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size,
                  c10::intrusive_ptr<Options> options, const c10::intrusive_ptr<BaguanetBackend>& over);
  ~BaguanetBackend() override;

  const std::string getBackendName() const override { return kName; }
  c10::intrusive_ptr<::c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;

  Result broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) override;
  Result allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  Result allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  Result allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) override;
  Result reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) override;
  Result allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                   const ::c10d::AllgatherOptions& opts) override;
  Result _allgather_base(at::Tensor& output, at::Tensor& input,
                         const ::c10d::AllgatherOptions& opts) override;
  Result allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                             const ::c10d::AllgatherOptions& opts) override;
  Result allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                         const ::c10d::AllgatherOptions& opts) override;
  Result gather(std::vector<Tensors>& outputs, Tensors& inputs, const ::c10d::GatherOptions& opts) override;
  Result scatter(Tensors& outputs, std::vector<Tensors>& inputs, const ::c10d::ScatterOptions& opts) override;
  Result reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                        const ::c10d::ReduceScatterOptions& opts) override;
  Result _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                              const ::c10d::ReduceScatterOptions& opts) override;
  Result reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                         const ::c10d::ReduceScatterOptions& opts) override;
  Result alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& outputSplits,
                       std::vector<int64_t>& inputSplits, const ::c10d::AllToAllOptions& opts) override;
  Result alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) override;
  Result barrier(const ::c10d::BarrierOptions& opts) override;
  // A barrier: its errors name the ranks that did not come on every rank anyway.
  void monitoredBarrier(const ::c10d::BarrierOptions& opts, bool waitAllRanks) override;

  Result send(Tensors& tensors, int to, int tag) override;
  Result recv(Tensors& tensors, int from, int tag) override;
  Result recvAnysource(Tensors& tensors, int tag) override;

  // All ranks count their collectives from zero: there is nothing to agree on.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return number_; }

  // Tensors that ranks of one host reduce where they lie, without a copy: if all ranks all-reduce a tensor
  // that was made so. They may outlive the group. False where ranks are on several hosts or the arena is used
  // up.
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  // `size` elements, zeros. Throws c10::DistBackendError where there is no room.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  // Ends everything under way, and what is to come, on all ranks. From any thread.
  void abort() override;
  // Runs what was started to its end, and leaves.
  void shutdown() override;

  // A collective of our own that is no work of torch's: `body` runs when those started before have ended.
  // `name` is for errors, `allReduce` as in Collective. Throws c10::DistBackendError.
  Started start(const char* name, Collective::Body body,
                std::optional<Collective::AllReduce> allReduce = std::nullopt);

 private:
  using Deadline = Clock::time_point;

  // What the options of all operations have in common.
  struct Call {
    ::c10d::OpType type;
    const char* name;
    const char* title;
    std::chrono::milliseconds timeout;
    bool isAsync;
  };

  void connect(const c10::intrusive_ptr<::c10d::Store>& store, const std::shared_ptr<Driver>& over);
  void join(const net::BlobExchange& exchange, std::chrono::milliseconds timeout, bool beats);
  std::chrono::milliseconds timeoutOf(std::chrono::milliseconds asked) const;
  void checkRank(int64_t rank, const char* what) const;
  Result submit(const Call& call, const Tensors& inputs, const Tensors& outputs, Collective::Body body,
                std::optional<Collective::AllReduce> allReduce = std::nullopt);
  Result post(const Call& call, const Tensors& tensors, int peer, Transfer::Start start,
              std::function<void()> atEnd);
  Result receive(Tensors& tensors, int from, int tag, ::c10d::OpType type);

  const c10::intrusive_ptr<Options> options_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::shared_ptr<Driver> driver_;
  std::atomic<uint64_t> number_{0};
};

}  // namespace baguarun::backend
