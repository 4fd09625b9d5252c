#include "net/host_map.h"

#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <map>

#include "net/error.h"
#include "net/socket.h"

namespace baguarun::net {

namespace {

std::string namespaceNumber(const std::string& kind) {
  const std::string path = "/proc/self/ns/" + kind;
  struct stat facts;
  if (stat(path.c_str(), &facts) != 0) {
    throw Error(Fault::kSystem, "", "stat of " + path + ": " + errnoText(errno));
  }
  return std::to_string(facts.st_ino);
}

}  // namespace

std::string hostIdentity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  // Hidden in some containers, where all else may be the same on every host.
  if (!(file >> boot)) {
    utsname names{};
    uname(&names);
    boot = names.nodename;
  }
  return boot + "/" + namespaceNumber("pid") + "/" + namespaceNumber("net") + "/" + std::to_string(geteuid());
}

HostMap HostMap::of(const std::vector<std::string>& identities, size_t mostPerHost) {
  HostMap map;
  std::map<std::string, size_t> known;  // the host that the next rank of this identity joins
  for (size_t rank = 0; rank < identities.size(); ++rank) {
    auto found = known.find(identities[rank]);
    if (found == known.end() || map.hosts[found->second].size() == mostPerHost) {
      map.hosts.emplace_back();
      found = known.insert_or_assign(identities[rank], map.hosts.size() - 1).first;
    }
    std::vector<int>& ranks = map.hosts[found->second];
    map.hostOf.push_back(static_cast<int>(found->second));
    map.placeOf.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(static_cast<int>(rank));
  }
  return map;
}

bool HostMap::isEven() const {
  return std::ranges::all_of(hosts, [&](const auto& ranks) { return ranks.size() == hosts[0].size(); });
}

}  // namespace baguarun::net
