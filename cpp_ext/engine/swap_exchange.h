// Exchange of few numbers in one message per pair. Included by rail_exchange.h only.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "engine/errors.h"
#include "engine/host_operation.h"
#include "engine/ranges.h"
#include "engine/transfers.h"

namespace baguarun::engine {

// Everybody sends all it has to all others, and sums up by itself: nobody waits for a second message, for n/2
// times the bytes. Sums are those of PeerExchange, in rank order and so the same bits on all ranks.
class SwapExchange final : public HostOperation {
 public:
  // The same on all ranks. At 100 Mbit/s this is 5 ms, where two messages take the wire's latency twice.
  static bool suits(const at::Tensor& numbers, size_t numRanks) {
    constexpr size_t kMostSentBytes = size_t{64} << 10;
    return (numRanks - 1) * numbers.nbytes() <= kMostSentBytes;
  }

  // `numbers` are fp32; they become the average over `ranks` of the group, of which this is one.
  SwapExchange(const Group& group, const at::Tensor& numbers, const std::vector<int>& ranks, size_t bucket)
      : group_(group),
        ranks_(ranks),
        rank_(placeOf(group->getRank(), ranks)),
        size_(ranks.size()),
        bucket_(bucket),
        numbers_(numbers) {
    sends_.nameRanks(ranks);
    receives_.nameRanks(ranks);
    for (size_t rank = 0; rank < size_; ++rank) {
      contributions_.push_back(at::empty_like(numbers));
      sources_.push_back(contributions_.back().data_ptr());
    }
  }

  void begin(uint32_t round) override {
    sends_.clear();
    receives_.clear();
    const int tag = messageTag(round, bucket_, Stage::kScatter);
    // Receives first: a message whose receive is posted travels without asking.
    for (size_t step = 1; step < size_; ++step) {
      const size_t peer = (rank_ + size_ - step) % size_;
      std::vector<at::Tensor> into{contributions_[peer]};
      receives_.start("receiving from", peer, [&] { return group_->recv(into, ranks_[peer], tag); });
    }
    // The average is written where the numbers are, maybe before all of them are sent.
    contributions_[rank_].copy_(numbers_);
    for (size_t step = 1; step < size_; ++step) {
      const size_t peer = (rank_ + step) % size_;
      std::vector<at::Tensor> mine{contributions_[rank_]};
      markPosted();
      sends_.start("sending to", peer, [&] { return sendMessage(group_, mine, ranks_[peer], tag); });
    }
  }

  void reduce() override {
    receives_.waitAll("receiving the contribution of");
    const Span span("reduce", "codec", static_cast<int64_t>(numbers_.nbytes()));
    codec::reduceDecode({codec::Device::cpu, nullptr}, codec::Wire::f32, codec::DType::f32, sources_.data(),
                        size_, 1.0F / static_cast<float>(size_), static_cast<size_t>(numbers_.numel()),
                        numbers_.data_ptr());
  }

  void complete() override { sends_.waitAll("sending a contribution to"); }

  void abort() override {
    sends_.abort();
    receives_.abort();
  }

  uint64_t bytesPerRound() const override { return (size_ - 1) * numbers_.nbytes(); }

 private:
  const Group group_;
  const std::vector<int> ranks_;
  // Among them.
  const size_t rank_;
  const size_t size_;
  const size_t bucket_;
  const at::Tensor numbers_;
  // By place among the ranks, this one's own included.
  std::vector<at::Tensor> contributions_;
  std::vector<const void*> sources_;
  Transfers sends_;
  Transfers receives_;
};

}  // namespace baguarun::engine
