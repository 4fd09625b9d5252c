// NCCL's network plugin interface, versions 10, 11 and 12, as far as a TCP plugin needs it.
//
// Written from the interface's description: pointers to things that this plugin never looks into are void*.
// The layout is NCCL's ABI and pinned below; NCCL 2.26 to 2.27 read version 10, 2.28 and 2.29 version
// 11, 2.30 and later version 12, each taking the newest it knows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace baguarun::nccl {

enum class Result : int {
  kSuccess = 0,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidUsage = 5,
  kRemoteError = 6,
};

enum class LogLevel : int { kWarn = 2, kInfo = 3 };
inline constexpr unsigned long kLogInit = 0x1;
inline constexpr unsigned long kLogNet = 0x10;
using Logger = void (*)(LogLevel level, unsigned long flags, const char* file, int line, const char* format,
                        ...);

inline constexpr int kPointerHost = 1;
inline constexpr size_t kHandleBytes = 128;

// Members shared by the properties of all versions, up to the virtual devices.
struct PropertiesHead {
  const char* name;
  const char* pciPath;  // nullptr: not a PCI device
  uint64_t guid;
  int ptrSupport;
  int regIsGlobal;
  int forceFlush;
  int speed;  // Mbit/s
  int port;
  float latency;
  int maxComms;
  int maxRecvs;
  int netDeviceType;  // 0: no device offload
  int netDeviceVersion;
};

template <int kMaxDevices>
struct VirtualDevices {
  int ndevs;
  int devs[kMaxDevices];
};

struct PropertiesV10 {
  PropertiesHead head;
  VirtualDevices<4> vProps;
  size_t maxP2pBytes;
  size_t maxCollBytes;
};

struct PropertiesV11 {
  PropertiesHead head;
  VirtualDevices<4> vProps;
  size_t maxP2pBytes;
  size_t maxCollBytes;
  int maxMultiRequestSize;
};

struct PropertiesV12 {
  PropertiesHead head;
  VirtualDevices<8> vProps;
  size_t maxP2pBytes;
  size_t maxCollBytes;
  int maxMultiRequestSize;
  int16_t railId;  // -1: unknown
  int16_t planeId;
};

static_assert(sizeof(PropertiesHead) == 64 && offsetof(PropertiesHead, netDeviceVersion) == 60);
static_assert(sizeof(PropertiesV10) == 104 && offsetof(PropertiesV10, maxP2pBytes) == 88);
static_assert(sizeof(PropertiesV11) == 112 && offsetof(PropertiesV11, maxP2pBytes) == 88 &&
              offsetof(PropertiesV11, maxMultiRequestSize) == 104);
static_assert(sizeof(PropertiesV12) == 128 && offsetof(PropertiesV12, maxP2pBytes) == 104 &&
              offsetof(PropertiesV12, railId) == 124);

// The functions that all three versions have in common, from accept() on.
#define BAGUARUN_NCCL_DATA_FUNCTIONS                                                             \
  Result (*accept)(void* listenComm, void** recvComm, void** deviceComm);                        \
  Result (*regMr)(void* comm, void* data, size_t size, int type, void** mhandle);                \
  Result (*regMrDmaBuf)(void* comm, void* data, size_t size, int type, uint64_t offset, int fd,  \
                        void** mhandle);                                                         \
  Result (*deregMr)(void* comm, void* mhandle);                                                  \
  Result (*isend)(void* comm, void* data, size_t size, int tag, void* mhandle, void* phandle,    \
                  void** request);                                                               \
  Result (*irecv)(void* comm, int n, void** data, size_t* sizes, int* tags, void** mhandles,     \
                  void** phandles, void** request);                                              \
  Result (*iflush)(void* comm, int n, void** data, int* sizes, void** mhandles, void** request); \
  Result (*test)(void* request, int* done, int* sizes);                                          \
  Result (*closeSend)(void* comm);                                                               \
  Result (*closeRecv)(void* comm);                                                               \
  Result (*closeListen)(void* comm);                                                             \
  Result (*getDeviceMr)(void* comm, void* mhandle, void** deviceMhandle);                        \
  Result (*irecvConsumed)(void* comm, int n, void* request);                                     \
  Result (*makeVDevice)(int* device, void* properties)

struct NetV10 {
  const char* name;
  Result (*init)(Logger logger, void* profiler);
  Result (*devices)(int* count);
  Result (*getProperties)(int device, PropertiesV10* properties);
  Result (*listen)(int device, void* handle, void** listenComm);
  Result (*connect)(int device, void* config, void* handle, void** sendComm, void** deviceComm);
  BAGUARUN_NCCL_DATA_FUNCTIONS;
};

template <typename Properties>
struct NetWithContext {
  const char* name;
  Result (*init)(void** context, uint64_t commId, void* config, Logger logger, void* profiler);
  Result (*devices)(int* count);
  Result (*getProperties)(int device, Properties* properties);
  Result (*listen)(void* context, int device, void* handle, void** listenComm);
  Result (*connect)(void* context, int device, void* handle, void** sendComm, void** deviceComm);
  BAGUARUN_NCCL_DATA_FUNCTIONS;
  Result (*finalize)(void* context);
  Result (*setNetAttr)(void* context, void* attributes);
};
using NetV11 = NetWithContext<PropertiesV11>;
using NetV12 = NetWithContext<PropertiesV12>;

#undef BAGUARUN_NCCL_DATA_FUNCTIONS

static_assert(sizeof(NetV10) == 20 * sizeof(void*));
static_assert(sizeof(NetV11) == 22 * sizeof(void*));
static_assert(sizeof(NetV12) == 22 * sizeof(void*));

}  // namespace baguarun::nccl
