// Which network interfaces a job talks over: the rules of NCCL and of Gloo, as a pure function.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "net/address.h"
#include "net/env.h"

namespace baguarun::net {

// One usable address of one interface.
struct Interface {
  std::string name;
  Address address;     // port 0
  int prefixBits = 0;  // length of its network's prefix
  bool isUp = true;    // and joined to something
};

// All IPv4 and IPv6 addresses of this host, in the kernel's order. Throws Error(kSystem).
std::vector<Interface> listInterfaces();

// What to choose by.
struct InterfaceRules {
  // NCCL's syntax: a comma list of name prefixes; a leading "=" makes them whole names, a leading "^"
  // excludes them ("^=docker0,lo"). ":port" behind a name selects InfiniBand ports and means nothing for
  // sockets. Unset: prefix "ib", else the interfaces in the network of `towards`, else all but docker*, lo
  // and virbr*, else docker*, else lo, else virbr*.
  std::optional<std::string> names;
  Family family = Family::kAny;
  std::optional<Address> towards;
};

// The interfaces chosen from `all`, one address each (the first that fits), in the order of `all`. IPv6
// loopback is only used where it is asked for by name and family. Empty where nothing fits.
std::vector<Interface> selectInterfaces(const std::vector<Interface>& all, const InterfaceRules& rules);

// NCCL's choice for this process. Throws Error(kUsage) that lists what there is where nothing fits.
std::vector<Interface> chooseForNccl(const std::vector<Interface>& all, const Env& env);

// Gloo's choice: the interfaces named by GLOO_SOCKET_IFNAME, whole names in the order given, an unknown one
// throws Error(kUsage); without that variable NCCL's choice.
std::vector<Interface> chooseForGloo(const std::vector<Interface>& all, const Env& env);

// Speed in Mbit/s from sysfs; 10000 where the file is missing or the driver does not know, as NCCL assumes.
int interfaceSpeedMbps(const std::string& name, const std::string& sysfs = "/sys/class/net");

// Real path of the device behind the interface, "" for a virtual one.
std::string interfacePciPath(const std::string& name, const std::string& sysfs = "/sys/class/net");

}  // namespace baguarun::net
