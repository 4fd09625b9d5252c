// Scatter-reduce-gather by direct messages. Included by host_operation.cpp only.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "codec/codec.h"
#include "engine/buffer_pool.h"
#include "engine/errors.h"
#include "engine/host_operation.h"
#include "engine/plan.h"
#include "engine/ranges.h"
#include "engine/transfers.h"

namespace baguarun::engine {

// Scatter-reduce-gather with one message per pair and stage. Plain gradients are sent from and received into
// the bucket itself; others are encoded on the way out and decoded on the way in, the result of this rank's
// own chunk included, so that all ranks hold the same bits.
//
// What a rank contributes to its own chunk goes nowhere. With error feedback it passes no codec, which would
// lose something of it for nothing. The rank owes nothing for it, and in that place has what the result
// lacks: as its own contribution, so that it stays with the parameter wherever that is summed up next. It is
// the sum that is encoded, for an average would owe in other units: who decodes it divides.
//
// Two rounds instead of the 2(n-1) of a ring, and the same bytes: each rank sends 2(n-1)/n of the bucket.
class PeerExchange final : public HostOperation {
 public:
  // `ranks`: those of the group that take part, this one among them. "Rank" means a place in it below.
  PeerExchange(const Group& group, const Bucket& bucket, const std::vector<int>& ranks,
               const Buffers& buffers)
      : group_(group),
        ranks_(ranks),
        rank_(placeOf(group->getRank(), ranks)),
        size_(ranks.size()),
        bucket_(bucket.index),
        format_(bucket.operation.format()),
        dtype_(codecType(bucket.flat.scalar_type())),
        plain_(isPlain(format_.wire, bucket.flat.scalar_type())),
        scale_(bucket.operation.average ? 1.0F / static_cast<float>(size_) : 1.0F),
        elementSize_(bucket.flat.element_size()),
        layout_(static_cast<size_t>(bucket.flat.numel()), size_),
        flat_(bucket.flat),
        coded_(buffers.exchanged),
        received_(buffers.received),
        residual_(bucket.residual) {
    for (Transfers* transfers : {&scatterSends_, &scatterReceives_, &gatherSends_, &gatherReceives_}) {
      transfers->nameRanks(ranks);
    }
    chunks_.resize(size_);
    contributions_.resize(size_);
    coded_->want(codedBytes());
    received_->want((size_ - 1) * alignedBytes(chunkBytes(rank_)));
  }

  void begin(uint32_t round) override {
    round_ = round;
    takeBuffers();
    for (Transfers* transfers : {&scatterSends_, &scatterReceives_, &gatherSends_, &gatherReceives_}) {
      transfers->clear();
    }
    // Receives first: a message whose receive is posted travels without asking.
    for (size_t step = 1; step < size_; ++step) {
      receive(contributions_, source(step), Stage::kScatter, scatterReceives_);
    }
    for (size_t step = 1; step < size_; ++step) {
      encodeChunk(target(step));
      pace(step, scatterReceives_, "receiving the contribution of");
      send(chunks_[target(step)], target(step), Stage::kScatter, scatterSends_);
    }
    // The result of a chunk arrives where the contribution to it lies: its owner sends it after having
    // received all of the contribution.
    for (size_t step = 1; step < size_; ++step) {
      receive(chunks_, source(step), Stage::kGather, gatherReceives_);
    }
    if (!residual_.defined()) {
      encodeChunk(rank_);
    }
  }

  void reduce() override {
    for (size_t i = 0; i < scatterReceives_.size(); ++i) {
      scatterReceives_.wait(i, "receiving the contribution of");
    }
    reduceChunk();
    received_->give(std::move(receivedBuffer_));
    for (size_t step = 1; step < size_; ++step) {
      pace(step, gatherReceives_, "receiving the result of");
      send(chunks_[rank_], target(step), Stage::kGather, gatherSends_);
    }
  }

