#include "net/env.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <utility>

#include "net/error.h"

namespace baguarun::net {

namespace {

using Lookup = std::function<const char*(const char*)>;

[[noreturn]] void reject(const char* name, const std::string& found, const std::string& want) {
  throw Error(Fault::kUsage, "", std::string(name) + "=" + found + ": want " + want);
}

uint64_t readNumber(const Lookup& lookup, const char* name, uint64_t fallback, uint64_t least,
                    uint64_t most) {
  const char* text = lookup(name);
  if (text == nullptr || *text == '\0') {
    return fallback;
  }
  uint64_t value = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, value);
  if (error != std::errc{} || stop != end || value < least || value > most) {
    reject(name, text, "a whole number from " + std::to_string(least) + " to " + std::to_string(most));
  }
  return value;
}

std::chrono::milliseconds readSeconds(const Lookup& lookup, const char* name, double fallback) {
  const char* text = lookup(name);
  double seconds = fallback;
  if (text != nullptr && *text != '\0') {
    const char* end = text + std::strlen(text);
    const auto [stop, error] = std::from_chars(text, end, seconds);
    if (error != std::errc{} || stop != end || !(seconds >= 0.1 && seconds <= 86400)) {
      reject(name, text, "seconds from 0.1 to 86400");
    }
  }
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

std::optional<std::string> readText(const Lookup& lookup, const char* name) {
  const char* text = lookup(name);
  return text == nullptr || *text == '\0' ? std::nullopt : std::optional<std::string>(text);
}

template <typename T>
T readOneOf(const Lookup& lookup, const char* name, T fallback,
            std::initializer_list<std::pair<const char*, T>> known, const char* want) {
  const auto text = readText(lookup, name);
  if (!text) {
    return fallback;
  }
  for (const auto& [word, value] : known) {
    if (*text == word) {
      return value;
    }
  }
  reject(name, *text, want);
}

Family readFamily(const Lookup& lookup) {
  return readOneOf(lookup, "NCCL_SOCKET_FAMILY", Family::kAny,
                   {{"AF_INET", Family::kIPv4}, {"AF_INET6", Family::kIPv6}}, "AF_INET or AF_INET6");
}

AllReduceWay readAllReduceWay(const Lookup& lookup) {
  using enum AllReduceWay;
  return readOneOf(lookup, "BAGUA_NET_ALL_REDUCE", kByDistance,
                   {{"auto", kByDistance}, {"ring", kRing}, {"direct", kDirect}}, "auto, ring or direct");
}

}  // namespace

Env Env::read() {
  return read([](const char* name) -> const char* { return std::getenv(name); });
}

Env Env::read(const Lookup& lookup) {
  return Env{
      .numStreams = static_cast<int>(readNumber(lookup, "BAGUA_NET_NSTREAMS", 4, 1, 64)),
      .chunkBytes =
          static_cast<uint32_t>(readNumber(lookup, "BAGUA_NET_CHUNK_BYTES", 128 << 10, 4096, 1 << 20)),
      .secret = readText(lookup, "BAGUA_NET_SECRET").value_or(""),
      .connectTimeout = readSeconds(lookup, "BAGUA_NET_CONNECT_TIMEOUT_S", 60),
      .helloTimeout = readSeconds(lookup, "BAGUA_NET_HELLO_TIMEOUT_S", 10),
      .peerTimeout = readSeconds(lookup, "BAGUA_NET_PEER_TIMEOUT_S", 20),
      .beatTimeout = readSeconds(lookup, "BAGUA_NET_BEAT_TIMEOUT_S", 0),
      .allReduceWay = readAllReduceWay(lookup),
      .ncclIfname = readText(lookup, "NCCL_SOCKET_IFNAME"),
      .glooIfname = readText(lookup, "GLOO_SOCKET_IFNAME"),
      .family = readFamily(lookup),
      .commId = readText(lookup, "NCCL_COMM_ID").value_or(""),
      .hostId = readText(lookup, "NCCL_HOSTID").value_or(""),
  };
}

}  // namespace baguarun::net
