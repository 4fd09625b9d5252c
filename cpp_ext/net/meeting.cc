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

// Where it went wrong for anybody. The own error first: it says more.
void throwFirst(const std::optional<Error>& failure, const std::vector<std::string>& outcomes) {
  if (failure.has_value()) {
    throw *failure;
  }
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (!outcomes[rank].empty()) {
      throw Error(Fault::kRemote, rankName(rank), outcomes[rank]);
    }
  }
}

// Tells the others how it went here, and throws where it went wrong for anybody.
void agree(const BlobExchange& exchange, const std::optional<Error>& failure, int size) {
  throwFirst(failure,
             exchangeChecked(exchange, failure.has_value() ? oneLine(failure->what()) + " " : "", size));
}

// What a rank tells all others of itself, in lines.
struct Introduction {
  std::string group;    // three lines, which must be those of rank 0: nonce, size, arena bytes
  std::string host;     // ranks with the same one share memory
  std::string card;     // two lines: how its mesh is reached
  std::string failure;  // why it has none, which matters where there are several hosts

  std::string pack() const {
    return group + "\n" + oneLine(host) + "\n" + (card.empty() ? "\n" : card) + "\n" + oneLine(failure);
  }

  static Introduction unpack(const std::string& blob) {
    std::istringstream stream(blob);
    const auto lines = [&](int count) {
      std::string text;
      std::string line;
      for (int number = 0; number < count && std::getline(stream, line); ++number) {
        text += (number > 0 ? "\n" : "") + line;
      }
      return text;
    };
    Introduction it;
    it.group = lines(3);
    it.host = lines(1);
    it.card = lines(2);
    it.failure = lines(1);
    return it;
  }
};

std::string groupText(const Communicator::Options& options) {
  return oneLine(options.nonce) + "\n" + std::to_string(options.size) + "\n" +
         std::to_string(options.arenaBytes);
}

std::string hostText(const Communicator::Options& options) {
  if (!options.shareMemory) {
    return rankName(static_cast<size_t>(options.rank));
  }
  return options.host.empty() ? hostIdentity() + "/" + options.env.hostId : options.host;
}

// Finds out who is on which host, and how the ranks of others are reached.
void introduce(Meeting& meeting, const Communicator::Options& options, const BlobExchange& exchange) {
  Introduction mine{.group = groupText(options), .host = hostText(options), .card = "", .failure = ""};
  std::optional<Error> failure;
  try {
    meeting.mesh = std::make_unique<Mesh>(options.rank, options.size, options.env);
    mine.card = meeting.mesh->card();
  } catch (const Error& error) {
    failure = error;
    mine.failure = error.what();
  }
  std::vector<std::string> hosts;
  std::vector<std::string> cards;
  std::vector<std::string> outcomes;
  std::string first;
  for (const std::string& blob : exchangeChecked(exchange, mine.pack(), options.size)) {
    const Introduction it = Introduction::unpack(blob);
    if (hosts.empty()) {
      first = it.group;
    }
    if (it.group != first) {
      throw Error(
          Fault::kUsage, rankName(hosts.size()),
          "its group is (nonce, size, arena bytes) " + oneLine(it.group) + ", rank 0's is " + oneLine(first));
    }
    hosts.push_back(it.host);
    cards.push_back(it.card);
    outcomes.push_back(it.failure);
  }
  meeting.map = HostMap::of(hosts, ShmGroup::kMaxRanks);
  if (meeting.map.hosts.size() == 1) {
    meeting.mesh.reset();
    return;
  }
  throwFirst(failure, outcomes);
  meeting.mesh->meet(cards);
}

// Nothing on a rank that is alone on its host, which takes part in the exchanges. `failure` is set where it
// went wrong; an exchange that fails throws.
std::unique_ptr<ShmGroup> shareMemory(const HostMap& map, const Communicator::Options& options,
                                      const BlobExchange& exchange, std::optional<Error>& failure) {
  const auto self = static_cast<size_t>(options.rank);
  const std::vector<int>& ranks = map.hosts[static_cast<size_t>(map.hostOf[self])];
  int exchanged = 0;
  bool isExchanging = false;
  const BlobExchange among = [&](const std::string& mine) {
    isExchanging = true;
    const std::vector<std::string> all = exchangeChecked(exchange, mine, options.size);
    isExchanging = false;
    ++exchanged;
    std::vector<std::string> theirs;
    for (const int rank : ranks) {
      theirs.push_back(all[static_cast<size_t>(rank)]);
    }
    return theirs;
  };
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
      if (isExchanging) {
        throw;
      }
      failure = error;
    }
  }
  while (exchanged < kShmExchanges) {
    among("");
  }
  return group;
}

// Waits until this rank's control links are there.
void joinControl(Meeting& meeting, const Communicator::Options& options) {
  const auto end = Clock::now() + options.timeout;
  meeting.control = std::make_unique<Control>(options.rank, options.size, *meeting.mesh,
                                              options.beats ? options.env.beatTimeout : Clock::duration(0));
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
  introduce(meeting, options, exchange);
  std::optional<Error> failure;
  if (meeting.map.hosts.size() < static_cast<size_t>(options.size)) {
    meeting.shm = shareMemory(meeting.map, options, exchange, failure);
  }
  if (meeting.mesh != nullptr) {
    // Also where memory could not be shared: others would wait for this rank.
    try {
      joinControl(meeting, options);
    } catch (const Error& error) {
      failure = failure.has_value() ? failure : error;
    }
  }
  agree(exchange, failure, options.size);
  return meeting;
}

}  // namespace baguarun::net
