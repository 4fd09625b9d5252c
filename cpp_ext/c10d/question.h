// What the ranks of a group ask each other beside training.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include "c10d/backend.h"

namespace baguarun::backend {

// The largest that any rank says, of two numbers. A collective of the group, one at a time: without torch's
// tensors and works, all of which cost most of what a question does when nothing of it is in a cache.
//
// Threads: one.
class Question {
 public:
  using Numbers = std::array<int64_t, 2>;

  explicit Question(c10::intrusive_ptr<BaguanetBackend> group) : group_(std::move(group)) {}

  // Returns at once. Throws as the group's collectives.
  void ask(const Numbers& mine);
  // What was found, once all have asked. Throws as the group's collectives.
  Numbers answer();

 private:
  const c10::intrusive_ptr<BaguanetBackend> group_;
  std::shared_ptr<Numbers> numbers_;
  std::optional<Started> started_;
};

}  // namespace baguarun::backend
