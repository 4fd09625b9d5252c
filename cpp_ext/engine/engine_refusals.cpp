// What the engine refuses or warns of, by the name of a parameter.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "engine/engine.h"
#include "engine/errors.h"

namespace baguarun::engine {

namespace {

// Parameters named in one message.
constexpr size_t kMaxNamed = 20;

std::string formText(const at::Tensor& tensor) {
  return std::string(c10::toString(tensor.scalar_type())) + " " + c10::str(tensor.sizes()) + " on " +
         tensor.device().str();
}

}  // namespace

// Moving a parameter to another type or device gives it a new accumulator, on which our hook is not.
void Engine::throwIfReplaced() const {
  for (size_t index = 0; index < parameters_.size(); ++index) {
    const Parameter& parameter = parameters_[index];
    if (torch::autograd::impl::try_get_grad_accumulator(parameter.tensor) != parameter.accumulator ||
        parameter.tensor.sizes() != parameter.view.sizes()) {
      throwChanged(index);
    }
  }
}

void Engine::throwChanged(size_t index) const {
  const Parameter& parameter = parameters_[index];
  throw UsageFailure("parameter " + describe(index) + " was " + formText(parameter.view) +
                     " when it was wrapped and has been changed since; it is " + formText(parameter.tensor) +
                     " now. Wrap the model again after changing it");
}

void Engine::throwIfMissing() {
  if (endedTasks_ < graphTasks_.size()) {
    return;
  }
  std::string names;
  size_t missing = 0;
  for (size_t index = 0; index < parameters_.size(); ++index) {
    if (!parameters_[index].ready && ++missing <= kMaxNamed) {
      names += (names.empty() ? "" : ", ") + describe(index);
    }
  }
  if (missing == 0) {
    return;
  }
  if (missing > kMaxNamed) {
    names += " and " + std::to_string(missing - kMaxNamed) + " more";
  }
  throw UsageFailure("the last backward pass gave no gradient to " + std::to_string(missing) + " of " +
                     std::to_string(parameters_.size()) + " parameters: " + names +
                     ". Every output of forward must take part in the loss; if some parameters are unused on "
                     "purpose, pass find_unused_parameters=True");
}

// After the round, without a forward in between. What has been set to None since is no concern of ours: it
// may be of the next step (a penalty), and is averaged with what that step's forward gives.
void Engine::onLateGradient(size_t index) {
  const at::Tensor& gradient = parameters_[index].tensor.grad();
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == lateTask_ || !gradient.defined() || !isAt(gradient, parameters_[index].view)) {
    return;
  }
  lateTask_ = task;
  // Only at its end does a backward show whether a node of another one has called it.
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), index] {
    if (const std::shared_ptr<Engine> self = weak.lock()) {
      const std::scoped_lock lock(self->mutex_);
      self->refuseLate(index);
    }
  });
}

void Engine::refuseLate(size_t index) {
  const NodePtr caller = torch::autograd::get_current_node();
  const auto isCaller = [&](const WeakNodePtr& known) { return known.lock() == caller; };
  if (caller && !callers_.empty() && std::ranges::none_of(callers_, isCaller)) {
    throwSecond(index);
  }
  if (!std::exchange(hasWarned_, true)) {
    TORCH_WARN(
        "parameter ", describe(index), " got a gradient in a further backward pass after the one whose ",
        "gradients were averaged, without a forward of the wrapped model in between: what it adds stays ",
        "on this rank, and replicas drift apart. Add up losses and call backward() once, or call the ",
        "wrapped model once for each backward pass");
  }
}

void Engine::throwSecond(size_t index) const {
  throw UsageFailure(
      "parameter " + describe(index) +
      " got a second gradient in one backward pass. Either it is used in several re-entrant "
      "checkpoints (use_reentrant=False or static_graph=True), or it takes part in the loss although "
      "the outputs of forward do not lead to it");
}

std::string Engine::describe(size_t index) const {
  return "'" + parameters_[index].name + "' (index " + std::to_string(index) + ")";
}

}  // namespace baguarun::engine
