#include "net/meeting.h"

#include <algorithm>
#include <sstream>

#include "net/error.h"

namespace baguarun::net {

namespace {

// A ShmGroup is made in as many exchanges; who makes none takes part in them with nothing.
constexpr int kShmExchanges = 2;

// Between two looks whether the making is given up.
constexpr std::chrono::milliseconds kLook{20};

std::string oneLine(std::string text) {
  std::ranges::replace(text, '\n', ' ');
  return text;
}

std::string rankName(size_t rank) { return "rank " + std::to_string(rank); }

std::vector<std::string> exchangeChecked(const BlobExchange& exchange, const std::string& mine, int size) {
  std::vector<std::string> all = exchange(mine);
  if (all.size() != static_cast<size_t>(size)) {
    throw Error(Fault::kUsage, "",
                "the exchange gave " + std::to_string(all.size()) + " blobs: want one of each of " +
                    std::to_string(size) + " ranks");
  }
  return all;
}

// Tells the others how it went here, and throws where it went wrong for anybody. The own error first: it says
// more.
void agree(const BlobExchange& exchange, const std::optional<Error>& failure, int size) {
  const std::vector<std::string> outcomes =
      exchangeChecked(exchange, failure.has_value() ? oneLine(failure->what()) + " " : "", size);
  if (failure.has_value()) {
    throw *failure;
  }
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (!outcomes[rank].empty()) {
      throw Error(Fault::kRemote, rankName(rank), outcomes[rank]);
    }
  }
}

HostMap mapHosts(const Communicator::Options& options, const BlobExchange& exchange) {
  const std::string host = !options.shareMemory   ? rankName(static_cast<size_t>(options.rank))
                           : options.host.empty() ? hostIdentity() + "/" + options.env.hostId
                                                  : options.host;
  const std::string group = oneLine(options.nonce) + "\n" + std::to_string(options.size) + "\n" +
                            std::to_string(options.arenaBytes);
  const std::vector<std::string> all = exchangeChecked(exchange, group + "\n" + oneLine(host), options.size);
  std::vector<std::string> hosts;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const size_t end = all[rank].rfind('\n');
    const std::string theirs = all[rank].substr(0, end);
    if (const std::string first = all[0].substr(0, all[0].rfind('\n')); theirs != first) {
      throw Error(
          Fault::kUsage, rankName(rank),
          "its group is (nonce, size, arena bytes) " + oneLine(theirs) + ", rank 0's is " + oneLine(first));
    }
    hosts.push_back(all[rank].substr(end + 1));
  }
  return HostMap::of(hosts, ShmGroup::kMaxRanks);
}

// Fetches the cards of all; a rank that has none says why.
void shareCards(Meeting& meeting, const Communicator::Options& options, const BlobExchange& exchange) {
  std::optional<Error> failure;
  try {
    meeting.mesh = std::make_unique<Mesh>(options.rank, options.size, options.env);
  } catch (const Error& error) {
    failure = error;
  }
  const std::vector<std::string> cards =
      exchangeChecked(exchange, failure.has_value() ? "" : meeting.mesh->card(), options.size);
  agree(exchange, failure, options.size);
  meeting.mesh->meet(cards);
}

std::unique_ptr<ShmGroup> shareMemory(const HostMap& map, const Communicator::Options& options,
                                      const BlobExchange& exchange) {
  const auto self = static_cast<size_t>(options.rank);
  const std::vector<int>& ranks = map.hosts[static_cast<size_t>(map.hostOf[self])];
  int exchanged = 0;
  const BlobExchange among = [&](const std::string& mine) {
    ++exchanged;
    const std::vector<std::string> all = exchangeChecked(exchange, mine, options.size);
    std::vector<std::string> theirs;
    for (const int rank : ranks) {
      theirs.push_back(all[static_cast<size_t>(rank)]);
    }
    return theirs;
  };
  std::optional<Error> failure;
  std::unique_ptr<ShmGroup> group;
  if (ranks.size() > 1) {
    try {
      group = std::make_unique<ShmGroup>(ShmGroup::Options{.rank = map.placeOf[self],
                                                           .size = static_cast<int>(ranks.size()),
                                                           .nonce = options.nonce,
                                                           .timeout = options.timeout,
                                                           .arenaBytes = options.arenaBytes,
                                                           .labels = ranks,
                                                           .check = options.check},
                                         among);
    } catch (const Error& error) {
      failure = error;
    }
  }
  while (exchanged < kShmExchanges) {
    among("");
  }
  agree(exchange, failure, options.size);
  return group;
}

// Waits until this rank's control links are there.
void joinControl(Meeting& meeting, const Communicator::Options& options) {
  const auto end = Clock::now() + options.timeout;
  meeting.control =
      std::make_unique<Control>(options.rank, options.size, *meeting.mesh, options.env.beatTimeout);
  while (!meeting.control->isComplete()) {
    if (meeting.mesh->progress()) {
      continue;
    }
    if (Clock::now() >= end) {
      throw Error(Fault::kTimeout, meeting.mesh->name(meeting.control->firstMissing()),
                  "no connection within " + std::to_string(options.timeout.count()) +
                      " ms: is there a firewall, or the wrong interface (NCCL_SOCKET_IFNAME)?");
    }
    if (options.check) {
      options.check();
    }
    waitReadable(meeting.mesh->pollFd(), kLook);
  }
}

}  // namespace

Meeting meet(const Communicator::Options& options, const BlobExchange& exchange) {
  Meeting meeting;
  if (options.size == 1) {
    meeting.map = HostMap::of({""}, 1);
    return meeting;
  }
  meeting.map = mapHosts(options, exchange);
  if (meeting.map.hosts.size() > 1) {
    shareCards(meeting, options, exchange);
  }
  meeting.shm = shareMemory(meeting.map, options, exchange);
  if (meeting.mesh != nullptr) {
    std::optional<Error> failure;
    try {
      joinControl(meeting, options);
    } catch (const Error& error) {
      failure = error;
    }
    agree(exchange, failure, options.size);
  }
  return meeting;
}

}  // namespace baguarun::net
