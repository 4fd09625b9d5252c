#include "c10d/work.h"

#include <c10/util/Exception.h>

#include <utility>

#include "net/waits.h"

namespace baguarun::backend {

using std::chrono::milliseconds;

namespace {

// Who drives looks at whether the group has broken once per pass.
constexpr std::chrono::seconds kLongestEnd{1};

std::string describe(const Label& label, const std::string& group) {
  std::string text = "baguanet: " + std::string(label.operation);
  if (label.peer) {
    text +=
        *label.peer == net::Communicator::kAnySource ? " any rank" : " rank " + std::to_string(*label.peer);
  }
  if (label.number > 0) {
    text += " (collective " + std::to_string(label.number) + ")";
  }
  return text + " in group " + group;
}

std::exception_ptr makeError(const std::string& message) {
  return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, message));
}

}  // namespace

std::exception_ptr translate(const std::exception_ptr& error, const Label& label, const std::string& group) {
  if (!error) {
    return nullptr;
  }
  try {
    std::rethrow_exception(error);
  } catch (const net::Error& found) {
    return makeError(describe(label, group) + ": " + found.what());
  } catch (...) {
    return error;
  }
}

void Started::wait() const {
  try {
    const net::Waiting waiting;
    driver_->wait(*collective_, Clock::time_point::max());
  } catch (const net::Error&) {
    std::rethrow_exception(translate(std::current_exception(), label_, driver_->group()));
  }
  if (const auto error = collective_->error()) {
    std::rethrow_exception(translate(error, label_, driver_->group()));
  }
}

Work::Work(int rank, ::c10d::OpType type, Parts parts, const char* title,
           const std::optional<std::vector<at::Tensor>>& inputs)
    : ::c10d::Work(rank, type, title, inputs), parts_(std::move(parts)) {
  if (recordFunctionEndCallback_) {
    // Only the profiler wants it, and may be gone once somebody has waited for this.
    operation().beforeDone(std::move(recordFunctionEndCallback_));
  }
}

Work::~Work() {
  if (!future_) {
    operation().callLast();
  }
}

Operation& Work::operation() const {
  return parts_.collective ? static_cast<Operation&>(*parts_.collective) : *parts_.transfer;
}

bool Work::isCompleted() { return operation().isDone(); }

bool Work::isSuccess() const { return operation().isDone() && !operation().error(); }

std::exception_ptr Work::exception() const {
  return translate(operation().error(), parts_.label, parts_.driver->group());
}

int Work::sourceRank() const {
  TORCH_CHECK(parts_.transfer && operation().isDone(), "only a completed receive has a source rank");
  return parts_.transfer->source();
}

bool Work::wait(milliseconds timeout) {
  try {
    const bool isDone = waitForEnd(timeout);
    if (!isDone) {
      operation().callLast();
    }
    return isDone;
  } catch (...) {
    operation().callLast();
    throw;
  }
}

bool Work::waitForEnd(milliseconds timeout) {
  if (!operation().isDone()) {
    const net::Waiting waiting;
    if (parts_.transfer) {
      if (!waitForMessage(timeout)) {
        return false;
      }
    } else {
      const auto deadline = timeout > kNoTimeout ? timeAfter(timeout) : Clock::time_point::max();
      TORCH_CHECK_WITH(DistBackendError, parts_.driver->wait(*parts_.collective, deadline),
                       describe(parts_.label, parts_.driver->group()), ": not done after ", timeout.count(),
                       " ms");
    }
  }
  if (const auto error = exception()) {
    std::rethrow_exception(error);
  }
  return true;
}

bool Work::waitForMessage(milliseconds timeout) {
  const bool ownTimeout = timeout > kNoTimeout;
  const milliseconds bound = ownTimeout ? timeout : parts_.timeout;
  if (parts_.driver->wait(*parts_.transfer, timeAfter(bound))) {
    return true;
  }
  if (operation().isAbandoned()) {
    return false;
  }
  const std::string message = describe(parts_.label, parts_.driver->group()) + ": timed out after " +
                              std::to_string(bound.count()) + " ms";
  if (!ownTimeout) {
    // Nobody may write to the buffer any more once the caller has been told that it failed.
    parts_.driver->abort(message);
    operation().waitUntil(Clock::now() + kLongestEnd);
  }
  std::rethrow_exception(makeError(message));
}

void Work::abort() {
  if (parts_.transfer) {
    parts_.driver->abandon(*parts_.transfer);
  } else {
    parts_.driver->abort(describe(parts_.label, parts_.driver->group()) + " was aborted");
  }
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  const std::scoped_lock lock(mutex_);
  if (future_) {
    return future_;
  }
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  // Not the work itself: an operation that kept it would keep itself.
  operation().onDone([future = future_, &operation = operation(), outputs = parts_.outputs,
                      label = parts_.label, group = parts_.driver->group()] {
    if (const auto error = translate(operation.error(), label, group)) {
      future->setError(error);
    } else {
      future->markCompleted(c10::IValue(outputs));
    }
  });
  return future_;
}

}  // namespace baguarun::backend
