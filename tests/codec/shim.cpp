// A C face of the codecs, so that the tests can call them through ctypes without building the extension.
#include <cstdio>
#include <cstring>
#include <exception>

#include "codec.h"

namespace codec = baguarun::codec;

namespace {

thread_local char lastError[512];

// 0, or 1 and the exception's text in shim_error().
template <class Call>
int caught(Call call) {
  try {
    call();
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(lastError, sizeof lastError, "%s", error.what());
    return 1;
  }
}

codec::Exec execOf(int device) { return {static_cast<codec::Device>(device), nullptr}; }
codec::Wire wireOf(int wire) { return static_cast<codec::Wire>(wire); }
codec::DType dtypeOf(int dtype) { return static_cast<codec::DType>(dtype); }

}  // namespace

extern "C" {

const char* shim_error() { return lastError; }
const char* shim_path() { return codec::cpuPath(); }
int shim_use_path(const char* name) { return codec::usePath(name) ? 1 : 0; }
size_t shim_encoded_bytes(int wire, size_t numel) { return codec::encodedBytes(wireOf(wire), numel); }

int shim_encode(int device, int wire, int dtype, const void* src, size_t numel, void* dst) {
  return caught([&] { codec::encode(execOf(device), wireOf(wire), dtypeOf(dtype), src, numel, dst); });
}

int shim_decode(int device, int wire, int dtype, const void* src, size_t numel, void* dst) {
  return caught([&] { codec::decode(execOf(device), wireOf(wire), dtypeOf(dtype), src, numel, dst); });
}

int shim_reduce_encode(int device, int wire, const void* const* src, size_t count, float scale, size_t numel,
                       void* dst) {
  return caught([&] { codec::reduceEncode(execOf(device), wireOf(wire), src, count, scale, numel, dst); });
}

int shim_reduce_decode(int device, int wire, int dtype, const void* const* src, size_t count, float scale,
                       size_t numel, void* dst) {
  return caught([&] {
    codec::reduceDecode(execOf(device), wireOf(wire), dtypeOf(dtype), src, count, scale, numel, dst);
  });
}

}  // extern "C"
