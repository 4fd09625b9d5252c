#include "c10d/store_exchange.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "c10d/live_groups.h"
#include "c10d/operation.h"
#include "net/error.h"

namespace baguarun::backend {

using net::Clock;
using net::Error;
using net::Fault;
using std::chrono::microseconds;
using std::chrono::milliseconds;

namespace {

constexpr const char* kFailedKey = "failed";

// Between two looks whether the others have come, or failed.
constexpr microseconds kFirstPause{250};
constexpr microseconds kLongestPause{64'000};

}  // namespace

StoreExchange::StoreExchange(c10::intrusive_ptr<::c10d::Store> store, int rank, int size,
                             milliseconds timeout)
    : store_(std::move(store)), rank_(rank), size_(size), timeout_(timeout), deadline_(timeAfter(timeout)) {}

std::string StoreExchange::key(uint64_t round, int rank) const {
  return "exchange/" + std::to_string(round) + "/" + std::to_string(rank);
}

std::string StoreExchange::claimKey() const { return "claim/" + std::to_string(rank_); }

std::vector<std::string> StoreExchange::keys(uint64_t round) const {
  std::vector<std::string> all;
  for (int rank = 0; rank < size_; ++rank) {
    all.push_back(key(round, rank));
  }
  return all;
}

std::string StoreExchange::get(const std::string& key) {
  const std::vector<uint8_t> bytes = store_->get(key);
  return {bytes.begin(), bytes.end()};
}

std::vector<std::string> StoreExchange::exchange(const std::string& mine) {
  const uint64_t round = round_++;
  store_->set(key(round, rank_), mine);
  awaitAll(round);
  std::vector<std::string> all;
  if (store_->hasExtendedApi()) {
    for (const std::vector<uint8_t>& bytes : store_->multiGet(keys(round))) {
      all.emplace_back(bytes.begin(), bytes.end());
    }
  } else {
    for (const std::string& each : keys(round)) {
      all.push_back(get(each));
    }
  }
  // All have come to this round, so nobody reads what was said in the last one any more.
  if (round > 0) {
    remove({key(round - 1, rank_)});
  }
  if (round == 1) {
    remove({claimKey()});
  }
  return all;
}

void StoreExchange::finish() {
  if (round_ == 1) {
    remove({claimKey()});
  }
  if (store_->add("readers", 1) == size_) {
    remove(keys(round_ - 1));
    remove({"readers"});
  }
}

void StoreExchange::claim() {
  // Two processes of one rank would overwrite each other's blobs.
  if (store_->add(claimKey(), 1) != 1) {
    throw Error(Fault::kUsage, "",
                "rank " + std::to_string(rank_) + " of " + std::to_string(size_) +
                    " is taken: two processes have it, or the store's prefix was used before");
  }
}

void StoreExchange::awaitAll(uint64_t round) {
  // Store::wait() would do, but it prints a warning for every wait that ends without the key.
  const std::vector<std::string> wanted = keys(round);
  for (microseconds pause = kFirstPause; !store_->check(wanted); pause = std::min(2 * pause, kLongestPause)) {
    const auto left = std::chrono::duration_cast<microseconds>(deadline_ - Clock::now());
    LiveGroups::ofProcess().throwIfInterrupted();
    if (left <= microseconds::zero()) {
      throwTimeout(round);
    }
    if (pause == kLongestPause) {
      throwFailure();
    }
    std::this_thread::sleep_for(std::min(left, pause));
  }
}

void StoreExchange::throwFailure() {
  if (store_->check({kFailedKey})) {
    throw Error(Fault::kRemote, "", get(kFailedKey));
  }
}

void StoreExchange::throwTimeout(uint64_t round) {
  std::string missing;
  for (int rank = 0; rank < size_; ++rank) {
    if (!store_->check({key(round, rank)})) {
      missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
    }
  }
  throw Error(Fault::kTimeout, "",
              "of " + std::to_string(size_) + " ranks, these did not come within " +
                  std::to_string(timeout_.count()) + " ms: " + missing);
}

void StoreExchange::remove(const std::vector<std::string>& keys) {
  try {
    for (const std::string& each : keys) {
      store_->deleteKey(each);
    }
  } catch (const c10::NotImplementedError&) {
    // A store that cannot delete keeps some hundred bytes per rank.
  }
}

void StoreExchange::failed(const std::string& reason) noexcept {
  try {
    store_->set(kFailedKey, "rank " + std::to_string(rank_) + " could not join: " + reason);
  } catch (const std::exception&) {
    // The reason is on its way to this rank's caller; the others end by their timeout.
  }
}

}  // namespace baguarun::backend
