#include "engine/engine.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>

#include "engine/errors.h"
#include "engine/host_operation.h"

namespace baguarun::engine {

namespace {

// Above this a copy is worth several threads, if torch has them.
constexpr size_t kParallelCopyBytes = size_t{1} << 20;

bool sameForm(const at::Tensor& left, const at::Tensor& right) {
  return left.scalar_type() == right.scalar_type() && left.sizes() == right.sizes() &&
         left.device() == right.device();
}

void copyOnHost(const at::Tensor& from, const at::Tensor& into) {
  const size_t bytes = into.nbytes();
  // Of complex numbers' gradients torch negates some when they are read.
  const bool asItIs = from.strides() == into.strides() && !from.is_neg() && !from.is_conj();
  if (asItIs && (bytes < kParallelCopyBytes || at::get_num_threads() == 1)) {
    std::memcpy(into.data_ptr(), from.data_ptr(), bytes);
  } else {
    into.copy_(from);
  }
}

}  // namespace

// Runs after the gradient of one parameter has been accumulated.
class Engine::ReadyHook final : public torch::autograd::FunctionPostHook {
 public:
  ReadyHook(Engine* engine, size_t index, const torch::autograd::Node& accumulator)
      : engine_(engine), index_(index), accumulator_(accumulator) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& /*inputs*/) override {
    const bool isShared = letAllTake();
    engine_->onGradient(index_, isShared);
    return outputs;
  }

 private:
  // Of several models with the same parameter each averages what all of them find in `grad`: the first hook
  // lets all take it, before any of them may launch. Returns whether there are others.
  bool letAllTake() const {
    const auto& hooks = accumulator_.post_hooks();
    if (hooks.size() == 1) {
      return false;
    }
    std::vector<const ReadyHook*> ours;
    for (const auto& hook : hooks) {
      if (const auto* our = dynamic_cast<const ReadyHook*>(hook.get())) {
        ours.push_back(our);
      }
    }
    const auto takesPart = [](const ReadyHook* hook) { return hook->engine_->takesPart(); };
    if (ours.front() == this && std::ranges::count_if(ours, takesPart) > 1) {
      for (const ReadyHook* our : ours) {
        our->engine_->take(our->index_);
      }
    }
    return ours.size() > 1;
  }

  // The engine removes its hooks when it goes.
  Engine* engine_;
  size_t index_;
  const torch::autograd::Node& accumulator_;
};

std::shared_ptr<Engine> Engine::create(std::vector<NamedParameter> parameters, Lanes lanes,
                                       EngineSettings settings) {
  std::shared_ptr<Engine> engine(new Engine(std::move(parameters), std::move(lanes), settings));
  engine->installHooks();
  return engine;
}

Engine::Engine(std::vector<NamedParameter> parameters, Lanes lanes, EngineSettings settings)
    : lanes_(std::move(lanes)),
      group_(lanes_.at(0)),
      settings_(settings),
      device_(parameters.at(0).tensor.device()),
      firstCompressedRound_(std::make_shared<std::atomic<uint32_t>>(0)),
      learning_(settings.staticGraph),
      someLearn_(settings.staticGraph) {
  for (NamedParameter& parameter : parameters) {
    Parameter& added = parameters_.emplace_back();
    added.name = std::move(parameter.name);
    added.tensor = std::move(parameter.tensor);
    added.operation = parameter.operation;
    if (added.operation.kind == OperationKind::kPowerSgd) {
      added.lowRank = makeLowRankMatrix(added.tensor, added.operation.matrixRank);
    }
  }
  usedHere_ = at::zeros({static_cast<int64_t>(parameters_.size()) + 1}, at::kInt);
  usedAnywhere_ = at::zeros_like(usedHere_, usedHere_.options().device(device_));
  hookCounts_.resize(parameters_.size());
  joinArena();
  // Gradients usually come in the reverse of the order in which layers were registered.
  std::vector<size_t> order(parameters_.size());
  std::iota(order.rbegin(), order.rend(), size_t{0});
  buildBuckets(order);
}

Engine::~Engine() { removeHooks(); }

void Engine::installHooks() {
  for (size_t index = 0; index < parameters_.size(); ++index) {
    Parameter& parameter = parameters_[index];
    parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.tensor);
    indexOfAccumulator_[parameter.accumulator.get()] = index;
    parameter.hookKey = parameter.accumulator->add_post_hook(
        std::make_unique<ReadyHook>(this, index, *parameter.accumulator));
  }
}

void Engine::removeHooks() {
  for (Parameter& parameter : parameters_) {
    if (parameter.hookKey != 0) {
      parameter.accumulator->del_post_hook(parameter.hookKey);
      parameter.hookKey = 0;
    }
  }
}

