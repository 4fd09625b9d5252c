#include "net/address.h"

#include <arpa/inet.h>
#include <net/if.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <span>

#include "net/error.h"

namespace baguarun::net {

namespace {

std::span<const uint8_t> bytesOf(const Address& address) {
  if (address.family() == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address.raw());
    return {reinterpret_cast<const uint8_t*>(&v4->sin_addr), sizeof(v4->sin_addr)};
  }
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(address.raw());
  return {reinterpret_cast<const uint8_t*>(&v6->sin6_addr), sizeof(v6->sin6_addr)};
}

uint16_t parsePort(const std::string& text, const std::string& whole) {
  uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (error != std::errc{} || end != text.data() + text.size()) {
    throw Error(Fault::kUsage, "", "address \"" + whole + "\": want a port from 0 to 65535");
  }
  return port;
}

// Splits "[host]:port", "host:port", "[host]" and bare hosts.
std::pair<std::string, std::string> splitHostPort(const std::string& text) {
  if (!text.empty() && text.front() == '[') {
    const size_t close = text.find(']');
    if (close == std::string::npos || (close + 1 < text.size() && text[close + 1] != ':')) {
      throw Error(Fault::kUsage, "", "address \"" + text + "\": want [IPv6]:port");
    }
    return {text.substr(1, close - 1), close + 1 < text.size() ? text.substr(close + 2) : "0"};
  }
  const size_t colon = text.find(':');
  if (colon == std::string::npos || text.find(':', colon + 1) != std::string::npos) {
    return {text, "0"};
  }
  return {text.substr(0, colon), text.substr(colon + 1)};
}

}  // namespace

Address Address::fromSockaddr(const sockaddr* address) {
  Address result;
  switch (address->sa_family) {
    case AF_INET:
      std::memcpy(&result.storage_.v4, address, sizeof(sockaddr_in));
      return result;
    case AF_INET6:
      std::memcpy(&result.storage_.v6, address, sizeof(sockaddr_in6));
      return result;
    default:
      throw Error(Fault::kUsage, "",
                  "address family " + std::to_string(address->sa_family) + ": want IPv4 or IPv6");
  }
}

Address Address::parse(const std::string& text) {
  auto [host, portText] = splitHostPort(text);
  const uint16_t port = parsePort(portText, text);
  Address result;
  in_addr v4{};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) {
    result.storage_.v4 = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = v4, .sin_zero = {}};
    return result;
  }
  const size_t percent = host.find('%');
  const std::string zone = percent == std::string::npos ? "" : host.substr(percent + 1);
  in6_addr v6{};
  if (inet_pton(AF_INET6, host.substr(0, percent).c_str(), &v6) != 1) {
    throw Error(Fault::kUsage, "", "address \"" + text + "\": want a numeric IPv4 or IPv6 address");
  }
  const uint32_t scopeId = zone.empty() ? 0 : if_nametoindex(zone.c_str());
  if (!zone.empty() && scopeId == 0) {
    throw Error(Fault::kUsage, "", "address \"" + text + "\": there is no interface " + zone);
  }
  result.storage_.v6 = {};
  result.storage_.v6.sin6_family = AF_INET6;
  result.storage_.v6.sin6_port = htons(port);
  result.storage_.v6.sin6_addr = v6;
  result.storage_.v6.sin6_scope_id = scopeId;
  return result;
}

bool Address::isLoopback() const noexcept {
  if (family() == AF_INET) {
    return bytesOf(*this)[0] == 127;
  }
  return family() == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&storage_.v6.sin6_addr);
}

bool Address::isLinkLocal() const noexcept {
  return family() == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&storage_.v6.sin6_addr);
}

uint16_t Address::port() const noexcept {
  return ntohs(family() == AF_INET ? storage_.v4.sin_port : storage_.v6.sin6_port);
}

Address Address::withPort(uint16_t port) const noexcept {
  Address result = *this;
  (family() == AF_INET ? result.storage_.v4.sin_port : result.storage_.v6.sin6_port) = htons(port);
  return result;
}

uint32_t Address::scopeId() const noexcept { return family() == AF_INET6 ? storage_.v6.sin6_scope_id : 0; }

Address Address::withScopeId(uint32_t scopeId) const noexcept {
  Address result = *this;
  if (family() == AF_INET6) {
    result.storage_.v6.sin6_scope_id = scopeId;
  }
  return result;
}

bool Address::sharesNetwork(const Address& other, int prefixBits) const noexcept {
  if (family() != other.family()) {
    return false;
  }
  const auto left = bytesOf(*this);
  const auto right = bytesOf(other);
  for (size_t index = 0; index < left.size() && prefixBits > 0; ++index, prefixBits -= 8) {
    const uint8_t mask = prefixBits >= 8 ? 0xff : static_cast<uint8_t>(0xff << (8 - prefixBits));
    if ((left[index] & mask) != (right[index] & mask)) {
      return false;
    }
  }
  return true;
}

socklen_t Address::rawSize() const noexcept {
  return family() == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
}

std::string Address::toString() const {
  char text[INET6_ADDRSTRLEN] = "?";
  if (family() != AF_INET && family() != AF_INET6) {
    return "(no address)";
  }
  inet_ntop(family(), bytesOf(*this).data(), text, sizeof(text));
  std::string result = family() == AF_INET ? std::string(text) : std::string("[").append(text).append("]");
  return result.append(":").append(std::to_string(port()));
}

bool Address::operator==(const Address& other) const noexcept {
  return family() == other.family() && port() == other.port() && scopeId() == other.scopeId() &&
         std::ranges::equal(bytesOf(*this), bytesOf(other));
}

}  // namespace baguarun::net