  void complete() override {
    finite_ = !plain_ && dtype_ == codec::DType::f32;
    decodeChunk(rank_);
    for (size_t i = 0; i < gatherReceives_.size(); ++i) {
      gatherReceives_.wait(i, "receiving the result of");
      decodeChunk(gatherReceives_.peer(i));
    }
    for (size_t i = 0; i < scatterSends_.size(); ++i) {
      scatterSends_.wait(i, "sending a contribution to");
    }
    for (size_t i = 0; i < gatherSends_.size(); ++i) {
      gatherSends_.wait(i, "sending a result to");
    }
    coded_->give(std::move(codedBuffer_));
  }

  bool isKnownFinite() const override { return finite_; }

  void abort() override {
    coded_->abort();
    received_->abort();
    for (Transfers* transfers : {&scatterSends_, &scatterReceives_, &gatherSends_, &gatherReceives_}) {
      transfers->abort();
    }
  }

  uint64_t bytesPerRound() const override {
    uint64_t bytes = static_cast<uint64_t>(chunkBytes(rank_)) * (size_ - 1);
    for (size_t peer = 0; peer < size_; ++peer) {
      bytes += peer == rank_ ? 0 : static_cast<uint64_t>(chunkBytes(peer));
    }
    return bytes;
  }

 private:
  static constexpr codec::Exec kHost{codec::Device::cpu, nullptr};
  static constexpr size_t kPacedBytes = size_t{64} << 10;
  static constexpr size_t kMessagesAtOnce = 3;

  size_t chunkBytes(size_t rank) const {
    const size_t numElements = layout_.numElements(rank);
    return plain_ ? numElements * elementSize_ : codec::encodedBytes(format_, numElements);
  }

  // Of the gradients in a chunk.
  int64_t chunkElementBytes(size_t rank) const {
    return static_cast<int64_t>(layout_.numElements(rank) * elementSize_);
  }

  // Plain chunks lie in the bucket.
  size_t codedBytes() const {
    size_t bytes = 0;
    for (size_t peer = 0; peer < size_ && !plain_; ++peer) {
      bytes += alignedBytes(chunkBytes(peer));
    }
    return bytes;
  }

  void takeBuffers() {
    codedBuffer_ = coded_->take();
    receivedBuffer_ = received_->take();
    size_t used = 0;
    const auto slice = [&used](const at::Tensor& buffer, size_t bytes) {
      const at::Tensor found = buffer.narrow(0, static_cast<int64_t>(used), static_cast<int64_t>(bytes));
      used += alignedBytes(bytes);
      return found;
    };
    for (size_t peer = 0; peer < size_; ++peer) {
      chunks_[peer] = plain_ ? plainChunk(peer) : slice(codedBuffer_, chunkBytes(peer));
    }
    used = 0;
    sources_.clear();
    for (size_t peer = 0; peer < size_; ++peer) {
      contributions_[peer] = peer == rank_ ? chunks_[rank_] : slice(receivedBuffer_, chunkBytes(rank_));
      if (peer != rank_ || !residual_.defined()) {
        sources_.push_back(contributions_[peer].data_ptr());
      }
    }
  }

  at::Tensor plainChunk(size_t rank) const {
    return flat_.view(at::kByte).narrow(0, static_cast<int64_t>(layout_.begin(rank) * elementSize_),
                                        static_cast<int64_t>(chunkBytes(rank)));
  }

  void send(const at::Tensor& chunk, size_t peer, Stage stage, Transfers& transfers) {
    if (chunk.numel() == 0) {
      return;
    }
    std::vector<at::Tensor> tensors{chunk};
    markPosted();
    transfers.start("sending to", peer, [&] {
      return sendMessage(group_, tensors, ranks_[peer], messageTag(round_, bucket_, stage));
    });
  }

  void receive(const std::vector<at::Tensor>& into, size_t peer, Stage stage, Transfers& transfers) {
    if (into[peer].numel() == 0) {
      return;
    }
    std::vector<at::Tensor> tensors{into[peer]};
    transfers.start("receiving from", peer,
                    [&] { return group_->recv(tensors, ranks_[peer], messageTag(round_, bucket_, stage)); });
  }

