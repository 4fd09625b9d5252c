#include "c10d/operation.h"

#include <algorithm>
#include <utility>

namespace baguarun::backend {

namespace {

constexpr std::chrono::hours kForEver{24 * 365};

}  // namespace

Clock::time_point timeAfter(Clock::duration timeout) {
  return Clock::now() + std::min<Clock::duration>(timeout, kForEver);
}

bool Operation::isDone() const {
  const std::scoped_lock lock(mutex_);
  return done_;
}

std::exception_ptr Operation::error() const {
  const std::scoped_lock lock(mutex_);
  return error_;
}

bool Operation::waitUntil(Clock::time_point deadline) const {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline, [this] { return done_ || abandoned_; });
  return done_;
}

bool Operation::waitUntil(Clock::time_point deadline, Clock::duration look) const {
  const auto isOver = [this] { return done_ || abandoned_; };
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline, [&] { return isOver() || !attended_; });
  changed_.wait_until(lock, std::min(deadline, Clock::now() + look), isOver);
  return done_;
}

void Operation::attend(bool isAttended) {
  const std::scoped_lock lock(mutex_);
  attended_ = isAttended;
  if (!isAttended) {
    changed_.notify_all();
  }
}

void Operation::abandon() {
  const std::scoped_lock lock(mutex_);
  abandoned_ = true;
  changed_.notify_all();
}

bool Operation::isAbandoned() const {
  const std::scoped_lock lock(mutex_);
  return abandoned_;
}

void Operation::beforeDone(std::function<void()> last) {
  {
    const std::scoped_lock lock(mutex_);
    if (!done_) {
      last_ = std::move(last);
      return;
    }
  }
  last();
}

void Operation::callLast() {
  std::function<void()> last;
  {
    const std::scoped_lock lock(mutex_);
    last = std::exchange(last_, nullptr);
  }
  if (last) {
    last();
  }
}

void Operation::onDone(std::function<void()> then) {
  {
    const std::scoped_lock lock(mutex_);
    if (!done_) {
      then_.push_back(std::move(then));
      return;
    }
  }
  then();
}

std::vector<std::function<void()>> Operation::end(std::exception_ptr error) noexcept {
  error = close(std::move(error));
  std::unique_lock lock(mutex_);
  while (last_) {
    // Without the lock: it may look at the operation, and what it lets go of may want Python's lock, which
    // somebody who asks holds.
    lock.unlock();
    callLast();
    lock.lock();
  }
  done_ = true;
  error_ = std::move(error);
  changed_.notify_all();
  return std::exchange(then_, {});
}

std::exception_ptr Collective::close(std::exception_ptr error) noexcept {
  body_ = nullptr;
  return error;
}

bool Transfer::hasEnded() noexcept {
  try {
    return message_->isDone();
  } catch (const net::Error&) {
    // Kept: a message of a broken group may look as if it were still under way later.
    failure_ = std::current_exception();
    return true;
  }
}

std::exception_ptr Transfer::close(std::exception_ptr error) noexcept {
  error = error ? error : std::exchange(failure_, nullptr);
  try {
    if (!error) {
      source_ = message_->source();
      atEnd_();
    }
  } catch (const std::exception&) {
    error = std::current_exception();
  }
  start_ = nullptr;
  atEnd_ = nullptr;
  message_ = nullptr;
  return error;
}

}  // namespace baguarun::backend
