// Scratch memory that the buckets of one schedule use in turn.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/errors.h"

namespace baguarun::engine {

// Buffers for as many buckets as are under way at once, instead of one for each: whoever takes one when all
// are out waits until a bucket is done. Buckets take in the order in which all ranks launch them, so the
// oldest one under way always has its buffer, here and on every peer, and gets on.
//
// Threads: `want` before anything else; the others from anywhere.
class BufferPool {
 public:
  // For buffers that a bucket needs during so many stages of a schedule.
  explicit BufferPool(size_t stages) : stages_(stages) {}

  // Says that some bucket will take `bytes`.
  void want(size_t bytes) { bytesEach_ = std::max(bytesEach_, bytes); }

  // Bytes of zeros, or what the bucket before left; at least as many as any bucket wants. Throws
  // CommunicationFailure once aborted.
  at::Tensor take() {
    std::unique_lock lock(mutex_);
    freed_.wait(lock, [this] { return aborted_ || !free_.empty() || made_ < most(); });
    if (aborted_) {
      throw CommunicationFailure("aborted");
    }
    if (free_.empty()) {
      ++made_;
      return at::zeros({static_cast<int64_t>(bytesEach_)}, at::TensorOptions().dtype(at::kByte));
    }
    at::Tensor buffer = std::move(free_.back());
    free_.pop_back();
    return buffer;
  }

  void give(at::Tensor buffer) {
    {
      const std::scoped_lock lock(mutex_);
      free_.push_back(std::move(buffer));
    }
    freed_.notify_one();
  }

  // Ends the wait of take() with an error.
  void abort() {
    {
      const std::scoped_lock lock(mutex_);
      aborted_ = true;
    }
    freed_.notify_all();
  }

 private:
  // Ones so small that all together are no more than this are as many as that allows, since what holds up
  // small buckets is latency, which many at once share.
  static constexpr size_t kSmallBytes = size_t{8} << 20;

  size_t most() const { return std::max(stages_, kSmallBytes / std::max(bytesEach_, size_t{1})); }

  const size_t stages_;
  std::mutex mutex_;
  std::condition_variable freed_;
  size_t bytesEach_ = 0;
  size_t made_ = 0;
  std::vector<at::Tensor> free_;
  bool aborted_ = false;
};

// The scratch memory of one schedule. Buffers of a pool are all as large as the largest, so that what differs
// in size or in how long it is needed has pools of its own.
struct Buffers {
  // What an exchange encodes and whatever else it needs from its begin to its end.
  std::shared_ptr<BufferPool> exchanged = std::make_shared<BufferPool>(3);
  // What an exchange receives to sum up, from its begin until it is summed up.
  std::shared_ptr<BufferPool> received = std::make_shared<BufferPool>(2);
  // Exchange by rail: what the own node contributes, until it is summed up. One bucket does so at a time.
  std::shared_ptr<BufferPool> contributed = std::make_shared<BufferPool>(1);
  // Exchange by rail of 16-bit gradients: their sum in fp32, from its begin to its end.
  std::shared_ptr<BufferPool> summed = std::make_shared<BufferPool>(3);
};

}  // namespace baguarun::engine
