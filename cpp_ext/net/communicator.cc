#include "net/communicator.h"

#include <cstring>

#include "net/communicator_state.h"
#include "net/shm_steps.h"

namespace baguarun::net {

using shm::copyBytes;

Communicator::Communicator(const Options& options, const BlobExchange& exchange)
    : implementation_(std::make_unique<Implementation>(options, exchange)) {}

Communicator::~Communicator() = default;

void Communicator::allReduce(void* data, size_t count, Dtype dtype, ReduceOp op, Clock::time_point deadline) {
  checkReduction(op, dtype);
  shm::totalBytes(count, dtype);
  implementation_->collective(deadline, [&] {
    if (ShmGroup* const local = implementation_->local()) {
      local->allReduce(data, count, dtype, op);
    }
  });
}

void Communicator::reduce(void* data, size_t count, Dtype dtype, ReduceOp op, int root,
                          Clock::time_point deadline) {
  checkReduction(op, dtype);
  shm::totalBytes(count, dtype);
  implementation_->checkRoot(root);
  implementation_->collective(deadline, [&] {
    if (ShmGroup* const local = implementation_->local()) {
      local->reduce(data, count, dtype, op, root);
    }
  });
}

void Communicator::reduceScatter(const void* in, void* out, size_t count, Dtype dtype, ReduceOp op,
                                 Clock::time_point deadline) {
  checkReduction(op, dtype);
  const size_t bytes = shm::totalBytes(count, dtype);
  implementation_->collective(deadline, [&] {
    if (ShmGroup* const local = implementation_->local()) {
      local->reduceScatter(in, out, count, dtype, op);
    } else {
      copyBytes(out, in, bytes);
    }
  });
}

void Communicator::allGather(const void* in, void* out, size_t bytes, Clock::time_point deadline) {
  implementation_->collective(deadline, [&] {
    if (ShmGroup* const local = implementation_->local()) {
      local->allGather(in, out, bytes);
    } else {
      copyBytes(out, in, bytes);
    }
  });
}

void Communicator::broadcast(void* data, size_t bytes, int root, Clock::time_point deadline) {
  implementation_->checkRoot(root);
  implementation_->collective(deadline, [&] {
    if (ShmGroup* const local = implementation_->local()) {
      local->broadcast(data, bytes, root);
    }
  });
}

void Communicator::gather(const void* in, void* out, size_t bytes, int root, Clock::time_point deadline) {
  implementation_->checkRoot(root);
  implementation_->collective(deadline, [&] {
    if (ShmGroup* const local = implementation_->local()) {
      local->gather(in, out, bytes, root);
    } else {
      copyBytes(out, in, bytes);
    }
  });
}

void Communicator::scatter(const void* in, void* out, size_t bytes, int root, Clock::time_point deadline) {
  implementation_->checkRoot(root);
  implementation_->collective(deadline, [&] {
    if (ShmGroup* const local = implementation_->local()) {
      local->scatter(in, out, bytes, root);
    } else {
      copyBytes(out, in, bytes);
    }
  });
}

void Communicator::allToAllV(const void* in, std::span<const size_t> sendBytes, void* out,
                             std::span<const size_t> recvBytes, Clock::time_point deadline) {
  const auto ranks = static_cast<size_t>(size());
  if (sendBytes.size() != ranks || recvBytes.size() != ranks) {
    throw Error(Fault::kUsage, "",
                "all-to-all of " + std::to_string(sendBytes.size()) + " and " +
                    std::to_string(recvBytes.size()) + " sizes: want one per rank, " + std::to_string(ranks));
  }
  implementation_->collective(deadline, [&] {
    if (ShmGroup* const local = implementation_->local()) {
      local->allToAllV(in, sendBytes, out, recvBytes);
    } else if (sendBytes[0] != recvBytes[0]) {
      throw Error(Fault::kUsage, "",
                  "all-to-all: sends itself " + std::to_string(sendBytes[0]) + " bytes and expects " +
                      std::to_string(recvBytes[0]));
    } else {
      copyBytes(out, in, sendBytes[0]);
    }
  });
}

void Communicator::barrier(Clock::time_point deadline) {
  implementation_->collective(deadline, [&] {
    if (ShmGroup* const local = implementation_->local()) {
      local->barrier();
    }
  });
}

std::shared_ptr<Communicator::Message> Communicator::isend(const void* data, size_t bytes, int to,
                                                           uint32_t tag) {
  return implementation_->post(true, const_cast<void*>(data), bytes, to, tag);
}

std::shared_ptr<Communicator::Message> Communicator::irecv(void* data, size_t bytes, int from, uint32_t tag) {
  return implementation_->post(false, data, bytes, from, tag);
}

bool Communicator::progress() { return implementation_->progress(); }
void Communicator::sleep(Clock::time_point until) { implementation_->sleep(until); }
void Communicator::wake() noexcept { implementation_->wake(); }
void Communicator::abort(const std::string& reason) noexcept { implementation_->abort(reason); }
std::optional<Error> Communicator::failure() const { return implementation_->verdict().get(); }
void* Communicator::allocate(size_t bytes) { return implementation_->allocate(bytes); }
int Communicator::rank() const noexcept { return implementation_->rank(); }
int Communicator::size() const noexcept { return implementation_->size(); }
uint64_t Communicator::bytesSent() const noexcept { return 0; }

}  // namespace baguarun::net
