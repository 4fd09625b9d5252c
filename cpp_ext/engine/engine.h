// The gradient engine: hooks on AccumulateGrad nodes, flat buckets, operations in one fixed order on every
// rank.
//
// A round is one backward pass whose gradients are communicated:
//   settle         raises what is left to raise of the last round
//   beforeForward  adopts the observed order of gradients, once
//   afterForward   the next backward is a round
//   backward       each hook stores a gradient in its bucket; full buckets are launched in order; at the end
//                  the caller waits for all of them
// Without afterForward (no_sync) hooks leave the gradients alone.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine/bucket.h"
#include "engine/nodes.h"
#include "engine/plan.h"
#include "engine/schedule.h"

namespace baguarun::engine {

struct EngineSettings {
  PlanLimits limits{};
  // Walk the graph after each forward, so that parameters without a gradient do not hold up their bucket.
  bool findUnused = false;
  // The graph is the same in every step: learn from the first round which parameters get gradients, and how
  // often.
  bool staticGraph = false;
  // Memory to ask the group for, in which ranks of one host reduce buckets where they lie; 0: none. Must hold
  // all gradients of 16 and 32 bits that are sent as they are, each rounded up to kBucketAlignBytes.
  size_t arenaBytes = 0;
};

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
  OperationSpec operation;
};

struct EngineStats {
  uint64_t steps = 0;
  uint64_t bytesSent = 0;
  size_t buckets = 0;
  double exposedWaitSeconds = 0;
};

// What a checkpoint keeps of an engine, on each rank.
struct EngineState {
  // A permutation of the parameters, in which they are packed into buckets, and whether it is for good.
  std::vector<size_t> order;
  bool orderAdopted = false;
  // With error feedback, fp32: by parameter what this rank owes, empty for a parameter without.
  std::vector<at::Tensor> residuals;
  // As `residuals`, low-rank compression's too, at the last commit; empty if it is not kept.
  std::vector<at::Tensor> committed;
};

