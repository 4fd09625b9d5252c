// Exchange in three levels: inside the node, between nodes by rail, inside the node again. Included by
// host_operation.cpp only.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "codec/codec.h"
#include "engine/buffer_pool.h"
#include "engine/errors.h"
#include "engine/host_operation.h"
#include "engine/peer_exchange.h"
#include "engine/plan.h"
#include "engine/rails.h"
#include "engine/ranges.h"
#include "engine/ring_exchange.h"
#include "engine/shard_parts.h"
#include "engine/swap_exchange.h"
#include "engine/transfers.h"

namespace baguarun::engine {

// The exchange of a bucket among `ranks` of the group that suits its size.
inline std::unique_ptr<HostOperation> makeExchange(const Group& group, const Bucket& bucket,
                                                   const std::vector<int>& ranks, const Buffers& buffers) {
  if (RingExchange::suits(bucket, ranks.size())) {
    return std::make_unique<RingExchange>(group, bucket, ranks, buffers.exchanged);
  }
  return std::make_unique<PeerExchange>(group, bucket, ranks, buffers);
}

// As makeExchange, the average of fp32 numbers as they are: few of them in one message per pair.
inline std::unique_ptr<HostOperation> makeAverage(const Group& group, const Bucket& bucket,
                                                  const std::vector<int>& ranks, const Buffers& buffers) {
  if (SwapExchange::suits(bucket.flat, ranks.size())) {
    return std::make_unique<SwapExchange>(group, bucket.flat, ranks, bucket.index);
  }
  return makeExchange(group, bucket, ranks, buffers);
}

// Every rank gives each owner of its node that owner's shard, as it is; the owner sums in fp32, exchanges the
// sum with the owners of the same shard on the other nodes, in whatever form the bucket's wire has, and gives
// the result back to its node. So only what leaves the node is encoded, and a node sends as much as one rank
// would, over all of its rails at once.
//
// All messages go between pairs of ranks of one group: inside the node for the first and the last level, to
// other nodes for the one between, so messages of different levels cannot meet.
class RailExchange final : public HostOperation {
 public:
  // `makeBetween` makes the exchange among the owners of a shard.
  RailExchange(const Group& group, const Bucket& bucket, const Buffers& buffers,
               decltype(makeExchange)& makeBetween = makeExchange)
      : group_(group),
        rails_(bucket.operation.rails),
        place_(placeOf(group->getRank(), rails_->node)),
        bucket_(bucket.index),
        dtype_(codecType(bucket.flat.scalar_type())),
        elementSize_(bucket.flat.element_size()),
        // Nodes average their sums: with this scale the result is the average over ranks, however many each
        // node has.
        scale_(bucket.operation.average
                   ? static_cast<float>(rails_->numNodes) / static_cast<float>(rails_->numRanks)
                   : 1.0F),
        layout_(static_cast<size_t>(bucket.flat.numel()), rails_->numRails),
        buffers_(buffers) {
    for (Transfers* transfers : all()) {
      transfers->nameRanks(rails_->node);
    }
    divide(bucket, makeBetween);
  }

  void begin(uint32_t round) override {
    round_ = round;
    for (Transfers* transfers : all()) {
      transfers->clear();
    }
    takeBuffers();
    for (size_t part = 0; part < ShardParts::kAtOnce; ++part) {
      receivePart(part);
    }
    for (const size_t owner : peers()) {
      const at::Tensor theirs = shard(owner);
      const ShardParts parts(theirs.nbytes());
      for (size_t part = 0; part < parts.count(); ++part) {
        send(parts.slice(theirs, part), owner, Stage::kScatter, scatterSends_);
      }
    }
    // A shard's result arrives where the contribution to it lies: its owner sends it after having received
    // all of the contribution.
    for (const size_t owner : peers()) {
      receive(shard(owner), owner, Stage::kGather, gatherReceives_);
    }
    if (between_) {
      sumUp();
      between_->begin(round);
    }
  }

