// Which parameters a backward gives gradients to, on this rank and on others.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <iterator>

#include "engine/engine.h"

namespace baguarun::engine {

Engine::Walk Engine::walk(const std::vector<at::Tensor>& outputs) const {
  using torch::autograd::Node;
  Walk result;
  std::vector<bool> reached(parameters_.size(), false);
  std::unordered_set<const Node*> seen;
  std::vector<Node*> stack;
  const auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) {
      stack.push_back(node);
    }
  };
  for (const at::Tensor& output : outputs) {
    if (output.requires_grad()) {
      const NodePtr start = torch::autograd::impl::gradient_edge(output).function;
      visit(start.get());
      // A parameter that is returned belongs to no forward.
      if (!output.is_leaf()) {
        result.starts.emplace_back(start);
      }
    }
  }
  while (!stack.empty()) {
    Node* node = stack.back();
    stack.pop_back();
    if (const auto found = indexOfAccumulator_.find(node); found != indexOfAccumulator_.end()) {
      reached[found->second] = true;
    }
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      visit(edge.function.get());
    }
  }
  for (size_t index = 0; index < parameters_.size(); ++index) {
    if (!reached[index]) {
      result.unused.push_back(index);
    }
  }
  return result;
}

// What none of the forwards reaches that this backward is of: one may serve several, and others may have been
// for nothing. Where the graph does not show it (a re-entrant backward), all that may still come, and at
// least the last one.
void Engine::chooseUnused() {
  const auto* const graph = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto isPart = [&](const WeakNodePtr& weak) {
    const NodePtr node = weak.lock();
    return graph != nullptr && node && graph->contains(node.get());
  };
  const auto isAlive = [](const WeakNodePtr& weak) { return !weak.expired(); };
  std::vector<const Walk*> chosen;
  const auto choose = [&](const auto& which) {
    for (const Walk& walk : walks_) {
      if (std::ranges::any_of(walk.starts, which)) {
        chosen.push_back(&walk);
      }
    }
  };
  choose(isPart);
  if (chosen.empty()) {
    choose(isAlive);
  }
  if (chosen.empty() && !walks_.empty()) {
    chosen.push_back(&walks_.back());
  }
  unused_.clear();
  for (const Walk* walk : chosen) {
    std::vector<size_t> common;
    std::ranges::set_intersection(unused_, walk->unused, std::back_inserter(common));
    unused_ = walk == chosen.front() ? walk->unused : std::move(common);
  }
}

// Learning ends with the outermost backward, which is the one that the outputs belong to.
void Engine::watchOutputs(const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) {
      continue;
    }
    output.register_hook([weak = weak_from_this()](const at::Tensor& /*gradient*/) {
      const std::shared_ptr<Engine> self = weak.lock();
      if (!self) {
        return;
      }
      const std::scoped_lock lock(self->mutex_);
      if (self->learning_ && !self->learningQueued_) {
        self->learningQueued_ = true;
        torch::autograd::Engine::get_default_engine().queue_callback([self] { self->endLearning(); });
      }
    });
  }
}

void Engine::endLearning() {
  const std::scoped_lock lock(mutex_);
  learningQueued_ = false;
  // The order of the last hooks, then whatever got none.
  std::vector<bool> listed(parameters_.size(), false);
  std::vector<size_t> reversed;
  for (auto index = observedOrder_.rbegin(); index != observedOrder_.rend(); ++index) {
    if (!listed[*index]) {
      listed[*index] = true;
      reversed.push_back(*index);
    }
  }
  observedOrder_.assign(reversed.rbegin(), reversed.rend());
  for (size_t index = 0; index < parameters_.size(); ++index) {
    parameters_[index].hooksPerRound = hookCounts_[index];
    if (!listed[index]) {
      observedOrder_.push_back(index);
      unused_.push_back(index);
    }
    markReady(index);
  }
  launchFullBuckets();
  finishRound();
  learning_ = false;
}

void Engine::launchUsed() {
  if (settings_.staticGraph) {
    // For good, also in a round in which a rank that uses a parameter has nothing to add.
    const auto parameters = static_cast<int64_t>(parameters_.size());
    at::Tensor used = usedHere_.narrow(0, 0, parameters);
    at::maximum_out(used, used, usedAnywhere_.narrow(0, 0, parameters).cpu());
  }
  usedAnywhere_.copy_(usedHere_);
  schedule_->launchFlags(usedAnywhere_, round_);
}

// A rank that had nothing to add in the first round learns later: until then others tell it what they use.
void Engine::adoptUsed() {
  if (someLearn_) {
    someLearn_ = usedAnywhere_.cpu().const_data_ptr<int32_t>()[parameters_.size()] != 0;
  }
}

// Parameters without a gradient here get the others' gradient, unless no rank has one.
void Engine::adoptUnstored() {
  if (unstored_.empty()) {
    return;
  }
  at::Tensor used;
  if (needsOutputs()) {
    used = usedAnywhere_.cpu();
  }
  for (const size_t index : unstored_) {
    if (!used.defined() || used.const_data_ptr<int32_t>()[index] != 0) {
      parameters_[index].tensor.mutable_grad() = give(parameters_[index]);
    } else {
      oweAgain(parameters_[index]);
    }
  }
}

// No rank has used the parameter, but some of what it owed has been sent, and nobody applies it. Not where by
// rail this rank owes for a part of it only; momentum, all of which travels each time, owes no numbers.
void Engine::oweAgain(const Parameter& parameter) {
  const at::Tensor& residual = parameter.residual.defined() ? parameter.residual : parameter.lowRank.residual;
  const bool owesPart = parameter.residual.defined() && parameter.operation.rails;
  if (!residual.defined() || owesPart || buckets_[parameter.bucket].momentum) {
    return;
  }
  const at::NoGradGuard noGrad;
  const at::Tensor sent =
      parameter.view.as_strided({parameter.view.numel()}, {1}).to(at::kFloat).view(residual.sizes());
  residual.add_(sent.masked_fill(sent.isfinite().all().logical_not(), 0.0),
                parameter.operation.average ? 1.0 : 1.0 / group_->getSize());
}

}  // namespace baguarun::engine
