// The three tables that NCCL looks for. Every function turns one call into one of the core, and errors into
// NCCL's numbers with a line in NCCL's log.
#include <climits>
#include <exception>
#include <new>
#include <string>

#include "nccl_plugin/context.h"

namespace baguarun::nccl {

namespace {

constexpr const char* kName = "BaguaNet";
// NCCL's test() reports sizes as int.
constexpr size_t kMaxTransferBytes = size_t{1} << 30;
constexpr int kMaxComms = 65536;

Result resultOf(net::Fault fault) {
  switch (fault) {
    case net::Fault::kSystem:
      return Result::kSystemError;
    case net::Fault::kUsage:
      return Result::kInvalidUsage;
    case net::Fault::kRemote:
    case net::Fault::kTimeout:
      return Result::kRemoteError;
    case net::Fault::kAborted:
      return Result::kInternalError;
  }
  return Result::kInternalError;
}

void logLine(Logger logger, LogLevel level, const std::string& text) {
  if (logger != nullptr) {
    logger(level, kLogInit | kLogNet, __FILE__, __LINE__, "NET/BaguaNet : %s", text.c_str());
  }
}

// No exception may reach NCCL.
template <typename Call>
Result guarded(Logger logger, Call call) {
  try {
    return call();
  } catch (const net::Error& error) {
    logLine(logger, LogLevel::kWarn, error.what());
    return resultOf(error.fault());
  } catch (const std::bad_alloc&) {
    logLine(logger, LogLevel::kWarn, "out of memory");
    return Result::kSystemError;
  } catch (const std::exception& error) {
    logLine(logger, LogLevel::kWarn, error.what());
    return Result::kInternalError;
  }
}

std::string describe(const Setup& setup) {
  std::string text = "using";
  for (const Device& device : setup.devices) {
    text.append(" ").append(device.name).append(" ").append(device.interface.address.toString());
  }
  return text + ", " + std::to_string(setup.env.numStreams) + " streams, chunks of " +
         std::to_string(setup.env.chunkBytes) + " bytes" +
         (setup.env.secret.empty() ? "" : ", with a secret");
}

Result init(void** context, uint64_t, void*, Logger logger, void*) {
  *context = nullptr;
  return guarded(logger, [&] {
    auto made = std::make_unique<Context>(Library::instance().acquire(logger));
    logLine(logger, LogLevel::kInfo, describe(made->setup()));
    *context = made.release();
    return Result::kSuccess;
  });
}

Result finalize(void* context) {
  if (context == nullptr) {
    return Result::kSuccess;  // of an init() that failed
  }
  delete static_cast<Context*>(context);
  Library::instance().release();
  return Result::kSuccess;
}

// Version 10 has neither a context nor an end. Never destroyed, as the library's instance.
Context*& processContext() {
  static Context* context = nullptr;
  return context;
}

Result initV10(Logger logger, void*) {
  return guarded(logger, [&] {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    if (processContext() == nullptr) {
      processContext() = new Context(Library::instance().acquire(logger));
      logLine(logger, LogLevel::kInfo, describe(processContext()->setup()));
    }
    return Result::kSuccess;
  });
}

Result devices(int* count) {
  return guarded(nullptr, [&] {
    *count = static_cast<int>(Library::instance().current()->devices.size());
    return Result::kSuccess;
  });
}

template <typename Properties>
Result getProperties(int number, Properties* properties) {
  return guarded(nullptr, [&] {
    const auto setup = Library::instance().current();
    const Device& device = Context(setup).device(number);
    *properties = {};
    properties->head = {.name = device.name,
                        .pciPath = device.pciPath,
                        .guid = static_cast<uint64_t>(number),
                        .ptrSupport = kPointerHost,
                        .regIsGlobal = 0,
                        .forceFlush = 0,
                        .speed = device.speedMbps,
                        .port = 0,
                        .latency = 0,
                        .maxComms = kMaxComms,
                        .maxRecvs = 1,
                        .netDeviceType = 0,
                        .netDeviceVersion = 0};
    properties->vProps.ndevs = 1;
    properties->vProps.devs[0] = number;
    properties->maxP2pBytes = kMaxTransferBytes;
    properties->maxCollBytes = kMaxTransferBytes;
    if constexpr (!std::is_same_v<Properties, PropertiesV10>) {
      properties->maxMultiRequestSize = 1;
    }
    if constexpr (std::is_same_v<Properties, PropertiesV12>) {
      properties->railId = -1;
      properties->planeId = -1;
    }
    return Result::kSuccess;
  });
}

Result listen(void* context, int device, void* handle, void** listenComm) {
  *listenComm = nullptr;
  const Context& known = *static_cast<Context*>(context);
  return guarded(known.setup().logger, [&] {
    *listenComm = listenOn(known, device, handle).release();
    return Result::kSuccess;
  });
}

Result listenV10(int device, void* handle, void** listenComm) {
  return listen(processContext(), device, handle, listenComm);
}

Result connect(void* context, int device, void* handle, void** sendComm, void**) {
  *sendComm = nullptr;
  Context& known = *static_cast<Context*>(context);
  return guarded(known.setup().logger, [&] {
    if (auto link = known.connect(device, handle)) {
      *sendComm = new Comm{.setup = known.sharedSetup(), .link = std::move(link)};
    }
    return Result::kSuccess;
  });
}

Result connectV10(int device, void*, void* handle, void** sendComm, void** deviceComm) {
  return connect(processContext(), device, handle, sendComm, deviceComm);
}

Result accept(void* listenComm, void** recvComm, void**) {
  *recvComm = nullptr;
  ListenComm& known = *static_cast<ListenComm*>(listenComm);
  return guarded(known.setup->logger, [&] {
    if (auto accepted = known.listener.accept()) {
      *recvComm = new Comm{.setup = known.setup, .link = std::move(accepted->link)};
    }
    return Result::kSuccess;
  });
}

Result regMr(void*, void*, size_t, int type, void** mhandle) {
  *mhandle = nullptr;
  return type == kPointerHost ? Result::kSuccess : Result::kInternalError;
}

Result deregMr(void*, void*) { return Result::kSuccess; }

void requireFits(size_t size) {
  if (size > INT_MAX) {
    throw net::Error(net::Fault::kUsage, "",
                     "a transfer of " + std::to_string(size) + " bytes: want at most maxP2pBytes, " +
                         std::to_string(kMaxTransferBytes));
  }
}

Result isend(void* comm, void* data, size_t size, int, void*, void*, void** request) {
  // NCCL may pass a hint in *request; what it reads is the result.
  *request = nullptr;
  Comm& known = *static_cast<Comm*>(comm);
  return guarded(known.setup->logger, [&] {
    requireFits(size);
    *request = known.link->isend(data, size);
    return Result::kSuccess;
  });
}

Result irecv(void* comm, int n, void** data, size_t* sizes, int*, void**, void**, void** request) {
  *request = nullptr;
  Comm& known = *static_cast<Comm*>(comm);
  if (n != 1) {
    logLine(known.setup->logger, LogLevel::kWarn, "grouped receives are not offered (maxRecvs is 1)");
    return Result::kInternalError;
  }
  return guarded(known.setup->logger, [&] {
    requireFits(sizes[0]);
    *request = known.link->irecv(data[0], sizes[0]);
    return Result::kSuccess;
  });
}

Result iflush(void*, int, void**, int*, void**, void** request) {
  *request = nullptr;
  return Result::kInternalError;  // host memory needs none, so NCCL does not call it
}

Logger loggerOf(const net::Request&) { return Library::instance().current()->logger; }

Result test(void* request, int* done, int* sizes) {
  *done = 0;
  auto* known = static_cast<net::Request*>(request);
  try {
    const net::Status status = known->link().test(known);
    if (status.done) {
      *done = 1;
      if (sizes != nullptr) {
        *sizes = static_cast<int>(status.bytes);
      }
    }
    return Result::kSuccess;
  } catch (...) {
    return guarded(loggerOf(*known), []() -> Result { throw; });
  }
}

Result closeComm(void* comm) {
  delete static_cast<Comm*>(comm);
  return Result::kSuccess;
}

Result closeListen(void* comm) {
  delete static_cast<ListenComm*>(comm);
  return Result::kSuccess;
}

template <typename Properties>
constexpr NetWithContext<Properties> makeTable() {
  return {.name = kName,
          .init = init,
          .devices = devices,
          .getProperties = getProperties<Properties>,
          .listen = listen,
          .connect = connect,
          .accept = accept,
          .regMr = regMr,
          .regMrDmaBuf = nullptr,
          .deregMr = deregMr,
          .isend = isend,
          .irecv = irecv,
          .iflush = iflush,
          .test = test,
          .closeSend = closeComm,
          .closeRecv = closeComm,
          .closeListen = closeListen,
          .getDeviceMr = nullptr,
          .irecvConsumed = nullptr,
          .makeVDevice = nullptr,
          .finalize = finalize,
          .setNetAttr = nullptr};
}

}  // namespace

}  // namespace baguarun::nccl

