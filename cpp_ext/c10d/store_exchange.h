// How the ranks of a new group learn of each other: through the store that torch gives them.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "net/socket.h"

namespace baguarun::backend {

// One rank's side of the exchanges that make a group. Keys are removed when all have read them. Each question
// to the store costs a round trip to rank 0 and back, which is what makes groups slow. Threads: one.
class StoreExchange {
 public:
  // All exchanges together take up to `timeout`.
  StoreExchange(c10::intrusive_ptr<::c10d::Store> store, int rank, int size,
                std::chrono::milliseconds timeout);

  // Every rank's blob, in rank order. All ranks call it the same number of times. Throws net::Error: kTimeout
  // naming the ranks that did not come, kUsage for ranks that disagree about the group, kRemote with the
  // reason of a rank that failed().
  std::vector<std::string> exchange(const std::string& mine);

  // Before the first exchange. Throws net::Error (kUsage) if another process has this rank.
  void claim();

  // After the last exchange, of which there was one at least, if all went well here.
  void finish();

  // Lets the others, who would wait in vain, end with `reason`.
  void failed(const std::string& reason) noexcept;

 private:
  std::string key(uint64_t round, int rank) const;
  std::string claimKey() const;
  std::vector<std::string> keys(uint64_t round) const;
  std::string get(const std::string& key);
  void awaitAll(uint64_t round);
  void throwFailure();
  [[noreturn]] void throwTimeout(uint64_t round);
  void remove(const std::vector<std::string>& keys);

  const c10::intrusive_ptr<::c10d::Store> store_;
  const int rank_;
  const int size_;
  const std::chrono::milliseconds timeout_;
  const net::Clock::time_point deadline_;
  uint64_t round_ = 0;
};

}  // namespace baguarun::backend
