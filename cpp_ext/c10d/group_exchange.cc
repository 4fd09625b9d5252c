#include "c10d/group_exchange.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <utility>

#include "net/waits.h"

namespace baguarun::backend {

GroupExchange::GroupExchange(std::shared_ptr<Driver> group, std::chrono::milliseconds timeout)
    : group_(std::move(group)), timeout_(timeout) {}

std::vector<std::string> GroupExchange::exchange(const std::string& mine) {
  std::vector<std::string> all;
  const auto collective = std::make_shared<Collective>(
      [&](net::Communicator& group, Clock::time_point deadline) {
        const uint64_t length = mine.size();
        std::vector<uint64_t> lengths(static_cast<size_t>(group.size()));
        group.allGather(&length, lengths.data(), sizeof(length), deadline);
        const uint64_t longest = std::ranges::max(lengths);
        std::string own = mine;
        own.resize(longest);
        std::string blobs(longest * lengths.size(), '\0');
        if (longest > 0) {
          group.allGather(own.data(), blobs.data(), longest, deadline);
        }
        for (size_t rank = 0; rank < lengths.size(); ++rank) {
          all.push_back(blobs.substr(rank * longest, lengths[rank]));
        }
      },
      timeout_);
  const net::Waiting waiting;
  group_->run(collective);
  if (const std::exception_ptr error = collective->error()) {
    std::rethrow_exception(error);
  }
  return all;
}

}  // namespace baguarun::backend