// Threads: backward may run on any thread; hooks are serialised by a mutex. All else is called by one thread,
// outside of backward, without the GIL.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // `parameters` are on one device and are the same on every rank of `lanes`, at least two. An accelerator's
  // use the first lane only.
  static std::shared_ptr<Engine> create(std::vector<NamedParameter> parameters, Lanes lanes,
                                        EngineSettings settings);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Of its group.
  int rank() const { return group_->getRank(); }
  int worldSize() const { return group_->getSize(); }

  // Before a forward: throws UsageFailure if the last round ended with gradients missing,
  // CommunicationFailure if an operation failed.
  void settle();
  // Between the first gradient of a backward and its end; after one that raised until settle().
  bool inRound();
  // After settle(). Collective, once, if the backward to come `communicates`: adopts the observed order.
  void beforeForward(bool communicates);
  // Makes the next backward a round. `outputs` are needed with findUnused or staticGraph only.
  void afterForward(const std::vector<at::Tensor>& outputs);
  // After a forward under no_sync: the next backward is not a round.
  void afterLocalForward();
  // After settle() and beforeForward(): a round without a backward, for a rank that has nothing to add. It
  // learns nothing of the graph; gradients end as they do for parameters that are not used here.
  void takePart();

  // Between rounds, on all ranks after the same one: does something else with each parameter's gradient from
  // now on. What contributions owe stays where the new operation has error feedback, too; what results owe is
  // given up.
  void setOperations(const std::vector<OperationSpec>& operations);
  // Between rounds. By parameter, or empty for none: what to mix into its gradient before it is sent. Begins
  // and ends with the next setOperations; in between it replaces what is mixed, from the next round on.
  void setMomentum(const std::vector<Momentum>& momentum, double lossScale);
  // True: all gradients that there are are momentum of the last round, as it came, and no number is infinite
  // or NaN. False: one may be; on accelerators always.
  bool momentumIsKnownFinite();

  // Between rounds; copies.
  EngineState state();
  // Between rounds, collective: takes rank 0's order (an empty one stands for the present), and this rank's
  // residuals if there are any.
  void loadState(const EngineState& state);
  // At any time outside of backward, for the end of a group some of whose ranks may be dead: gives up the
  // round under way without waiting for anybody, provided the group has been aborted; removes the hooks;
  // drops the parameters' gradients, which lie in the buckets. The last call; what load_state of another
  // engine may go on from.
  EngineState close();
  // Between rounds: all that the last one sent has arrived, here. The host waits for it; throws
  // CommunicationFailure, also where there is an `interruption` then: aborted operations of an accelerator
  // end as others do. With `again` what was found of this round before stands, whatever was interrupted
  // since.
  void requireComplete(const std::function<std::optional<std::string>()>& interruption, bool again);
  // Between rounds: whether to keep what error feedback owed at the last commit, or at the last load_state
  // that brought it. Until then, what is owed now.
  void keepCommitted(bool keep);
  void commit();
  // Between rounds: owe again what was owed then.
  void rollBack();
  // kPowerSgd. Between rounds, on all ranks alike: compress after `rounds` more rounds.
  void compressAfter(uint32_t rounds);
  // kPowerSgd. Between rounds: residual and vectors (low_rank.h) of each compressed parameter, in the order
  // of the parameters; what the engine itself reads and writes.
  std::vector<std::pair<at::Tensor, at::Tensor>> lowRankTensors();

  bool needsOutputs() const;
  EngineStats stats();
  // Parameter indices, bucket by bucket, in launch order.
  std::vector<std::vector<size_t>> plan();

 private:
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    OperationSpec operation;
    // Strong: the tensor itself holds its accumulator weakly.
    NodePtr accumulator;
    uintptr_t hookKey = 0;
    // Place in the plan.
    size_t bucket = 0;
    at::Tensor view;
    // The same place for the script, which may move its tensor away (`p.grad.data = ...`).
    at::Tensor given;
    // With error feedback: its part of the bucket's residual, one-dimensional, in the order of memory.
    at::Tensor residual;
    // What was owed at the last commit, on its way from one plan or engine to the next; else undefined.
    at::Tensor committed;
    Momentum momentum;
    LowRankMatrix lowRank;
    // In this round: hooks still to come, and whether the gradient has been stored.
    uint32_t hooksLeft = 1;
    bool ready = false;
    // Is in its place already, since another engine has the same parameter.
    bool taken = false;
    // With staticGraph: hooks in every round; 0 for a parameter without a gradient.
    uint32_t hooksPerRound = 1;
  };

  // From the outputs of one forward through its graph.
  struct Walk {
    std::vector<WeakNodePtr> starts;
    // In ascending order.
    std::vector<size_t> unused;
  };

  class ReadyHook;

  Engine(std::vector<NamedParameter> parameters, Lanes lanes, EngineSettings settings);
  void installHooks();
  void removeHooks();
  void buildBuckets(std::vector<size_t> order);
  void joinArena();
  void placeBuckets();
  void placeResiduals(Bucket& bucket);
  void keepResiduals(Bucket& bucket);
  void gatherCommitted();
  void placeLowRank(Bucket& bucket);
  void moveGradientsOut();
  void adoptObservedOrder();
  EngineState copyState() const;
  // Also tells whether rank 0 has adopted it for good.
  std::vector<size_t> orderOfRankZero(const std::vector<size_t>& mine);
  void throwIfRunning(const char* what) const;
  void throwIfMissing();
  void throwIfReplaced() const;
  [[noreturn]] void throwChanged(size_t index) const;
  Walk walk(const std::vector<at::Tensor>& outputs) const;
  void chooseUnused();
  void watchOutputs(const std::vector<at::Tensor>& outputs);

  void onGradient(size_t index, bool isShared);
  void onLateGradient(size_t index);
  void refuseLate(size_t index);
  bool takesPart();
  void take(size_t index);
  void beginRound();
  void watchGraphTask();
  void markReady(size_t index);
  void store(Parameter& parameter, size_t index);
  void place(Parameter& parameter, size_t index);
  static const at::Tensor& give(Parameter& parameter);
  void launchFullBuckets();
  void launchUsed();
  bool isLaunched() const { return nextBucket_ == buckets_.size(); }
  void finishAfterBackward();
  void endLearning();
  void adoptUsed();
  void finishRound();
  void completeObservedOrder();
  void adoptUnstored();
  void oweAgain(const Parameter& parameter);
  void resetRound();
  bool agreesOnUsed() const { return settings_.staticGraph ? someLearn_ : settings_.findUnused; }
  [[noreturn]] void throwSecond(size_t index) const;
  std::string describe(size_t index) const;

  std::vector<Parameter> parameters_;
  const Lanes lanes_;
  const Group group_;
  const EngineSettings settings_;
  const c10::Device device_;
  std::unordered_map<const torch::autograd::Node*, size_t> indexOfAccumulator_;

  // Guards what follows.
  std::mutex mutex_;
  std::vector<Bucket> buckets_;
  // Bytes that the ranks of one host share, on all of them or undefined on all. Every plan uses it anew.
  at::Tensor arena_;
  // Read by the schedule.
  const std::shared_ptr<std::atomic<uint32_t>> firstCompressedRound_;
  std::unique_ptr<Schedule> schedule_;
  // Forwards whose backward is still to be a round.
  uint32_t armed_ = 0;
  // A round has finished since the last forward.
  bool consumed_ = true;
  // Since the last round has ended there was no forward of any kind.
  bool quiet_ = false;
  bool hasWarned_ = false;
  // The last backward that came then.
  int lateTask_ = -1;
  bool running_ = false;
  uint32_t round_ = 0;
  // Of which all is known to have arrived.
  std::optional<uint32_t> completeRound_;
  size_t nextBucket_ = 0;
  // Backward passes (a re-entrant one counts by itself) that took part in this round, and how many of them
  // ended well.
  std::unordered_set<int> graphTasks_;
  size_t endedTasks_ = 0;
  // The nodes that called those that were re-entrant; empty if the round ended with one that was not.
  std::vector<WeakNodePtr> callers_;
  // In which parameters are packed into buckets. Kept, not read from the buckets: what becomes of it must not
  // depend on how they were packed before, on a rank that has come later.
  std::vector<size_t> order_;
  // Parameters in the order of their gradients in the first round.
  std::vector<size_t> observedOrder_;
  bool orderAdopted_ = false;
  bool keepsCommitted_ = false;
  double lossScale_ = 1;
  // Parameters that get no gradient here in this round, or with staticGraph in any.
  std::vector<size_t> unused_;
  // With findUnused: of each forward whose graph may still be there.
  std::vector<Walk> walks_;
  // Ready in this round without a gradient here.
  std::vector<size_t> unstored_;
  // int32 per parameter, on the host: 1 if it got a gradient here since the last round. Behind them: 1 if
  // this rank learns on after the round.
  at::Tensor usedHere_;
  // The same on the group's device, after agreement: on any rank.
  at::Tensor usedAnywhere_;
  // The first round with staticGraph: hooks are counted, nothing is launched before the backward has ended.
  bool learning_;
  bool learningQueued_ = false;
  // With staticGraph, on all ranks alike: some rank is still learning.
  bool someLearn_;
  std::vector<uint32_t> hookCounts_;
  EngineStats stats_;
};

}  // namespace baguarun::engine
