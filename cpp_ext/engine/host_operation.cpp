#include "engine/host_operation.h"

#include <mutex>
#include <utility>

#include "engine/errors.h"
#include "engine/plan.h"

namespace baguarun::engine {

namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

// Message tags are 31 bits: round (12), bucket (18), stage (1). The round keeps a message that a failed round
// left behind from being taken for one of a later round.
constexpr uint32_t kRoundMask = 0xfff;
constexpr size_t kMaxBuckets = size_t{1} << 18;

enum class Stage : uint32_t { kScatter = 0, kGather = 1 };

int messageTag(uint32_t round, size_t bucket, Stage stage) {
  return static_cast<int>(((round & kRoundMask) << 19) | (static_cast<uint32_t>(bucket) << 1) |
                          static_cast<uint32_t>(stage));
}

// Pending transfers; abort() may come from another thread while one waits.
class Transfers {
 public:
  void add(Work work, size_t peer) {
    const std::scoped_lock lock(mutex_);
    if (aborted_) {
      throw CommunicationFailure("aborted");
    }
    pending_.push_back({std::move(work), peer});
  }

  // Waits for the transfer at `position` and names the peer if it fails.
  void wait(size_t position, const char* verb) {
    Entry entry;
    {
      const std::scoped_lock lock(mutex_);
      entry = pending_[position];
    }
    bool completed = false;
    try {
      completed = entry.work->wait();
    } catch (const std::exception& error) {
      throw CommunicationFailure(std::string(verb) + " rank " + std::to_string(entry.peer) + ": " +
                                 error.what());
    }
    if (!completed) {
      throw CommunicationFailure(std::string(verb) + " rank " + std::to_string(entry.peer) + ": aborted");
    }
  }

  size_t size() const { return pending_.size(); }

  size_t peer(size_t position) const { return pending_[position].peer; }

  void clear() {
    const std::scoped_lock lock(mutex_);
    pending_.clear();
  }

  void abort() {
    const std::scoped_lock lock(mutex_);
    aborted_ = true;
    for (const Entry& entry : pending_) {
      entry.work->abort();
    }
  }

 private:
  struct Entry {
    Work work;
    size_t peer = 0;
  };

  std::mutex mutex_;
  std::vector<Entry> pending_;
  bool aborted_ = false;
};

// Scatter-reduce-gather with one message per pair and stage. Plain gradients are sent from and received into
// the bucket itself; others are encoded on the way out and decoded on the way in, this rank's own chunk
// included, so that all ranks hold the same bits.
//
// Two rounds instead of the 2(n-1) of a ring, and the same bytes: each rank sends 2(n-1)/n of the bucket.
class PeerExchange final : public HostOperation {
 public:
  PeerExchange(const Group& group, const Bucket& bucket)
      : group_(group),
        rank_(static_cast<size_t>(group->getRank())),
        size_(static_cast<size_t>(group->getSize())),
        bucket_(bucket.index),
        wire_(bucket.operation.wire),
        dtype_(codecType(bucket.flat.scalar_type())),
        plain_(isPlain(wire_, bucket.flat.scalar_type())),
        scale_(bucket.operation.average ? 1.0F / static_cast<float>(size_) : 1.0F),
        elementSize_(bucket.flat.element_size()),
        layout_(static_cast<size_t>(bucket.flat.numel()), size_),
        flat_(bucket.flat) {
    allocate();
  }

  void begin(uint32_t round) override {
    round_ = round;
    for (Transfers* transfers : {&scatterSends_, &scatterReceives_, &gatherSends_, &gatherReceives_}) {
      transfers->clear();
    }
    // Receives first: a message whose receive is posted travels without asking.
    for (size_t step = 1; step < size_; ++step) {
      receive(contributions_, (rank_ + size_ - step) % size_, Stage::kScatter, scatterReceives_);
    }
    for (size_t step = 1; step < size_; ++step) {
      const size_t peer = (rank_ + step) % size_;
      encodeChunk(peer);
      send(chunks_[peer], peer, Stage::kScatter, scatterSends_);
      // The result of this chunk arrives where the contribution lies: its owner sends it after having
      // received all of the contribution.
      receive(chunks_, peer, Stage::kGather, gatherReceives_);
    }
    encodeChunk(rank_);
  }

  void reduce() override {
    if (layout_.numElements(rank_) == 0) {
      return;
    }
    for (size_t i = 0; i < scatterReceives_.size(); ++i) {
      scatterReceives_.wait(i, "receiving the contribution of");
    }
    codec::reduceEncode(kHost, wire_, sources_.data(), size_, scale_, layout_.numElements(rank_),
                        chunks_[rank_].data_ptr());
    for (size_t step = 1; step < size_; ++step) {
      send(chunks_[rank_], (rank_ + step) % size_, Stage::kGather, gatherSends_);
    }
  }

  void complete() override {
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
  }

  void abort() override {
    for (Transfers* transfers : {&scatterSends_, &scatterReceives_, &gatherSends_, &gatherReceives_}) {
      transfers->abort();
    }
  }

  uint64_t bytesPerRound() const override {
    uint64_t bytes = static_cast<uint64_t>(chunks_[rank_].numel()) * (size_ - 1);
    for (size_t peer = 0; peer < size_; ++peer) {
      bytes += peer == rank_ ? 0 : static_cast<uint64_t>(chunks_[peer].numel());
    }
    return bytes;
  }

 private:
  static constexpr codec::Exec kHost{codec::Device::cpu, nullptr};

