// What torch holds of an operation of baguanet.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "c10d/driver.h"

namespace baguarun::backend {

// How errors name an operation.
struct Label {
  // As Python calls it ("all_reduce").
  const char* operation = "";
  // Which of the group's collectives it is, from 1 on; 0 for a message.
  uint64_t number = 0;
  // The other side of a message.
  std::optional<int> peer = std::nullopt;
};

// The exception for Python: c10::DistBackendError where the group is concerned, others as they are.
std::exception_ptr translate(const std::exception_ptr& error, const Label& label, const std::string& group);

// A collective of our own that was started, without torch's tensors and works. The group may end before it.
// Threads: any.
class Started {
 public:
  Started(std::shared_ptr<Driver> driver, std::shared_ptr<Collective> collective, const Label& label)
      : driver_(std::move(driver)), collective_(std::move(collective)), label_(label) {}

  Collective& collective() const noexcept { return *collective_; }
  // This process is a child of the one that started it, where it cannot end.
  bool isForked() const noexcept { return driver_->isForked(); }
  // Waits for the end. Throws what it failed with.
  void wait() const;

 private:
  std::shared_ptr<Driver> driver_;
  std::shared_ptr<Collective> collective_;
  Label label_;
};

// A started operation. wait() without a timeout is bounded by the operation's own, or the group's for a
// message. Threads: any.
class Work final : public ::c10d::Work {
 public:
  struct Parts {
    std::shared_ptr<Driver> driver;
    // One of the two.
    std::shared_ptr<Collective> collective;
    std::shared_ptr<Transfer> transfer;
    Label label;
    std::vector<at::Tensor> outputs;
    // Bound of wait() on a message.
    std::chrono::milliseconds timeout;
  };

  Work(int rank, ::c10d::OpType type, Parts parts, const char* title,
       const std::optional<std::vector<at::Tensor>>& inputs);
  // Where nobody waits for the end any more, by a future neither, the profiler is told of it now: it may be
  // gone when it comes.
  ~Work() override;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return parts_.outputs; }
  uint64_t getSequencenumber() const override { return parts_.label.number; }

  // Throws what the operation failed with. With a timeout of its own it throws when that has passed, and the
  // operation goes on. False: abort() was called on this message.
  bool wait(std::chrono::milliseconds timeout) override;

  // Breaks the group for a collective. Ends the waits for a message only: it cannot be called back, and its
  // buffer is kept until it is through or the group ends.
  void abort() override;

  // Completes with the output tensors, on the thread that ends the operation.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  Operation& operation() const;
  bool waitForEnd(std::chrono::milliseconds timeout);
  bool waitForMessage(std::chrono::milliseconds timeout);

  const Parts parts_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace baguarun::backend