  void reduce() override {
    if (between_) {
      between_->reduce();
    }
  }

  void complete() override {
    if (between_) {
      between_->complete();
      narrow();
      giveSum();
      for (const size_t peer : peers()) {
        send(shards_[place_], peer, Stage::kGather, gatherSends_);
      }
    }
    gatherReceives_.waitAll("receiving the result of");
    scatterSends_.waitAll("sending a contribution to");
    gatherSends_.waitAll("sending a result to");
  }

  void abort() override {
    buffers_.contributed->abort();
    buffers_.summed->abort();
    for (Transfers* transfers : all()) {
      transfers->abort();
    }
    if (between_) {
      between_->abort();
    }
  }

  uint64_t bytesPerRound() const override {
    uint64_t bytes = between_ ? between_->bytesPerRound() : 0;
    for (const size_t peer : peers()) {
      bytes += static_cast<uint64_t>(shard(peer).numel());
      bytes += between_ ? static_cast<uint64_t>(shards_[place_].numel()) : 0;
    }
    return bytes;
  }

 private:
  static constexpr codec::Exec kHost{codec::Device::cpu, nullptr};

  bool narrows() const { return dtype_ != codec::DType::f32; }

  void divide(const Bucket& bucket, decltype(makeExchange)& makeBetween) {
    const at::Tensor flatBytes = bucket.flat.view(at::kByte);
    const auto elementSize = static_cast<int64_t>(elementSize_);
    for (size_t rail = 0; rail < rails_->numRails; ++rail) {
      shards_.push_back(flatBytes.narrow(0, static_cast<int64_t>(layout_.begin(rail)) * elementSize,
                                         static_cast<int64_t>(layout_.numElements(rail)) * elementSize));
    }
    if (rails_->rail.empty() || layout_.numElements(place_) == 0) {
      return;
    }
    parts_ = std::make_unique<ShardParts>(shards_[place_].nbytes());
    sources_.resize(rails_->node.size());
    buffers_.contributed->want(peers().size() * parts_->roomBytes());
    const auto numElements = static_cast<int64_t>(layout_.numElements(place_));
    if (narrows()) {
      sum_ = at::empty({numElements}, bucket.flat.options().dtype(at::kFloat));
      buffers_.summed->want(sum_.nbytes());
    } else {
      sum_ = bucket.flat.narrow(0, static_cast<int64_t>(layout_.begin(place_)), numElements);
    }
    Bucket between;
    between.index = bucket.index;
    between.label = bucket.label;
    between.bytes = sum_.nbytes();
    between.flat = sum_;
    between.operation = bucket.operation;
    between.operation.rails = nullptr;
    if (bucket.residual.defined()) {
      between.residual = bucket.residual.narrow(0, static_cast<int64_t>(layout_.begin(place_)), numElements);
    }
    between_ = makeBetween(group_, between, rails_->rail, buffers_);
    if (narrows()) {
      sum_.set_();
    }
  }

  void takeBuffers() {
    if (!between_) {
      return;
    }
    buffer_ = buffers_.contributed->take();
    if (narrows()) {
      // The exchange between nodes has the same tensor, so it finds the numbers there, too.
      sumBuffer_ = buffers_.summed->take();
      sum_.set_(sumBuffer_.storage(), 0, {static_cast<int64_t>(layout_.numElements(place_))});
    }
  }

  void giveSum() {
    if (narrows()) {
      sum_.set_();
      buffers_.summed->give(std::move(sumBuffer_));
    }
  }

  // Nothing where there is no such part.
  void receivePart(size_t part) {
    for (size_t i = 0; between_ && part < parts_->count() && i < peers().size(); ++i) {
      receive(contribution(i, part), peers()[i], Stage::kScatter, scatterReceives_);
    }
  }

  // What the i-th of peers() gives to a part of the own shard.
  at::Tensor contribution(size_t i, size_t part) const {
    return buffer_.narrow(0, static_cast<int64_t>(i * parts_->roomBytes() + parts_->placeOf(part)),
                          static_cast<int64_t>(parts_->bytes(part)));
  }

