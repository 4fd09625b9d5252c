// The groups of this process that are alive, for orders that concern all of them: to end, because the process
// does, or because the job's membership has changed and somebody whom they need may be dead.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "c10d/driver.h"

namespace baguarun::backend {

// Threads: any.
class LiveGroups {
 public:
  // One for the process, never destroyed: who exits does not wait for those who still make groups.
  static LiveGroups& ofProcess();

  void add(const std::shared_ptr<Driver>& driver);
  // Another kind of backend (NCCL), to be aborted with ours. Its abort() may take its time, on a thread of
  // its own.
  void add(const c10::intrusive_ptr<::c10d::Backend>& backend);

  // Whether there are groups of another kind.
  bool hasOthers() const;

  // Aborts all groups, and has those in the making give up, until enter() is called for the generation that
  // is coming, or a later one. Does nothing if that has been.
  void interrupt(uint64_t generation, const std::string& reason);
  // The groups to come belong to `generation`.
  void enter(uint64_t generation);
  // Why no group can be made now.
  std::optional<std::string> interruption() const;
  // Throws net::Error(kAborted).
  void throwIfInterrupted() const;

  // Ranks of groups to come wait for each other no longer than this; nothing lifts the bound.
  void boundMeetings(std::optional<std::chrono::milliseconds> bound);
  std::chrono::milliseconds boundedMeeting(std::chrono::milliseconds timeout) const;

  // Aborts what is there. From any thread.
  void abortAll(const std::string& reason);
  // Has all groups leave, whatever is under way.
  void leaveAll();

 private:
  template <typename Kind>
  static void forgetDead(std::vector<Kind>& all);

  mutable std::mutex mutex_;
  // Below: guarded by the mutex.
  std::vector<std::weak_ptr<Driver>> drivers_;
  std::vector<c10::weak_intrusive_ptr<::c10d::Backend>> others_;
  uint64_t entered_ = 0;
  uint64_t interrupted_ = 0;
  std::string reason_;
  std::optional<std::chrono::milliseconds> meetingBound_;
};

}  // namespace baguarun::backend