void Engine::settle() {
  const std::scoped_lock lock(mutex_);
  throwIfReplaced();
  if (running_) {
    throwIfMissing();
    // The backward pass raised: what it launched still ends, then all is as before it.
    schedule_->finish();
    // Where all buckets were launched others may have ended the round well, and await the order.
    if (nextBucket_ < buckets_.size() || learning_) {
      observedOrder_.clear();
    } else if (!orderAdopted_) {
      completeObservedOrder();
    }
    resetRound();
    armed_ = 0;
    consumed_ = true;
  }
}

bool Engine::inRound() {
  const std::scoped_lock lock(mutex_);
  return running_;
}

void Engine::beforeForward(bool communicates) {
  const std::scoped_lock lock(mutex_);
  if (communicates && !orderAdopted_ && observedOrder_.size() == parameters_.size()) {
    adoptObservedOrder();
  }
}

void Engine::afterForward(const std::vector<at::Tensor>& outputs) {
  const std::scoped_lock lock(mutex_);
  quiet_ = false;
  armed_ = consumed_ ? 1 : armed_ + 1;
  consumed_ = false;
  if (learning_) {
    watchOutputs(outputs);
  } else if (settings_.findUnused && !settings_.staticGraph) {
    std::erase_if(walks_, [](const Walk& walk) {
      return std::ranges::all_of(walk.starts, [](const WeakNodePtr& node) { return node.expired(); });
    });
    walks_.push_back(walk(outputs));
  }
}

void Engine::afterLocalForward() {
  const std::scoped_lock lock(mutex_);
  quiet_ = false;
  if (consumed_) {
    armed_ = 0;
  }
}

void Engine::takePart() {
  const std::scoped_lock lock(mutex_);
  throwIfRunning("take_part");
  quiet_ = false;
  armed_ = consumed_ ? 1 : armed_ + 1;
  consumed_ = false;
  beginRound();
  for (size_t index = 0; index < parameters_.size(); ++index) {
    if (!parameters_[index].ready) {
      markReady(index);
    }
  }
  usedHere_.mutable_data_ptr<int32_t>()[parameters_.size()] = learning_ ? 1 : 0;
  launchFullBuckets();
  finishRound();
}

bool Engine::needsOutputs() const { return settings_.findUnused || settings_.staticGraph; }

EngineStats Engine::stats() {
  const std::scoped_lock lock(mutex_);
  return stats_;
}

std::vector<std::vector<size_t>> Engine::plan() {
  const std::scoped_lock lock(mutex_);
  std::vector<std::vector<size_t>> plan;
  for (const Bucket& bucket : buckets_) {
    plan.push_back(bucket.parameters);
  }
  return plan;
}

void Engine::onGradient(size_t index, bool isShared) {
  const std::scoped_lock lock(mutex_);
  if (parameters_[index].tensor.grad().defined()) {
    usedHere_.mutable_data_ptr<int32_t>()[index] = 1;
  }
  if (armed_ == 0) {
    // What belongs to another model's round is that one's business.
    if (quiet_ && !isShared) {
      onLateGradient(index);
    }
    return;
  }
  if (!running_) {
    beginRound();
  }
  watchGraphTask();
  if (learning_) {
    ++hookCounts_[index];
    observedOrder_.push_back(index);
    return;
  }
  Parameter& parameter = parameters_[index];
  if (parameter.ready) {
    throwSecond(index);
  }
  if (--parameter.hooksLeft == 0) {
    if (!orderAdopted_) {
      observedOrder_.push_back(index);
    }
    markReady(index);
    launchFullBuckets();
    if (isLaunched()) {
      finishAfterBackward();
    }
  }
}

bool Engine::takesPart() {
  const std::scoped_lock lock(mutex_);
  return armed_ > 0;
}

// Before another engine may average the gradient of a parameter that both have; onGradient follows.
void Engine::take(size_t index) {
  const std::scoped_lock lock(mutex_);
  if (armed_ == 0) {
    return;
  }
  if (!running_) {
    beginRound();
  }
  watchGraphTask();
  Parameter& parameter = parameters_[index];
  if (parameter.ready || !parameter.tensor.grad().defined()) {
    return;
  }
  if (buckets_[parameter.bucket].momentum) {
    throw UsageFailure(
        "parameter " + describe(index) +
        " is shared with another wrapped model whose backward this is, too, and its momentum is "
        "averaged in place of its gradient; want one wrapped model that holds both");
  }
  place(parameter, index);
  parameter.taken = true;
}

