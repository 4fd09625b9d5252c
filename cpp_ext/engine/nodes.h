// Nodes of the graph of autograd, which torch 2.13 counts in another kind of pointer than older ones may.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

namespace baguarun::engine {

using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

template <typename Strong>
struct WeakFor;
template <typename T>
struct WeakFor<std::shared_ptr<T>> {
  using Pointer = std::weak_ptr<T>;
};
template <typename T>
struct WeakFor<c10::intrusive_ptr<T>> {
  using Pointer = c10::weak_intrusive_ptr<T>;
};
using WeakNodePtr = WeakFor<NodePtr>::Pointer;

}  // namespace baguarun::engine
