// What the plugin keeps between NCCL's calls: the devices, the settings and connections under way.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nccl_plugin/nccl_net.h"
#include "net/connector.h"
#include "net/env.h"
#include "net/interfaces.h"
#include "net/link.h"
#include "net/listener.h"

namespace baguarun::nccl {

// A network interface as NCCL sees it. The texts live as long as the process: NCCL keeps pointers to them.
struct Device {
  net::Interface interface;
  const char* name;
  const char* pciPath;  // nullptr: virtual
  int speedMbps;
};

// Settings and devices as the environment had them when the first communicator of a generation was made.
struct Setup {
  net::Env env;
  std::vector<Device> devices;
  Logger logger;
};

// One communicator's use of the plugin (from version 11 on), or the process's (version 10).
// Threads: any; each connection by one at a time.
class Context {
 public:
  explicit Context(std::shared_ptr<const Setup> setup) : setup_(std::move(setup)) {}

  const Setup& setup() const noexcept { return *setup_; }
  const std::shared_ptr<const Setup>& sharedSetup() const noexcept { return setup_; }
  const Device& device(int number) const;

  // Begins or continues the connection that `handle` (kHandleBytes, as listen() filled it) leads to. nullptr:
  // not yet. What was begun and never finished ends with the context.
  std::unique_ptr<net::Link> connect(int device, void* handle);

 private:
  std::shared_ptr<net::Connector> findOrBegin(int device, void* handle);

  std::shared_ptr<const Setup> setup_;
  std::mutex mutex_;
  uint64_t lastTicket_ = 0;
  std::map<uint64_t, std::shared_ptr<net::Connector>> connectors_;
};

struct ListenComm {
  std::shared_ptr<const Setup> setup;
  net::Listener listener;
};

// A connection in one direction, sending or receiving.
struct Comm {
  std::shared_ptr<const Setup> setup;
  std::unique_ptr<net::Link> link;
};

// Listens on the device and fills `handle` for the peers.
std::unique_ptr<ListenComm> listenOn(const Context& context, int device, void* handle);

// The process's setup. The first of nested acquire() calls reads the environment and the interfaces.
class Library {
 public:
  static Library& instance();

  std::shared_ptr<const Setup> acquire(Logger logger);
  void release();
  // Of the last acquire(). Throws net::Error(kUsage) before the first.
  std::shared_ptr<const Setup> current();

 private:
  const char* intern(const std::string& text);
  Device describe(net::Interface interface);

  std::mutex mutex_;
  int numUsers_ = 0;
  std::shared_ptr<const Setup> setup_;
  std::map<std::string, std::unique_ptr<const std::string>> texts_;
};

}  // namespace baguarun::nccl