void Engine::beginRound() {
  running_ = true;
  // Callbacks of earlier rounds carry another number and no longer count.
  ++round_;
  graphTasks_.clear();
  endedTasks_ = 0;
  callers_.clear();
  nextBucket_ = 0;
  for (Bucket& bucket : buckets_) {
    bucket.pending = bucket.parameters.size();
  }
  for (Parameter& parameter : parameters_) {
    parameter.ready = false;
    parameter.taken = false;
    parameter.hooksLeft = parameter.hooksPerRound;
  }
  if (!orderAdopted_ || learning_) {
    observedOrder_.clear();
  }
  if (learning_) {
    std::fill(hookCounts_.begin(), hookCounts_.end(), 0);
  } else {
    if (settings_.findUnused && !settings_.staticGraph) {
      chooseUnused();
    }
    for (const size_t index : unused_) {
      markReady(index);
    }
  }
}

// A backward that raises never runs its callbacks; that is how beforeForward tells it from one that left
// gradients out.
void Engine::watchGraphTask() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (graphTasks_.insert(task).second) {
    torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), round = round_] {
      if (const std::shared_ptr<Engine> self = weak.lock()) {
        const std::scoped_lock lock(self->mutex_);
        if (self->round_ == round) {
          ++self->endedTasks_;
          if (const NodePtr caller = torch::autograd::get_current_node()) {
            self->callers_.emplace_back(caller);
          }
        }
      }
    });
  }
}

void Engine::markReady(size_t index) {
  Parameter& parameter = parameters_[index];
  store(parameter, index);
  parameter.ready = true;
  --buckets_[parameter.bucket].pending;
}

void Engine::store(Parameter& parameter, size_t index) {
  if (!std::exchange(parameter.taken, false)) {
    place(parameter, index);
  }
  schedule_->stored(parameter.bucket);
}

// Moves the gradient into its place in the bucket and makes `grad` a view of it. Where momentum travels it is
// mixed on the way there, which goes through memory once less than afterwards.
void Engine::place(Parameter& parameter, size_t index) {
  at::Tensor& gradient = parameter.tensor.mutable_grad();
  const at::Tensor& view = parameter.view;
  const MomentumResult* const momentum = buckets_[parameter.bucket].momentum.get();
  const at::NoGradGuard noGrad;
  if (!gradient.defined()) {
    view.zero_();
    unstored_.push_back(index);
    if (momentum != nullptr) {
      mix(view, parameter.momentum, momentum->lossScale, view);
    }
  } else if (momentum != nullptr || !isAt(gradient, view)) {
    if (gradient.layout() != at::kStrided) {
      throw UsageFailure("parameter " + describe(index) +
                         " has a sparse gradient; want a dense one (sparse=False)");
    }
    if (!sameForm(parameter.tensor, view) || !sameForm(gradient, view)) {
      throwChanged(index);
    }
    if (momentum != nullptr) {
      mix(gradient, parameter.momentum, momentum->lossScale, view);
    } else {
      device_.is_cpu() ? copyOnHost(gradient, view)
                       : static_cast<void>(view.copy_(gradient, /*non_blocking=*/true));
    }
  }
  if (gradient.defined() && !gradient.is_same(give(parameter))) {
    gradient = parameter.given;
  }
}

// What `grad` is to be: made once, unless the script has moved it.
const at::Tensor& Engine::give(Parameter& parameter) {
  if (!isAt(parameter.given, parameter.view)) {
    parameter.given = parameter.view.detach();
  }
  return parameter.given;
}

void Engine::launchFullBuckets() {
  while (nextBucket_ < buckets_.size() && buckets_[nextBucket_].pending == 0) {
    schedule_->launch(nextBucket_, round_);
    ++nextBucket_;
  }
  if (isLaunched() && agreesOnUsed()) {
    launchUsed();
  }
}

void Engine::finishAfterBackward() {
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] {
    const std::scoped_lock lock(self->mutex_);
    self->finishRound();
  });
}

void Engine::finishRound() {
  const auto start = std::chrono::steady_clock::now();
  schedule_->finish();
  stats_.exposedWaitSeconds +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  stats_.steps += 1;
  stats_.bytesSent += schedule_->bytesPerRound();
  adoptUsed();
  adoptUnstored();
  if (!orderAdopted_) {
    completeObservedOrder();
  }
  resetRound();
  armed_ -= 1;
  consumed_ = true;
  quiet_ = true;
  if (!torch::autograd::get_current_node()) {
    callers_.clear();
  }
}

// With those that had no gradient here: the order is complete on all ranks, or on none, which have to agree
// whether to adopt it.
void Engine::completeObservedOrder() {
  std::vector<bool> listed(parameters_.size(), false);
  for (const size_t index : observedOrder_) {
    listed[index] = true;
  }
  std::ranges::copy_if(order_, std::back_inserter(observedOrder_),
                       [&](size_t index) { return !listed[index]; });
}

void Engine::resetRound() {
  running_ = false;
  unstored_.clear();
  learningQueued_ = false;
  const at::NoGradGuard noGrad;
  usedHere_.zero_();
}

}  // namespace baguarun::engine
