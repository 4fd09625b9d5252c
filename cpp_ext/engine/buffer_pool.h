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
  // For buffers that a bucket needs during so many stages of a schedule. Ones so small that all together are
  // no more than `smallBytes` are as many as that allows, since what holds up small buckets is latency, which
  // many at once share.
  BufferPool(size_t stages, size_t smallBytes) : stages_(stages), smallBytes_(smallBytes) {}

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
  size_t most() const { return std::max(stages_, smallBytes_ / std::max(bytesEach_, size_t{1})); }

  const size_t stages_;
  const size_t smallBytes_;
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
  std::shared_ptr<BufferPool> exchanged = pool(3, 10);
  // What an exchange receives to sum up, from its begin until it is summed up: on a slow wire, where all have
  // begun long before the first one ends, a fraction of that time.
  std::shared_ptr<BufferPool> received = pool(2, 6);
  // Exchange by rail: what the own node contributes, until it is summed up. One bucket does so at a time.
  std::shared_ptr<BufferPool> contributed = pool(1, 8);
  // Exchange by rail of 16-bit gradients: their sum in fp32, from its begin to its end.
  std::shared_ptr<BufferPool> summed = pool(3, 8);

 private:
  static std::shared_ptr<BufferPool> pool(size_t stages, size_t smallMiB) {
    return std::make_shared<BufferPool>(stages, smallMiB << 20);
  }
};

}  // namespace baguarun::engine