namespace nccl = baguarun::nccl;

#pragma GCC visibility push(default)
extern "C" {
extern const nccl::NetV10 ncclNetPlugin_v10;
extern const nccl::NetV11 ncclNetPlugin_v11;
extern const nccl::NetV12 ncclNetPlugin_v12;
}
#pragma GCC visibility pop

const nccl::NetV10 ncclNetPlugin_v10{.name = nccl::kName,
                                     .init = nccl::initV10,
                                     .devices = nccl::devices,
                                     .getProperties = nccl::getProperties<nccl::PropertiesV10>,
                                     .listen = nccl::listenV10,
                                     .connect = nccl::connectV10,
                                     .accept = nccl::accept,
                                     .regMr = nccl::regMr,
                                     .regMrDmaBuf = nullptr,
                                     .deregMr = nccl::deregMr,
                                     .isend = nccl::isend,
                                     .irecv = nccl::irecv,
                                     .iflush = nccl::iflush,
                                     .test = nccl::test,
                                     .closeSend = nccl::closeComm,
                                     .closeRecv = nccl::closeComm,
                                     .closeListen = nccl::closeListen,
                                     .getDeviceMr = nullptr,
                                     .irecvConsumed = nullptr,
                                     .makeVDevice = nullptr};
const nccl::NetV11 ncclNetPlugin_v11 = nccl::makeTable<nccl::PropertiesV11>();
const nccl::NetV12 ncclNetPlugin_v12 = nccl::makeTable<nccl::PropertiesV12>();