  // In step s each rank sends to the one s places on and receives from the one s places back: every link
  // carries one message each way.
  size_t target(size_t step) const { return (rank_ + step) % size_; }
  size_t source(size_t step) const { return (rank_ + size_ - step) % size_; }

  // Before the send of `step`: waits for a message of some steps before, if messages are large. Many large
  // ones at once would overflow the queue in front of the receiver; with one at a time, whoever waits for a
  // slow one lets the line run empty, and all others in turn.
  void pace(size_t step, Transfers& receives, const char* verb) {
    if (step > kMessagesAtOnce && layout_.stride() * elementSize_ >= kPacedBytes) {
      receives.waitFor(source(step - kMessagesAtOnce), verb);
    }
  }

  char* place(size_t rank) const {
    return static_cast<char*>(flat_.data_ptr()) + layout_.begin(rank) * elementSize_;
  }

  float* owed(size_t rank) const { return residual_.data_ptr<float>() + layout_.begin(rank); }

  void encodeChunk(size_t rank) {
    const size_t numElements = layout_.numElements(rank);
    if (plain_ || numElements == 0) {
      return;
    }
    const Span span("encode", "codec", chunkElementBytes(rank));
    if (residual_.defined()) {
      codec::encodeWithResidual(kHost, format_, dtype_, place(rank), owed(rank), numElements,
                                chunks_[rank].data_ptr());
    } else {
      codec::encode(kHost, format_, dtype_, place(rank), numElements, chunks_[rank].data_ptr());
    }
  }

  void reduceChunk() {
    const size_t numElements = layout_.numElements(rank_);
    if (numElements == 0) {
      return;
    }
    const Span span("reduce and encode", "codec", chunkElementBytes(rank_));
    if (residual_.defined()) {
      codec::encodeSumWithResidual(kHost, format_, dtype_, place(rank_), sources_.data(), sources_.size(),
                                   owed(rank_), numElements, chunks_[rank_].data_ptr());
    } else {
      codec::reduceEncode(kHost, format_, sources_.data(), size_, scale_, numElements,
                          chunks_[rank_].data_ptr());
    }
  }

  void decodeChunk(size_t rank) {
    if (!plain_ && layout_.numElements(rank) > 0) {
      const Span span("decode", "codec", chunkElementBytes(rank));
      const void* const chunk = chunks_[rank].data_ptr();
      if (residual_.defined()) {
        codec::reduceDecode(kHost, format_, dtype_, &chunk, 1, scale_, layout_.numElements(rank),
                            place(rank));
      } else {
        codec::decode(kHost, format_, dtype_, chunk, layout_.numElements(rank), place(rank));
      }
      finite_ =
          finite_ && codec::headersAreFinite(format_, layout_.numElements(rank), chunks_[rank].data_ptr());
    }
  }

  const Group group_;
  const std::vector<int> ranks_;
  const size_t rank_;
  const size_t size_;
  const size_t bucket_;
  const codec::Format format_;
  const codec::DType dtype_;
  const bool plain_;
  const float scale_;
  const size_t elementSize_;
  const ChunkLayout layout_;
  const at::Tensor flat_;
  const std::shared_ptr<BufferPool> coded_;
  const std::shared_ptr<BufferPool> received_;
  const at::Tensor residual_;
  uint32_t round_ = 0;
  // What has been decoded in this round, by its headers.
  bool finite_ = false;
  // The pools', while a round is under way and until contributions are summed up.
  at::Tensor codedBuffer_;
  at::Tensor receivedBuffer_;
  // Chunk of rank p, as bytes: a slice of the bucket if plain, else of the buffer.
  std::vector<at::Tensor> chunks_;
  // What rank p contributes to the own chunk.
  std::vector<at::Tensor> contributions_;
  // Of them, those that are encoded: with error feedback all but this rank's own.
  std::vector<const void*> sources_;
  Transfers scatterSends_;
  Transfers scatterReceives_;
  Transfers gatherSends_;
  Transfers gatherReceives_;
};

}  // namespace baguarun::engine
