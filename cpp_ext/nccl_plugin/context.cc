#include "nccl_plugin/context.h"

#include <algorithm>
#include <cstring>

#include "net/error.h"

namespace baguarun::nccl {

namespace {

constexpr uint64_t kHandleMagic = 0x3130'7465'4e61'7542;

// What listen() gives to the connecting side. NCCL copies it, and keeps the connecting side's copy between
// its calls of connect().
struct Handle {
  uint64_t magic;
  uint64_t ticket;  // of the connection under way; 0: none yet
  net::Nonce nonce;
  sockaddr_in6 address;  // or a sockaddr_in at its start
};
static_assert(sizeof(Handle) <= kHandleBytes);

Handle readHandle(const void* bytes) {
  Handle handle;
  std::memcpy(&handle, bytes, sizeof(handle));
  if (handle.magic != kHandleMagic) {
    throw net::Error(net::Fault::kUsage, "",
                     "the handle to connect to is not BaguaNet's: does every rank load the same plugin "
                     "(NCCL_NET_PLUGIN)?");
  }
  return handle;
}

}  // namespace

const Device& Context::device(int number) const {
  if (number < 0 || static_cast<size_t>(number) >= setup_->devices.size()) {
    throw net::Error(
        net::Fault::kUsage, "",
        "device " + std::to_string(number) + ": want 0 to " + std::to_string(setup_->devices.size() - 1));
  }
  return setup_->devices[static_cast<size_t>(number)];
}

std::shared_ptr<net::Connector> Context::findOrBegin(int device, void* bytes) {
  Handle handle = readHandle(bytes);
  if (handle.ticket != 0) {
    const std::lock_guard lock(mutex_);
    return connectors_.at(handle.ticket);
  }
  net::Address address = net::Address::fromSockaddr(reinterpret_cast<const sockaddr*>(&handle.address));
  if (address.isLinkLocal()) {
    // The zone in the handle numbers an interface of the listening host; ours is the device's.
    address = address.withScopeId(this->device(device).interface.address.scopeId());
  }
  auto connector = std::make_shared<net::Connector>(
      net::Target{.address = address, .nonce = handle.nonce, .sender = 0, .peer = ""}, setup_->env);
  const std::lock_guard lock(mutex_);
  handle.ticket = ++lastTicket_;
  connectors_[handle.ticket] = connector;
  std::memcpy(bytes, &handle, sizeof(handle));
  return connector;
}

std::unique_ptr<net::Link> Context::connect(int device, void* bytes) {
  const std::shared_ptr<net::Connector> connector = findOrBegin(device, bytes);
  const auto forget = [&] {
    Handle handle = readHandle(bytes);
    const std::lock_guard lock(mutex_);
    connectors_.erase(handle.ticket);
    handle.ticket = 0;
    std::memcpy(bytes, &handle, sizeof(handle));
  };
  try {
    std::unique_ptr<net::Link> link = connector->poll();
    if (link) {
      forget();
    }
    return link;
  } catch (...) {
    forget();
    throw;
  }
}

std::unique_ptr<ListenComm> listenOn(const Context& context, int device, void* bytes) {
  const net::Interface& interface = context.device(device).interface;
  auto comm = std::make_unique<ListenComm>(ListenComm{
      .setup = context.sharedSetup(), .listener = net::Listener(interface.address, context.setup().env)});
  Handle handle{.magic = kHandleMagic, .ticket = 0, .nonce = comm->listener.nonce(), .address = {}};
  const net::Address& address = comm->listener.address();
  std::memcpy(&handle.address, address.raw(), address.rawSize());
  std::memset(bytes, 0, kHandleBytes);
  std::memcpy(bytes, &handle, sizeof(handle));
  return comm;
}

// Never destroyed: NCCL may call until the very end of the process, and the texts must stay.
Library& Library::instance() {
  static Library* const library = new Library;
  return *library;
}

std::shared_ptr<const Setup> Library::acquire(Logger logger) {
  const std::lock_guard lock(mutex_);
  if (numUsers_ == 0) {
    net::Env env = net::Env::read();
    std::vector<Device> devices;
    for (net::Interface& interface : net::chooseForNccl(net::listInterfaces(), env)) {
      devices.push_back(describe(std::move(interface)));
    }
    setup_ = std::make_shared<const Setup>(
        Setup{.env = std::move(env), .devices = std::move(devices), .logger = logger});
  }
  ++numUsers_;
  return setup_;
}

void Library::release() {
  const std::lock_guard lock(mutex_);
  NET_CHECK(numUsers_ > 0);
  --numUsers_;
}

std::shared_ptr<const Setup> Library::current() {
  const std::lock_guard lock(mutex_);
  if (!setup_) {
    throw net::Error(net::Fault::kUsage, "", "the plugin was used before init()");
  }
  return setup_;
}

const char* Library::intern(const std::string& text) {
  std::unique_ptr<const std::string>& kept = texts_[text];
  if (!kept) {
    kept = std::make_unique<const std::string>(text);
  }
  return kept->c_str();
}

Device Library::describe(net::Interface interface) {
  const std::string pciPath = net::interfacePciPath(interface.name);
  return {.interface = interface,
          .name = intern(interface.name),
          .pciPath = pciPath.empty() ? nullptr : intern(pciPath),
          .speedMbps = net::interfaceSpeedMbps(interface.name)};
}

}  // namespace baguarun::nccl
