#include "net/interfaces.h"

#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>

#include "net/error.h"

namespace baguarun::net {

namespace {

constexpr int kUnknownSpeedMbps = 10000;
// Up, and joined to something: a NIC without its cable and a bridge whose ports have gone only are up. As
// NCCL has it.
constexpr unsigned kUsable = IFF_UP | IFF_RUNNING;

int countPrefixBits(const sockaddr* mask) {
  if (mask == nullptr) {
    return 0;
  }
  const uint8_t* bytes = nullptr;
  size_t size = 0;
  if (mask->sa_family == AF_INET) {
    bytes = reinterpret_cast<const uint8_t*>(&reinterpret_cast<const sockaddr_in*>(mask)->sin_addr);
    size = sizeof(in_addr);
  } else if (mask->sa_family == AF_INET6) {
    bytes = reinterpret_cast<const uint8_t*>(&reinterpret_cast<const sockaddr_in6*>(mask)->sin6_addr);
    size = sizeof(in6_addr);
  }
  int bits = 0;
  for (size_t index = 0; index < size; ++index) {
    bits += std::popcount(bytes[index]);
  }
  return bits;
}

std::vector<std::string> splitList(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) {
    if (!part.empty()) {
      parts.push_back(part);
    }
  }
  return parts;
}

// NCCL's "^=name:port,name" taken apart.
struct NameRule {
  bool excludes = false;
  bool exact = false;
  std::vector<std::string> names;

  explicit NameRule(std::string text) {
    if (!text.empty() && text.front() == '^') {
      excludes = true;
      text.erase(0, 1);
    }
    if (!text.empty() && text.front() == '=') {
      exact = true;
      text.erase(0, 1);
    }
    names = splitList(text);
    for (std::string& name : names) {
      name.resize(std::min(name.find(':'), name.size()));
    }
  }

  bool admits(const std::string& interface) const {
    const bool listed = std::ranges::any_of(names, [&](const std::string& name) {
      return exact ? interface == name : interface.starts_with(name);
    });
    return listed != excludes;
  }
};

bool fitsFamily(const Interface& candidate, Family family) {
  switch (family) {
    case Family::kAny:
      return true;
    case Family::kIPv4:
      return candidate.address.family() == AF_INET;
    case Family::kIPv6:
      return candidate.address.family() == AF_INET6;
  }
  return false;
}

// The first fitting address of every interface that `admits`.
template <typename Admits>
std::vector<Interface> pick(const std::vector<Interface>& all, Family family, Admits admits) {
  std::vector<Interface> chosen;
  for (const Interface& candidate : all) {
    const bool isIPv6Loopback = candidate.address.family() == AF_INET6 && candidate.address.isLoopback();
    if (!candidate.isUp || !fitsFamily(candidate, family) || (isIPv6Loopback && family != Family::kIPv6) ||
        !admits(candidate)) {
      continue;
    }
    const bool known =
        std::ranges::any_of(chosen, [&](const Interface& other) { return other.name == candidate.name; });
    if (!known) {
      chosen.push_back(candidate);
    }
  }
  return chosen;
}

// NCCL also takes a host's name, which it looks up; which interface leads there is only a preference.
std::optional<Address> numericAddress(const std::string& text) {
  try {
    return Address::parse(text);
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::string describe(const std::vector<Interface>& all) {
  std::string text;
  for (const Interface& candidate : all) {
    text += (text.empty() ? "" : ", ") + candidate.name + " " + candidate.address.toString() +
            (candidate.isUp ? "" : " (down)");
  }
  return text.empty() ? "no interface at all" : text;
}

}  // namespace

std::vector<Interface> listInterfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) {
    throw Error(Fault::kSystem, "",
                std::string("cannot list the network interfaces: ") + std::strerror(errno));
  }
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  std::vector<Interface> all;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    const sockaddr* address = entry->ifa_addr;
    if (address == nullptr || (address->sa_family != AF_INET && address->sa_family != AF_INET6)) {
      continue;
    }
    all.push_back({.name = entry->ifa_name,
                   .address = Address::fromSockaddr(address),
                   .prefixBits = countPrefixBits(entry->ifa_netmask),
                   .isUp = (entry->ifa_flags & kUsable) == kUsable});
  }
  return all;
}

std::vector<Interface> selectInterfaces(const std::vector<Interface>& all, const InterfaceRules& rules) {
  const auto byName = [&](const std::string& text) {
    const NameRule rule(text);
    return pick(all, rules.family, [&](const Interface& candidate) { return rule.admits(candidate.name); });
  };
  if (rules.names.has_value()) {
    return byName(*rules.names);
  }
  if (auto chosen = byName("ib"); !chosen.empty()) {
    return chosen;
  }
  if (rules.towards.has_value()) {
    auto chosen = pick(all, rules.family, [&](const Interface& candidate) {
      return candidate.prefixBits > 0 &&
             candidate.address.sharesNetwork(*rules.towards, candidate.prefixBits);
    });
    if (!chosen.empty()) {
      return chosen;
    }
  }
  for (const char* names : {"^docker,lo,virbr", "docker", "lo", "virbr"}) {
    if (auto chosen = byName(names); !chosen.empty()) {
      return chosen;
    }
  }
  return {};
}

std::vector<Interface> chooseForNccl(const std::vector<Interface>& all, const Env& env) {
  auto chosen = selectInterfaces(
      all, {.names = env.ncclIfname, .family = env.family, .towards = numericAddress(env.commId)});
  if (chosen.empty()) {
    throw Error(Fault::kUsage, "",
                "NCCL_SOCKET_IFNAME=" + env.ncclIfname.value_or("(unset)") +
                    " leaves no interface of the wanted address family; there are: " + describe(all));
  }
  return chosen;
}

std::vector<Interface> chooseForGloo(const std::vector<Interface>& all, const Env& env) {
  if (!env.glooIfname.has_value()) {
    return chooseForNccl(all, env);
  }
  std::vector<Interface> chosen;
  for (const std::string& name : splitList(*env.glooIfname)) {
    const auto found =
        selectInterfaces(all, {.names = "=" + name, .family = env.family, .towards = std::nullopt});
    if (found.empty()) {
      throw Error(
          Fault::kUsage, "",
          "GLOO_SOCKET_IFNAME names " + name + ", which is no usable interface; there are: " + describe(all));
    }
    chosen.push_back(found.front());
  }
  if (chosen.empty()) {
    throw Error(Fault::kUsage, "",
                "GLOO_SOCKET_IFNAME=" + *env.glooIfname + " names no interface; there are: " + describe(all));
  }
  return chosen;
}

int interfaceSpeedMbps(const std::string& name, const std::string& sysfs) {
  std::ifstream file(sysfs + "/" + name + "/speed");
  int speed = 0;
  // Virtual interfaces fail to read, or say -1.
  return file >> speed && speed > 0 ? speed : kUnknownSpeedMbps;
}

std::string interfacePciPath(const std::string& name, const std::string& sysfs) {
  const std::unique_ptr<char, decltype(&std::free)> path(
      realpath((sysfs + "/" + name + "/device").c_str(), nullptr), std::free);
  return path ? std::string(path.get()) : "";
}

}  // namespace baguarun::net
