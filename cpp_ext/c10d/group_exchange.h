// How the ranks of a new group learn of each other: through a group that they have already.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "c10d/driver.h"

namespace baguarun::backend {

// One rank's side of the exchanges that make a group: all-gathers of another group of the same ranks, which
// take microseconds where a store takes milliseconds, and notice a lost rank by themselves. Threads: one.
class GroupExchange {
 public:
  // Each exchange takes up to `timeout`.
  GroupExchange(std::shared_ptr<Driver> group, std::chrono::milliseconds timeout);

  // Every rank's blob, in rank order. A collective of the group. Throws net::Error.
  std::vector<std::string> exchange(const std::string& mine);

 private:
  const std::shared_ptr<Driver> group_;
  const std::chrono::milliseconds timeout_;
};

}  // namespace baguarun::backend
