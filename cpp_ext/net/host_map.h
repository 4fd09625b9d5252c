// Who is on my host.
#pragma once

#include <string>
#include <vector>

namespace baguarun::net {

// What only processes that can share memory have in common: boot, PID namespace, network namespace and user.
// Throws Error(kSystem).
std::string hostIdentity();

// The ranks by host. A value.
struct HostMap {
  // Ranks of each host, ascending; hosts in the order of their first rank.
  std::vector<std::vector<int>> hosts;
  // Of each rank: its host's place in `hosts`, and its own place there.
  std::vector<int> hostOf;
  std::vector<int> placeOf;

  // From what each rank says of its host. More than `mostPerHost` ranks count as several hosts.
  static HostMap of(const std::vector<std::string>& identities, size_t mostPerHost);

  // Whether all hosts have as many ranks.
  bool isEven() const;
};

}  // namespace baguarun::net
