#include "net/communicator.h"

#include <cstring>
#include <utility>

#include "net/communicator_state.h"
#include "net/shm_steps.h"

namespace baguarun::net {

using shm::copyBytes;

Communicator::Communicator(const Options& options, const BlobExchange& exchange)
    : implementation_(std::make_unique<Implementation>(options, exchange)) {}

Communicator::~Communicator() = default;

void Communicator::allReduce(void* data, size_t count, Dtype dtype, ReduceOp op, Clock::time_point deadline) {
  allReduceInto(data, data, count, dtype, op, deadline, {});
}

void Communicator::allReduceInto(const void* in, void* out, size_t count, Dtype dtype, ReduceOp op,
                                 Clock::time_point deadline,
                                 const std::function<void(size_t count)>& arrived) {
  checkReduction(op, dtype);
  const size_t bytes = shm::totalBytes(count, dtype);
  implementation_->collective(
      {.count = count, .kind = CallKind::kAllReduce, .dtype = dtype, .op = op}, deadline,
      [&](ShmGroup& group) { group.allReduce(in, out, count, dtype, op); },
      [&](Levels& levels, const Call& call) { levels.allReduce(call, in, out, arrived); },
      [&] { copyBytes(out, in, bytes); });
}

void Communicator::reduce(void* data, size_t count, Dtype dtype, ReduceOp op, int root,
                          Clock::time_point deadline) {
  checkReduction(op, dtype);
  shm::totalBytes(count, dtype);
  implementation_->checkRoot(root);
  implementation_->collective(
      {.count = count,
       .root = static_cast<uint32_t>(root),
       .kind = CallKind::kReduce,
       .dtype = dtype,
       .op = op},
      deadline, [&](ShmGroup& group) { group.reduce(data, data, count, dtype, op, root); },
      [&](Levels& levels, const Call& call) { levels.reduce(call, data, count, dtype, op, root); }, [] {});
}

void Communicator::reduceScatter(const void* in, void* out, size_t count, Dtype dtype, ReduceOp op,
                                 Clock::time_point deadline) {
  checkReduction(op, dtype);
  const size_t bytes = shm::totalBytes(count, dtype);
  implementation_->collective(
      {.count = count, .kind = CallKind::kReduceScatter, .dtype = dtype, .op = op}, deadline,
      [&](ShmGroup& group) { group.reduceScatter(in, out, count, dtype, op); },
      [&](Levels& levels, const Call& call) { levels.reduceScatter(call, in, out, count, dtype, op); },
      [&] { copyBytes(out, in, bytes); });
}

void Communicator::allGather(const void* in, void* out, size_t bytes, Clock::time_point deadline) {
  implementation_->collective(
      {.count = bytes, .kind = CallKind::kAllGather}, deadline,
      [&](ShmGroup& group) { group.allGather(in, out, bytes); },
      [&](Levels& levels, const Call& call) { levels.allGather(call, in, out, bytes); },
      [&] { copyBytes(out, in, bytes); });
}

void Communicator::broadcast(void* data, size_t bytes, int root, Clock::time_point deadline) {
  implementation_->checkRoot(root);
  implementation_->collective(
      {.count = bytes, .root = static_cast<uint32_t>(root), .kind = CallKind::kBroadcast}, deadline,
      [&](ShmGroup& group) { group.broadcast(data, bytes, root); },
      [&](Levels& levels, const Call& call) { levels.broadcast(call, data, bytes, root); }, [] {});
}

void Communicator::gather(const void* in, void* out, size_t bytes, int root, Clock::time_point deadline) {
  implementation_->checkRoot(root);
  implementation_->collective(
      {.count = bytes, .root = static_cast<uint32_t>(root), .kind = CallKind::kGather}, deadline,
      [&](ShmGroup& group) { group.gather(in, out, bytes, root); },
      [&](Levels& levels, const Call& call) {
        levels.flat().gather(call, in, out, bytes, static_cast<size_t>(root));
      },
      [&] { copyBytes(out, in, bytes); });
}

void Communicator::scatter(const void* in, void* out, size_t bytes, int root, Clock::time_point deadline) {
  implementation_->checkRoot(root);
  implementation_->collective(
      {.count = bytes, .root = static_cast<uint32_t>(root), .kind = CallKind::kScatter}, deadline,
      [&](ShmGroup& group) { group.scatter(in, out, bytes, root); },
      [&](Levels& levels, const Call& call) {
        levels.flat().scatter(call, in, out, bytes, static_cast<size_t>(root));
      },
      [&] { copyBytes(out, in, bytes); });
}

void Communicator::allToAllV(const void* in, std::span<const size_t> sendBytes, void* out,
                             std::span<const size_t> recvBytes, Clock::time_point deadline) {
  const auto ranks = static_cast<size_t>(size());
  if (sendBytes.size() != ranks || recvBytes.size() != ranks) {
    throw Error(Fault::kUsage, "",
                "all-to-all of " + std::to_string(sendBytes.size()) + " and " +
                    std::to_string(recvBytes.size()) + " sizes: want one per rank, " + std::to_string(ranks));
  }
  implementation_->collective(
      {.kind = CallKind::kAllToAll}, deadline,
      [&](ShmGroup& group) { group.allToAllV(in, sendBytes, out, recvBytes); },
      [&](Levels& levels, const Call& call) { levels.flat().allToAllV(call, in, sendBytes, out, recvBytes); },
      [&] {
        if (sendBytes[0] != recvBytes[0]) {
          throw Error(Fault::kUsage, "rank 0",
                      "all-to-all: sends itself " + std::to_string(sendBytes[0]) + " bytes and expects " +
                          std::to_string(recvBytes[0]));
        }
        copyBytes(out, in, sendBytes[0]);
      });
}

void Communicator::barrier(Clock::time_point deadline) {
  implementation_->collective(
      {.kind = CallKind::kBarrier}, deadline, [](ShmGroup& group) { group.barrier(); },
      [](Levels& levels, const Call& call) { levels.barrier(call); }, [] {});
}

void Communicator::lookAheadBy(std::function<std::optional<NextAllReduce>()> find) {
  implementation_->lookAheadBy(std::move(find));
}

std::shared_ptr<Communicator::Message> Communicator::isend(const void* data, size_t bytes, int to,
                                                           uint32_t tag) {
  return implementation_->post(true, const_cast<void*>(data), bytes, to, tag);
}

std::shared_ptr<Communicator::Message> Communicator::irecv(void* data, size_t bytes, int from, uint32_t tag) {
  return implementation_->post(false, data, bytes, from, tag);
}

bool Communicator::progress() { return implementation_->progress(); }
bool Communicator::hasUnsent() const { return implementation_->hasUnsent(); }
void Communicator::sleep(Clock::time_point until) { implementation_->sleep(until); }
void Communicator::wake() noexcept { implementation_->wake(); }
void Communicator::abort(const std::string& reason) noexcept { implementation_->abort(reason); }
void Communicator::fail(const Error& error) noexcept { implementation_->fail(error); }
std::optional<Error> Communicator::failure() const { return implementation_->verdict().get(); }
std::shared_ptr<void> Communicator::allocate(size_t bytes) { return implementation_->allocate(bytes); }
size_t Communicator::roomLeft() const noexcept { return implementation_->roomLeft(); }
std::chrono::milliseconds Communicator::beatInterval() const noexcept {
  return implementation_->beatInterval();
}
int Communicator::rank() const noexcept { return implementation_->rank(); }
int Communicator::size() const noexcept { return implementation_->size(); }
uint64_t Communicator::bytesSent() const noexcept { return implementation_->bytesSent(); }

}  // namespace baguarun::net
