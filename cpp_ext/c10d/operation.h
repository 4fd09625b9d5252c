// One collective or message of a group, from its start to its end. Knows neither torch nor a thread.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "net/communicator.h"

namespace baguarun::backend {

using net::Clock;

// Shared by whoever asked for it and the driver. Threads: any.
class Operation {
 public:
  virtual ~Operation() = default;

  bool isDone() const;

  // What it failed with; nullptr while it is under way or if it succeeded.
  std::exception_ptr error() const;

  // False: `deadline` has passed first, or it was abandoned.
  bool waitUntil(Clock::time_point deadline) const;
  // The same, but for no longer than `look` once nobody could tell that it has ended.
  bool waitUntil(Clock::time_point deadline, Clock::duration look) const;

  // Ends the waits for it, now and later. The operation itself goes on.
  void abandon();
  bool isAbandoned() const;

  // Calls `last` on the thread that ends it, before anybody can see that it has ended; at once if that has
  // been.
  void beforeDone(std::function<void()> last);
  // Calls that now, where it has not been: nobody waits for the end any more.
  void callLast();

  // Calls `then` after the end, on the thread that ends it; at once if that has been.
  void onDone(std::function<void()> then);

 private:
  friend class Driver;

  // Before the end: lets go of what is kept for the operation alone (buffers). Returns `error`, or what it
  // failed with itself.
  virtual std::exception_ptr close(std::exception_ptr error) noexcept = 0;
  // Whether somebody sees at once that it has ended; if not, who waits has to look.
  void attend(bool isAttended);
  // Ends it, and the waits for it. Returns what is to be called now.
  std::vector<std::function<void()>> end(std::exception_ptr error) noexcept;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool done_ = false;
  bool abandoned_ = false;
  bool attended_ = true;
  std::exception_ptr error_;
  std::function<void()> last_;
  std::vector<std::function<void()>> then_;
  // In one of the driver's lists; guarded by the driver's mutex.
  bool listed_ = false;
};

class Collective final : public Operation {
 public:
  using Body = std::function<void(net::Communicator&, Clock::time_point deadline)>;
  using AllReduce = net::Communicator::NextAllReduce;

  // `allReduce`: what `body` does, where that is all that it does and how is known before.
  Collective(Body body, Clock::duration timeout, std::optional<AllReduce> allReduce = std::nullopt)
      : body_(std::move(body)), timeout_(timeout), allReduce_(allReduce) {}

 private:
  friend class Driver;
  std::exception_ptr close(std::exception_ptr error) noexcept override;

  Body body_;
  const Clock::duration timeout_;
  const std::optional<AllReduce> allReduce_;
};

class Transfer final : public Operation {
 public:
  using Message = net::Communicator::Message;
  // Hands the message to the communicator.
  using Start = std::function<std::shared_ptr<Message>(net::Communicator&)>;

  // `atEnd` is called once the message is through, before the operation ends.
  Transfer(Start start, std::function<void()> atEnd) : start_(std::move(start)), atEnd_(std::move(atEnd)) {}

  // Who it came from, once it is done.
  int source() const noexcept { return source_; }

 private:
  friend class Driver;
  // Its buffer belongs to the caller again, or the communicator is broken.
  bool hasEnded() noexcept;
  std::exception_ptr close(std::exception_ptr error) noexcept override;

  Start start_;
  std::function<void()> atEnd_;
  std::shared_ptr<Message> message_;
  std::exception_ptr failure_;
  int source_ = net::Communicator::kAnySource;
};

// Adds without overflow: a timeout may be "for ever".
Clock::time_point timeAfter(Clock::duration timeout);

}  // namespace baguarun::backend
