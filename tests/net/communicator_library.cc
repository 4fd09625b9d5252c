// Communicator behind a C ABI, for tests that load it with ctypes.
//
// Calls give 0, or -(1 + the Fault); baguaError() then gives the calling thread's message.
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "net/communicator.h"

using baguarun::net::Clock;
using baguarun::net::Communicator;
using baguarun::net::Dtype;
using baguarun::net::Env;
using baguarun::net::Error;
using baguarun::net::ReduceOp;
using Message = std::shared_ptr<Communicator::Message>;

namespace {

constexpr size_t kBlobBytes = 4096;

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

Communicator& of(void* communicator) { return *static_cast<Communicator*>(communicator); }

Clock::time_point after(double seconds) {
  return Clock::now() + std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6));
}

}  // namespace

extern "C" {

// Fills `all` with `size` blobs of `blobBytes` each, from every rank's `mine`. 0: well.
typedef int (*baguaExchange)(const char* mine, char* all, size_t blobBytes);
typedef void (*baguaArrived)(size_t count);

const char* baguaError() { return lastError.c_str(); }

void* baguaCreate(int rank, int size, const char* nonce, double timeout_s, size_t arenaBytes,
                  const char* host, int shareMemory, baguaExchange exchange) {
  Communicator* made = nullptr;
  const auto swap = [&](const std::string& mine) {
    if (mine.size() + 8 > kBlobBytes) {
      throw Error(baguarun::net::Fault::kUsage, "", "a blob that is too long");
    }
    std::vector<char> own(kBlobBytes, '\0');
    const uint64_t bytes = mine.size();
    std::memcpy(own.data(), &bytes, sizeof(bytes));
    std::memcpy(own.data() + sizeof(bytes), mine.data(), mine.size());
    std::vector<char> all(static_cast<size_t>(size) * kBlobBytes, '\0');
    if (exchange(own.data(), all.data(), kBlobBytes) != 0) {
      throw Error(baguarun::net::Fault::kRemote, "", "the exchange of blobs failed");
    }
    std::vector<std::string> blobs;
    for (size_t peer = 0; peer < static_cast<size_t>(size); ++peer) {
      uint64_t count = 0;
      std::memcpy(&count, all.data() + peer * kBlobBytes, sizeof(count));
      blobs.emplace_back(all.data() + peer * kBlobBytes + sizeof(count), count);
    }
    return blobs;
  };
  guarded([&] {
    made = new Communicator({.rank = rank,
                             .size = size,
                             .nonce = nonce,
                             .env = Env::read(),
                             .timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000)),
                             .shareMemory = shareMemory != 0,
                             .arenaBytes = arenaBytes,
                             .host = host},
                            swap);
  });
  return made;
}

void baguaDestroy(void* it) { delete static_cast<Communicator*>(it); }

int baguaAllReduce(void* it, double s, void* data, size_t count, int dtype, int op) {
  return guarded(
      [&] { of(it).allReduce(data, count, static_cast<Dtype>(dtype), static_cast<ReduceOp>(op), after(s)); });
}
int baguaAllReduceInto(void* it, double s, const void* in, void* out, size_t count, int dtype, int op,
                       baguaArrived arrived) {
  return guarded([&] {
    of(it).allReduceInto(in, out, count, static_cast<Dtype>(dtype), static_cast<ReduceOp>(op), after(s),
                         arrived);
  });
}
// What the next call will be, until it says otherwise; no elements: nobody knows.
void baguaLookAhead(void* it, void* data, size_t count, int dtype, int op) {
  of(it).lookAheadBy([=]() -> std::optional<Communicator::NextAllReduce> {
    if (count == 0) {
      return std::nullopt;
    }
    return Communicator::NextAllReduce{data, count, static_cast<Dtype>(dtype), static_cast<ReduceOp>(op)};
  });
}
int baguaReduce(void* it, double s, void* data, size_t count, int dtype, int op, int root) {
  return guarded([&] {
    of(it).reduce(data, count, static_cast<Dtype>(dtype), static_cast<ReduceOp>(op), root, after(s));
  });
}
int baguaReduceScatter(void* it, double s, const void* in, void* out, size_t count, int dtype, int op) {
  return guarded([&] {
    of(it).reduceScatter(in, out, count, static_cast<Dtype>(dtype), static_cast<ReduceOp>(op), after(s));
  });
}
int baguaAllGather(void* it, double s, const void* in, void* out, size_t bytes) {
  return guarded([&] { of(it).allGather(in, out, bytes, after(s)); });
}
int baguaBroadcast(void* it, double s, void* data, size_t bytes, int root) {
  return guarded([&] { of(it).broadcast(data, bytes, root, after(s)); });
}
int baguaGather(void* it, double s, const void* in, void* out, size_t bytes, int root) {
  return guarded([&] { of(it).gather(in, out, bytes, root, after(s)); });
}
int baguaScatter(void* it, double s, const void* in, void* out, size_t bytes, int root) {
  return guarded([&] { of(it).scatter(in, out, bytes, root, after(s)); });
}
int baguaAllToAllV(void* it, double s, const void* in, const size_t* sendBytes, void* out,
                   const size_t* recvBytes) {
  const auto ranks = static_cast<size_t>(of(it).size());
  return guarded([&] { of(it).allToAllV(in, {sendBytes, ranks}, out, {recvBytes, ranks}, after(s)); });
}
int baguaBarrier(void* it, double s) {
  return guarded([&] { of(it).barrier(after(s)); });
}

// A handle to be given to baguaIsDone() and baguaForget(); nullptr where it failed.
void* baguaSend(void* it, const void* data, size_t bytes, int to, uint32_t tag) {
  Message* message = nullptr;
  guarded([&] { message = new Message(of(it).isend(data, bytes, to, tag)); });
  return message;
}
void* baguaRecv(void* it, void* data, size_t bytes, int from, uint32_t tag) {
  Message* message = nullptr;
  guarded([&] { message = new Message(of(it).irecv(data, bytes, from, tag)); });
  return message;
}
// 1: done. 0: not yet.
int baguaIsDone(void* message) {
  bool isDone = false;
  const int result = guarded([&] { isDone = (*static_cast<Message*>(message))->isDone(); });
  return result == 0 ? isDone : result;
}
int baguaSource(void* message) { return (*static_cast<Message*>(message))->source(); }
void baguaForget(void* message) { delete static_cast<Message*>(message); }
int baguaHasUnsent(void* it) { return of(it).hasUnsent(); }
int baguaProgress(void* it) {
  bool moved = false;
  const int result = guarded([&] { moved = of(it).progress(); });
  return result == 0 ? moved : result;
}
void baguaSleep(void* it, double seconds) { of(it).sleep(after(seconds)); }
void baguaWake(void* it) { of(it).wake(); }
void baguaAbort(void* it, const char* reason) { of(it).abort(reason); }
// 1 and baguaError() where it broke, else 0.
int baguaFailure(void* it) {
  const auto failure = of(it).failure();
  lastError = failure.has_value() ? failure->what() : "";
  return failure.has_value();
}
uint64_t baguaBytesSent(void* it) { return of(it).bytesSent(); }
}
