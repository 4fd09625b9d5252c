// An IPv4 or IPv6 address with its port, as a value.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <string>

namespace baguarun::net {

// An endpoint. Threads: a value.
class Address {
 public:
  Address() = default;

  // From the kernel's form; anything but AF_INET and AF_INET6 throws Error(kUsage).
  static Address fromSockaddr(const sockaddr* address);

  // From "10.0.0.1:80", "[fe80::1%eth0]:80" or without port (then 0). Numbers only, no name look-up.
  // Throws Error(kUsage) saying what was found.
  static Address parse(const std::string& text);

  int family() const noexcept { return storage_.any.sa_family; }
  bool isLoopback() const noexcept;
  bool isLinkLocal() const noexcept;

  uint16_t port() const noexcept;
  Address withPort(uint16_t port) const noexcept;

  // IPv6 zone: the interface number that a link-local address is meant on. A number of *this* host.
  uint32_t scopeId() const noexcept;
  Address withScopeId(uint32_t scopeId) const noexcept;

  // Whether both lie in one network whose prefix has `prefixBits` bits.
  bool sharesNetwork(const Address& other, int prefixBits) const noexcept;

  const sockaddr* raw() const noexcept { return &storage_.any; }
  socklen_t rawSize() const noexcept;

  // "10.0.0.1:80" or "[::1]:80".
  std::string toString() const;

  bool operator==(const Address& other) const noexcept;

 private:
  union Storage {
    sockaddr any;
    sockaddr_in v4;
    sockaddr_in6 v6;
  };
  Storage storage_{.v6 = {}};
};

}  // namespace baguarun::net
