#include "net/shm_capi.h"

#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "net/error.h"
#include "net/shm_group.h"

using baguarun::net::Dtype;
using baguarun::net::Error;
using baguarun::net::Fault;
using baguarun::net::ReduceOp;
using baguarun::net::ReducePath;
using baguarun::net::ShmGroup;

namespace {

// Introductions hold an affinity mask in hexadecimal (256 digits) and short fields.
constexpr size_t kBlobBytes = 2048;

thread_local std::string lastError;

template <class Call>
int guarded(Call call) {
  try {
    call();
    return 0;
  } catch (const Error& error) {
    lastError = error.what();
    return -1 - static_cast<int>(error.fault());
  }
}

ShmGroup& groupOf(void* group) { return *static_cast<ShmGroup*>(group); }

std::vector<std::string> exchangeBlobs(baguaShmExchange exchange, int size, const std::string& mine) {
  if (mine.size() + 1 > kBlobBytes) {
    throw Error(Fault::kUsage, "",
                "a blob of " + std::to_string(mine.size()) + " bytes: want less than 2048");
  }
  std::vector<char> own(kBlobBytes, '\0');
  std::memcpy(own.data(), mine.data(), mine.size());
  std::vector<char> all(static_cast<size_t>(size) * kBlobBytes, '\0');
  if (exchange(own.data(), all.data(), kBlobBytes) != 0) {
    throw Error(Fault::kRemote, "", "the exchange of blobs failed");
  }
  std::vector<std::string> blobs;
  for (size_t rank = 0; rank < static_cast<size_t>(size); ++rank) {
    const char* blob = all.data() + rank * kBlobBytes;
    blobs.emplace_back(blob, strnlen(blob, kBlobBytes));
  }
  return blobs;
}

}  // namespace

extern "C" {

const char* baguaShmError() { return lastError.c_str(); }

void* baguaShmCreate(int rank, int size, const char* nonce, double timeout_s, size_t arenaBytes,
                     baguaShmExchange exchange) {
  ShmGroup* group = nullptr;
  const ShmGroup::Options options{
      .rank = rank,
      .size = size,
      .nonce = nonce,
      .timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000)),
      .arenaBytes = arenaBytes};
  guarded([&] {
    group =
        new ShmGroup(options, [&](const std::string& mine) { return exchangeBlobs(exchange, size, mine); });
  });
  return group;
}

void baguaShmDestroy(void* group) { delete static_cast<ShmGroup*>(group); }

int baguaShmAllReduce(void* group, void* data, size_t count, int dtype, int op) {
  return guarded([&] {
    groupOf(group).allReduce(data, data, count, static_cast<Dtype>(dtype), static_cast<ReduceOp>(op));
  });
}

int baguaShmReduce(void* group, void* data, size_t count, int dtype, int op, int root) {
  return guarded([&] {
    groupOf(group).reduce(data, data, count, static_cast<Dtype>(dtype), static_cast<ReduceOp>(op), root);
  });
}

int baguaShmReduceScatter(void* group, const void* in, void* out, size_t count, int dtype, int op) {
  return guarded([&] {
    groupOf(group).reduceScatter(in, out, count, static_cast<Dtype>(dtype), static_cast<ReduceOp>(op));
  });
}

int baguaShmAllGather(void* group, const void* in, void* out, size_t bytes) {
  return guarded([&] { groupOf(group).allGather(in, out, bytes); });
}

int baguaShmBroadcast(void* group, void* data, size_t bytes, int root) {
  return guarded([&] { groupOf(group).broadcast(data, bytes, root); });
}

int baguaShmGather(void* group, const void* in, void* out, size_t bytes, int root) {
  return guarded([&] { groupOf(group).gather(in, out, bytes, root); });
}

int baguaShmScatter(void* group, const void* in, void* out, size_t bytes, int root) {
  return guarded([&] { groupOf(group).scatter(in, out, bytes, root); });
}

int baguaShmAllToAllV(void* group, const void* in, const size_t* sendBytes, void* out,
                      const size_t* recvBytes) {
  return guarded([&] {
    const auto ranks = static_cast<size_t>(groupOf(group).size());
    groupOf(group).allToAllV(in, {sendBytes, ranks}, out, {recvBytes, ranks});
  });
}

int baguaShmBarrier(void* group) {
  return guarded([&] { groupOf(group).barrier(); });
}

void* baguaShmAllocate(void* group, size_t bytes) {
  void* data = nullptr;
  guarded([&] { data = groupOf(group).allocate(bytes); });
  return data;
}

void baguaShmAbort(void* group) { groupOf(group).abort(); }

int baguaReduce(int op, int dtype, const void* const* sources, size_t numSources, void* const* outs,
                size_t numOuts, size_t count, int path) {
  return guarded([&] {
    const ReducePath chosen = path < 0 ? baguarun::net::bestReducePath() : static_cast<ReducePath>(path);
    baguarun::net::reduce(static_cast<ReduceOp>(op), static_cast<Dtype>(dtype), {sources, numSources},
                          {outs, numOuts}, count, chosen);
  });
}

int baguaBestReducePath() { return static_cast<int>(baguarun::net::bestReducePath()); }
}
