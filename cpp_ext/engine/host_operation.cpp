#include "engine/host_operation.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <system_error>
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
    pending_.push_back({std::move(work), peer, /*ended=*/false});
  }

  // Waits for the transfer at `position`, once, and names the peer if it fails.
  void wait(size_t position, const char* verb) {
    Entry entry;
    {
      const std::scoped_lock lock(mutex_);
      entry = pending_[position];
    }
    if (entry.ended) {
      return;
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
    const std::scoped_lock lock(mutex_);
    pending_[position].ended = true;
  }

  // Waits for the transfer with `peer`, if there is one.
  void waitFor(size_t peer, const char* verb) {
    for (size_t position = 0; position < pending_.size(); ++position) {
      if (pending_[position].peer == peer) {
        wait(position, verb);
      }
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
    bool ended = false;
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
    encodeChunk(rank_);
  }

  void reduce() override {
    for (size_t i = 0; i < scatterReceives_.size(); ++i) {
      scatterReceives_.wait(i, "receiving the contribution of");
    }
    if (layout_.numElements(rank_) > 0) {
      codec::reduceEncode(kHost, wire_, sources_.data(), size_, scale_, layout_.numElements(rank_),
                          chunks_[rank_].data_ptr());
    }
    for (size_t step = 1; step < size_; ++step) {
      pace(step, gatherReceives_, "receiving the result of");
      send(chunks_[rank_], target(step), Stage::kGather, gatherSends_);
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
  static constexpr size_t kPacedBytes = size_t{64} << 10;

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

  // In step s each rank sends to the one s places on and receives from the one s places back: every link
  // carries one message each way.
  size_t target(size_t step) const { return (rank_ + step) % size_; }
  size_t source(size_t step) const { return (rank_ + size_ - step) % size_; }

  // Before the send of `step`: waits for the message of the step before, if messages are large. Several large
  // ones at once would fight for the receiver's link and overflow the queues in front of it.
  void pace(size_t step, Transfers& receives, const char* verb) {
    if (step > 1 && layout_.stride() * elementSize_ >= kPacedBytes) {
      receives.waitFor(source(step - 1), verb);
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

// Every rank's four numbers, in rank order.
std::vector<std::array<int64_t, 4>> gatherNumbers(const Group& group, const std::array<int64_t, 4>& mine) {
  const auto options = at::TensorOptions().dtype(at::kLong);
  std::vector<at::Tensor> input{at::tensor(at::ArrayRef<int64_t>(mine), options)};
  std::vector<std::vector<at::Tensor>> output(1);
  for (int rank = 0; rank < group->getSize(); ++rank) {
    output[0].push_back(at::zeros({4}, options));
  }
  group->allgather(output, input)->wait();
  std::vector<std::array<int64_t, 4>> found;
  for (const at::Tensor& numbers : output[0]) {
    const int64_t* values = numbers.const_data_ptr<int64_t>();
    found.push_back({values[0], values[1], values[2], values[3]});
  }
  return found;
}

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

bool canShare(const OperationSpec& operation, at::ScalarType dtype) {
  return operation.kind == OperationKind::kScatterReduceGather && isPlain(operation.wire, dtype);
}

std::shared_ptr<SharedArea> joinSharedArea(const Group& group, const std::vector<size_t>& sizes) {
  const auto rank = static_cast<size_t>(group->getRank());
  const auto size = static_cast<size_t>(group->getSize());
  auto area = std::make_shared<SharedArea>(sizes);
  // Both halves end with an exchange, so that all ranks come to the same answer.
  std::array<int64_t, 4> mine{0, getpid(), -1, 0};
  try {
    area->create(rank, size);
    mine = {1, getpid(), area->descriptor(), 0};
  } catch (const std::system_error& error) {
    TORCH_WARN("gradients go through the network stack although all ranks are on one host: ", error.what());
  }
  bool everybody = true;
  const auto created = gatherNumbers(group, mine);
  for (size_t peer = 0; peer < size; ++peer) {
    everybody = everybody && created[peer][0] == 1;
  }
  mine = {everybody ? 1 : 0, 0, 0, 0};
  for (size_t peer = 0; everybody && peer < size; ++peer) {
    try {
      if (peer != rank) {
        area->open(peer, created[peer][1], created[peer][2]);
      }
    } catch (const std::system_error& error) {
      TORCH_WARN("gradients go through the network stack although all ranks are on one host: ", error.what());
      mine[0] = 0;
    }
  }
  for (const auto& opened : gatherNumbers(group, mine)) {
    everybody = everybody && opened[0] == 1;
  }
  return everybody ? area : nullptr;
}

std::unique_ptr<HostOperation> makeSharedOperation(const Group& group, const Bucket& bucket,
                                                   std::shared_ptr<SharedArea> area,
                                                   std::chrono::milliseconds timeout) {
  return std::make_unique<SharedExchange>(group, bucket, std::move(area), timeout);
}

std::unique_ptr<HostOperation> makeHostFlags(const Group& group, const at::Tensor& flags) {
  return std::make_unique<WholeReduce>(group, flags, c10d::ReduceOp::MAX, 1.0);
}

}  // namespace baguarun::engine