  void sumUp() {
    const std::vector<size_t> others = peers();
    auto* sum = static_cast<float*>(sum_.data_ptr());
    for (size_t part = 0; part < parts_->count(); ++part) {
      sources_[place_] = parts_->slice(shards_[place_], part).data_ptr();
      for (size_t i = 0; i < others.size(); ++i) {
        scatterReceives_.wait(part * others.size() + i, "receiving the contribution of");
        sources_[others[i]] = contribution(i, part).data_ptr();
      }
      const size_t numElements = parts_->bytes(part) / elementSize_;
      {
        const Span span("reduce", "codec", static_cast<int64_t>(parts_->bytes(part)));
        codec::reduceDecode(kHost, plainWire(dtype_), codec::DType::f32, sources_.data(), sources_.size(),
                            scale_, numElements, sum);
      }
      sum += numElements;
      receivePart(part + ShardParts::kAtOnce);
    }
    buffers_.contributed->give(std::move(buffer_));
  }

  void narrow() {
    if (narrows()) {
      const Span span("encode", "codec", shards_[place_].numel());
      codec::encode(kHost, plainWire(dtype_), codec::DType::f32, sum_.data_ptr(), layout_.numElements(place_),
                    shards_[place_].data_ptr());
    }
  }

  // The other places of this node, the next one first, so that not all begin with the same.
  std::vector<size_t> peers() const {
    std::vector<size_t> others;
    for (size_t step = 1; step < rails_->node.size(); ++step) {
      others.push_back((place_ + step) % rails_->node.size());
    }
    return others;
  }

  // The shard that the rank at `place` owns; nothing where it owns none.
  at::Tensor shard(size_t place) const {
    return place < shards_.size() ? shards_[place] : shards_.front().narrow(0, 0, 0);
  }

  void send(const at::Tensor& bytes, size_t place, Stage stage, Transfers& transfers) {
    if (bytes.numel() > 0) {
      std::vector<at::Tensor> tensors{bytes};
      markPosted();
      transfers.start("sending to", place, [&] {
        return sendMessage(group_, tensors, rails_->node[place], messageTag(round_, bucket_, stage));
      });
    }
  }

  void receive(const at::Tensor& into, size_t place, Stage stage, Transfers& transfers) {
    if (into.numel() > 0) {
      std::vector<at::Tensor> tensors{into};
      transfers.start("receiving from", place, [&] {
        return group_->recv(tensors, rails_->node[place], messageTag(round_, bucket_, stage));
      });
    }
  }

  std::array<Transfers*, 4> all() {
    return {&scatterSends_, &scatterReceives_, &gatherSends_, &gatherReceives_};
  }

  const Group group_;
  const std::shared_ptr<const Rails> rails_;
  // Of this rank in its node.
  const size_t place_;
  const size_t bucket_;
  const codec::DType dtype_;
  const size_t elementSize_;
  const float scale_;
  const ChunkLayout layout_;
  const Buffers buffers_;
  uint32_t round_ = 0;
  // The pools', while contributions arrive, the rooms of peers() one behind the other, and while the sum is
  // needed.
  at::Tensor buffer_;
  at::Tensor sumBuffer_;
  // Slices of the bucket, as bytes.
  std::vector<at::Tensor> shards_;
  // How the own shard comes; absent where this rank owns nothing.
  std::unique_ptr<ShardParts> parts_;
  // By place: what it contributes to a part of the own shard.
  std::vector<const void*> sources_;
  // The own shard in fp32: the bucket's slice, or for 16-bit gradients a buffer, while there is one.
  at::Tensor sum_;
  // Absent where this rank owns nothing.
  std::unique_ptr<HostOperation> between_;
  Transfers scatterSends_;
  Transfers scatterReceives_;
  Transfers gatherSends_;
  Transfers gatherReceives_;
};

}  // namespace baguarun::engine
