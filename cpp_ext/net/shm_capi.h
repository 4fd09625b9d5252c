// ShmGroup behind a C ABI, for tests and benchmarks that load it with ctypes.
//
// Calls give 0, or -(1 + the Fault); baguaShmError() then gives the calling thread's message.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// Fills `all` with `size` blobs of `blobBytes` each, from every rank's `mine`. 0: well.
typedef int (*baguaShmExchange)(const char* mine, char* all, size_t blobBytes);

const char* baguaShmError();
// 0 where it failed.
void* baguaShmCreate(int rank, int size, const char* nonce, double timeout_s, size_t arenaBytes,
                     baguaShmExchange exchange);
void baguaShmDestroy(void* group);
int baguaShmAllReduce(void* group, void* data, size_t count, int dtype, int op);
int baguaShmReduce(void* group, void* data, size_t count, int dtype, int op, int root);
int baguaShmReduceScatter(void* group, const void* in, void* out, size_t count, int dtype, int op);
int baguaShmAllGather(void* group, const void* in, void* out, size_t bytes);
int baguaShmBroadcast(void* group, void* data, size_t bytes, int root);
int baguaShmGather(void* group, const void* in, void* out, size_t bytes, int root);
int baguaShmScatter(void* group, const void* in, void* out, size_t bytes, int root);
int baguaShmAllToAllV(void* group, const void* in, const size_t* sendBytes, void* out,
                      const size_t* recvBytes);
int baguaShmBarrier(void* group);
// nullptr where it failed.
void* baguaShmAllocate(void* group, size_t bytes);
void baguaShmAbort(void* group);
// One reduction on one path (ReducePath); -1 for the best.
int baguaReduce(int op, int dtype, const void* const* sources, size_t numSources, void* const* outs,
                size_t numOuts, size_t count, int path);
int baguaBestReducePath();
}
