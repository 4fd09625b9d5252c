#include "c10d/live_groups.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "net/error.h"

namespace baguarun::backend {

LiveGroups& LiveGroups::ofProcess() {
  static auto* const all = new LiveGroups();
  return *all;
}

template <typename Kind>
void LiveGroups::forgetDead(std::vector<Kind>& all) {
  std::erase_if(all, [](const auto& weak) { return weak.expired(); });
}

void LiveGroups::add(const std::shared_ptr<Driver>& driver) {
  {
    const std::scoped_lock lock(mutex_);
    forgetDead(drivers_);
    drivers_.push_back(driver);
  }
  // Whoever interrupted before it was listed could not reach it.
  if (const auto why = interruption()) {
    driver->abort(*why);
  }
}

void LiveGroups::add(const c10::intrusive_ptr<::c10d::Backend>& backend) {
  const std::scoped_lock lock(mutex_);
  forgetDead(others_);
  others_.emplace_back(backend);
}

bool LiveGroups::hasOthers() const {
  const std::scoped_lock lock(mutex_);
  return std::ranges::any_of(others_, [](const auto& backend) { return !backend.expired(); });
}

void LiveGroups::interrupt(uint64_t generation, const std::string& reason) {
  {
    const std::scoped_lock lock(mutex_);
    if (generation <= entered_) {
      return;
    }
    interrupted_ = std::max(interrupted_, generation);
    reason_ = reason;
  }
  abortAll(reason);
}

void LiveGroups::enter(uint64_t generation) {
  const std::scoped_lock lock(mutex_);
  entered_ = std::max(entered_, generation);
}

std::optional<std::string> LiveGroups::interruption() const {
  const std::scoped_lock lock(mutex_);
  return interrupted_ > entered_ ? std::optional(reason_) : std::nullopt;
}

void LiveGroups::throwIfInterrupted() const {
  if (const auto why = interruption()) {
    throw net::Error(net::Fault::kAborted, "", *why);
  }
}

void LiveGroups::boundMeetings(std::optional<std::chrono::milliseconds> bound) {
  const std::scoped_lock lock(mutex_);
  meetingBound_ = bound;
}

std::chrono::milliseconds LiveGroups::boundedMeeting(std::chrono::milliseconds timeout) const {
  const std::scoped_lock lock(mutex_);
  return meetingBound_ ? std::min(timeout, *meetingBound_) : timeout;
}

void LiveGroups::abortAll(const std::string& reason) {
  std::vector<std::weak_ptr<Driver>> drivers;
  std::vector<c10::weak_intrusive_ptr<::c10d::Backend>> others;
  {
    const std::scoped_lock lock(mutex_);
    drivers = drivers_;
    others = others_;
  }
  for (const auto& weak : drivers) {
    if (const auto driver = weak.lock()) {
      driver->abort(reason);
    }
  }
  for (const auto& weak : others) {
    if (auto backend = weak.lock()) {
      std::thread([backend = std::move(backend)] { backend->abort(); }).detach();
    }
  }
}

void LiveGroups::leaveAll() {
  std::vector<std::weak_ptr<Driver>> drivers;
  {
    const std::scoped_lock lock(mutex_);
    drivers = std::exchange(drivers_, {});
  }
  for (const auto& weak : drivers) {
    if (const auto driver = weak.lock()) {
      driver->shutdown(/*drain=*/false);
    }
  }
}

}  // namespace baguarun::backend
