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

struct ShimFormat {
  int wire;
  unsigned keep;
  unsigned long long seed;
};

codec::Format formatOf(ShimFormat format) {
  return {static_cast<codec::Wire>(format.wire), format.keep, format.seed};
}
codec::DType dtypeOf(int dtype) { return static_cast<codec::DType>(dtype); }

}  // namespace

extern "C" {

const char* shim_error() { return lastError; }
const char* shim_path() { return codec::cpuPath(); }
int shim_use_path(const char* name) { return codec::usePath(name) ? 1 : 0; }
int shim_encoded_bytes(ShimFormat format, size_t numel, size_t* bytes) {
  return caught([&] { *bytes = codec::encodedBytes(formatOf(format), numel); });
}

int shim_encode(int device, ShimFormat format, int dtype, const void* src, size_t numel, void* dst) {
  return caught([&] { codec::encode(execOf(device), formatOf(format), dtypeOf(dtype), src, numel, dst); });
}

int shim_encode_with_residual(int device, ShimFormat format, int dtype, const void* src, float* residual,
                              size_t numel, void* dst) {
  return caught([&] {
    codec::encodeWithResidual(execOf(device), formatOf(format), dtypeOf(dtype), src, residual, numel, dst);
  });
}

int shim_encode_sum_with_residual(int device, ShimFormat format, int dtype, const void* own,
                                  const void* const* src, size_t count, float* residual, size_t numel,
                                  void* dst) {
  return caught([&] {
    codec::encodeSumWithResidual(execOf(device), formatOf(format), dtypeOf(dtype), own, src, count, residual,
                                 numel, dst);
  });
}

int shim_decode(int device, ShimFormat format, int dtype, const void* src, size_t numel, void* dst) {
  return caught([&] { codec::decode(execOf(device), formatOf(format), dtypeOf(dtype), src, numel, dst); });
}

int shim_headers_are_finite(ShimFormat format, size_t numel, const void* chunk, int* finite) {
  return caught([&] { *finite = codec::headersAreFinite(formatOf(format), numel, chunk) ? 1 : 0; });
}

int shim_reduce_encode(int device, ShimFormat format, const void* const* src, size_t count, float scale,
                       size_t numel, void* dst) {
  return caught(
      [&] { codec::reduceEncode(execOf(device), formatOf(format), src, count, scale, numel, dst); });
}

int shim_reduce_decode(int device, ShimFormat format, int dtype, const void* const* src, size_t count,
                       float scale, size_t numel, void* dst) {
  return caught([&] {
    codec::reduceDecode(execOf(device), formatOf(format), dtypeOf(dtype), src, count, scale, numel, dst);
  });
}

}  // extern "C"