  size_t chunkBytes(size_t rank) const {
    const size_t numElements = layout_.numElements(rank);
    return plain_ ? numElements * elementSize_ : codec::encodedBytes(wire_, numElements);
  }

  void allocate() {
    const auto bytes = at::TensorOptions().dtype(at::kByte);
    const at::Tensor flatBytes = plain_ ? flat_.view(at::kByte) : at::Tensor();
    for (size_t peer = 0; peer < size_; ++peer) {
      const auto length = static_cast<int64_t>(chunkBytes(peer));
      chunks_.push_back(
          plain_ ? flatBytes.narrow(0, static_cast<int64_t>(layout_.begin(peer) * elementSize_), length)
                 : at::zeros({length}, bytes));
    }
    const auto own = static_cast<int64_t>(chunkBytes(rank_));
    for (size_t peer = 0; peer < size_; ++peer) {
      contributions_.push_back(peer == rank_ ? chunks_[rank_] : at::zeros({own}, bytes));
      sources_.push_back(contributions_.back().data_ptr());
    }
  }

  void send(const at::Tensor& chunk, size_t peer, Stage stage, Transfers& transfers) {
    if (chunk.numel() == 0) {
      return;
    }
    std::vector<at::Tensor> tensors{chunk};
    try {
      transfers.add(group_->send(tensors, static_cast<int>(peer), messageTag(round_, bucket_, stage)), peer);
    } catch (const std::exception& error) {
      throw CommunicationFailure("sending to rank " + std::to_string(peer) + ": " + error.what());
    }
  }

  void receive(const std::vector<at::Tensor>& into, size_t peer, Stage stage, Transfers& transfers) {
    if (into[peer].numel() == 0) {
      return;
    }
    std::vector<at::Tensor> tensors{into[peer]};
    try {
      transfers.add(group_->recv(tensors, static_cast<int>(peer), messageTag(round_, bucket_, stage)), peer);
    } catch (const std::exception& error) {
      throw CommunicationFailure("receiving from rank " + std::to_string(peer) + ": " + error.what());
    }
  }

  char* place(size_t rank) const {
    return static_cast<char*>(flat_.data_ptr()) + layout_.begin(rank) * elementSize_;
  }

  void encodeChunk(size_t rank) {
    if (!plain_ && layout_.numElements(rank) > 0) {
      codec::encode(kHost, wire_, dtype_, place(rank), layout_.numElements(rank), chunks_[rank].data_ptr());
    }
  }

  void decodeChunk(size_t rank) {
    if (!plain_ && layout_.numElements(rank) > 0) {
      codec::decode(kHost, wire_, dtype_, chunks_[rank].data_ptr(), layout_.numElements(rank), place(rank));
    }
  }

  const Group group_;
  const size_t rank_;
  const size_t size_;
  const size_t bucket_;
  const codec::Wire wire_;
  const codec::DType dtype_;
  const bool plain_;
  const float scale_;
  const size_t elementSize_;
  const ChunkLayout layout_;
  const at::Tensor flat_;
  uint32_t round_ = 0;
  // Chunk of rank p, as bytes: a slice of the bucket if plain, else a buffer of its own.
  std::vector<at::Tensor> chunks_;
  // What rank p contributes to the own chunk.
  std::vector<at::Tensor> contributions_;
  std::vector<const void*> sources_;
  Transfers scatterSends_;
  Transfers scatterReceives_;
  Transfers gatherSends_;
  Transfers gatherReceives_;
};

// The backend's own all-reduce: for types that have no codec.
class WholeReduce final : public HostOperation {
 public:
  WholeReduce(const Group& group, const at::Tensor& tensor, c10d::ReduceOp::RedOpType operation,
              double divisor)
      : group_(group), tensors_{tensor}, divisor_(divisor) {
    options_.reduceOp = operation;
  }

  void begin(uint32_t /*round*/) override { work_ = group_->allreduce(tensors_, options_); }

  void reduce() override {}

  void complete() override {
    work_->wait();
    if (divisor_ != 1.0) {
      tensors_[0].div_(divisor_);
    }
  }

  // A collective of the backend cannot be interrupted; it ends by the group's timeout.
  void abort() override {}

  uint64_t bytesPerRound() const override {
    const auto ranks = static_cast<uint64_t>(group_->getSize());
    return 2 * (ranks - 1) * tensors_[0].nbytes() / ranks;
  }

 private:
  const Group group_;
  std::vector<at::Tensor> tensors_;
  const double divisor_;
  c10d::AllreduceOptions options_;
  Work work_;
};

}  // namespace

std::unique_ptr<HostOperation> makeHostOperation(const Group& group, const Bucket& bucket) {
  if (bucket.index >= kMaxBuckets) {
    throw UsageFailure("the plan has more than " + std::to_string(kMaxBuckets) +
                       " buckets; want a larger bucket_cap_mb");
  }
  switch (bucket.operation.kind) {
    case OperationKind::kScatterReduceGather:
      return std::make_unique<PeerExchange>(group, bucket);
    case OperationKind::kAllReduce: {
      const double divisor = bucket.operation.average ? group->getSize() : 1.0;
      return std::make_unique<WholeReduce>(group, bucket.flat, c10d::ReduceOp::SUM, divisor);
    }
  }
  throw std::logic_error("unknown kind of operation");
}

std::unique_ptr<HostOperation> makeHostFlags(const Group& group, const at::Tensor& flags) {
  return std::make_unique<WholeReduce>(group, flags, c10d::ReduceOp::MAX, 1.0);
}

}  // namespace baguarun::engine
