// Scatter-reduce-gather in shared memory. Included by host_operation.cpp only.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "engine/errors.h"
#include "engine/host_operation.h"
#include "engine/plan.h"

namespace baguarun::engine {

// Scatter-reduce-gather among the processes of one host: each rank reads its chunk of all buckets and writes
// the result into all of them. Nobody else touches that chunk meanwhile: a rank writes gradients only after
// all of the last round has been reduced, and a chunk is read only after all ranks' gradients have arrived.
class SharedExchange final : public HostOperation {
 public:
  SharedExchange(const Group& group, const Bucket& bucket, std::shared_ptr<SharedArea> area,
                 std::chrono::milliseconds timeout)
      : area_(std::move(area)),
        timeout_(timeout),
        rank_(static_cast<size_t>(group->getRank())),
        size_(static_cast<size_t>(group->getSize())),
        bucket_(bucket.index),
        wire_(bucket.operation.wire),
        scale_(bucket.operation.average ? 1.0F / static_cast<float>(size_) : 1.0F),
        elementSize_(bucket.flat.element_size()),
        layout_(static_cast<size_t>(bucket.flat.numel()), size_) {}

  void begin(uint32_t round) override {
    round_ = round;
    area_->post(Milestone::kArrived, bucket_, round);
  }

  bool beginsAtOnce() const override { return true; }

  void reduce() override {
    const size_t numElements = layout_.numElements(rank_);
    if (numElements > 0) {
      for (size_t step = 1; step < size_; ++step) {
        await(Milestone::kArrived, (rank_ + step) % size_, "waiting for the contribution of");
      }
    }
    // A block at a time, so that the sum is still in the cache when it is written to the others.
    for (size_t done = 0; done < numElements; done += kBlockElements) {
      reduceBlock(layout_.begin(rank_) + done, std::min(kBlockElements, numElements - done));
    }
    area_->post(Milestone::kReduced, bucket_, round_);
  }

  void complete() override {
    for (size_t step = 1; step < size_; ++step) {
      const size_t peer = (rank_ + step) % size_;
      if (layout_.numElements(peer) > 0) {
        await(Milestone::kReduced, peer, "waiting for the result of");
      }
    }
  }

  void abort() override { area_->abort(); }

  uint64_t bytesPerRound() const override {
    // As over a network: what the others read of this rank's bucket, and what it writes into theirs.
    const size_t own = layout_.numElements(rank_);
    return (layout_.begin(size_) - own + own * (size_ - 1)) * elementSize_;
  }

 private:
  static constexpr size_t kBlockElements = 4096;

  void await(Milestone milestone, size_t peer, const char* verb) {
    try {
      area_->wait(milestone, bucket_, round_, peer, timeout_);
    } catch (const std::runtime_error& error) {
      throw CommunicationFailure(std::string(verb) + " rank " + std::to_string(peer) + ": " + error.what());
    }
  }

  void reduceBlock(size_t first, size_t numElements) {
    sources_.clear();
    for (size_t peer = 0; peer < size_; ++peer) {
      sources_.push_back(area_->bucket(peer, bucket_) + first * elementSize_);
    }
    std::byte* own = area_->bucket(rank_, bucket_) + first * elementSize_;
    codec::reduceEncode({codec::Device::cpu, nullptr}, wire_, sources_.data(), size_, scale_, numElements,
                        own);
    for (size_t step = 1; step < size_; ++step) {
      std::memcpy(area_->bucket((rank_ + step) % size_, bucket_) + first * elementSize_, own,
                  numElements * elementSize_);
    }
  }

  const std::shared_ptr<SharedArea> area_;
  const std::chrono::milliseconds timeout_;
  const size_t rank_;
  const size_t size_;
  const size_t bucket_;
  const codec::Wire wire_;
  const float scale_;
  const size_t elementSize_;
  const ChunkLayout layout_;
  uint32_t round_ = 0;
  std::vector<const void*> sources_;
};

}  // namespace baguarun::engine
