// Messages of c10d on their way, and how they are told apart. Used by the operations on CPU buckets only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <numeric>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "engine/errors.h"
#include "engine/fail_point.h"
#include "engine/ranges.h"

namespace baguarun::engine {

using Work = c10::intrusive_ptr<c10d::Work>;

// Message tags are 31 bits: round (12), bucket (18), stage (1). The round keeps a message that a failed round
// left behind from being taken for one of a later round.
inline constexpr uint32_t kRoundMask = 0xfff;
inline constexpr size_t kMaxBuckets = size_t{1} << 18;

// All ranks of a group.
inline std::vector<int> everybody(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  std::vector<int> ranks(static_cast<size_t>(group->getSize()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// Where `rank` stands among `ranks`, of which it is one.
inline size_t placeOf(int rank, const std::vector<int>& ranks) {
  return static_cast<size_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

enum class Stage : uint32_t { kScatter = 0, kGather = 1 };

inline int messageTag(uint32_t round, size_t bucket, Stage stage) {
  return static_cast<int>(((round & kRoundMask) << 19) | (static_cast<uint32_t>(bucket) << 1) |
                          static_cast<uint32_t>(stage));
}

// Pending transfers; abort() may come from another thread while one waits.
class Transfers {
 public:
  // What peers 0, 1, ... are called in messages; without it, by their numbers.
  void nameRanks(const std::vector<int>& ranks) { names_ = ranks; }

  // Adds what `run` starts, and names the peer if it cannot.
  template <typename Run>
  void start(const char* verb, size_t peer, const Run& run) {
    Work work;
    try {
      work = run();
    } catch (const std::exception& error) {
      throw CommunicationFailure(failed(verb, peer) + textOf(error));
    }
    add(std::move(work), peer);
  }

  void add(Work work, size_t peer) {
    const std::scoped_lock lock(mutex_);
    if (aborted_) {
      throw CommunicationFailure("aborted");
    }
    pending_.push_back({std::move(work), peer, /*ended=*/false});
  }

  // Waits for the transfer at `position`, once, and names the peer if it fails.
  void wait(size_t position, const char* verb) {
    Entry entry;
    {
      const std::scoped_lock lock(mutex_);
      entry = pending_[position];
    }
    if (entry.ended) {
      return;
    }
    bool completed = false;
    try {
      const WireSpan span(verb, static_cast<int64_t>(entry.peer));
      completed = entry.work->wait();
    } catch (const std::exception& error) {
      throw CommunicationFailure(failed(verb, entry.peer) + textOf(error));
    }
    if (!completed) {
      throw CommunicationFailure(failed(verb, entry.peer) + "aborted");
    }
    const std::scoped_lock lock(mutex_);
    pending_[position].ended = true;
  }

  // Waits for the transfer with `peer`, if there is one.
  void waitFor(size_t peer, const char* verb) {
    for (size_t position = 0; position < pending_.size(); ++position) {
      if (pending_[position].peer == peer) {
        wait(position, verb);
      }
    }
  }

  void waitAll(const char* verb) {
    for (size_t position = 0; position < pending_.size(); ++position) {
      wait(position, verb);
    }
  }

  size_t size() const { return pending_.size(); }

  size_t peer(size_t position) const { return pending_[position].peer; }

  void clear() {
    const std::scoped_lock lock(mutex_);
    pending_.clear();
  }

  void abort() {
    const std::scoped_lock lock(mutex_);
    aborted_ = true;
    for (const Entry& entry : pending_) {
      entry.work->abort();
    }
  }

 private:
  struct Entry {
    Work work;
    size_t peer = 0;
    bool ended = false;
  };

  std::string failed(const char* verb, size_t peer) const {
    const size_t rank = names_.empty() ? peer : static_cast<size_t>(names_[peer]);
    return std::string(verb) + " rank " + std::to_string(rank) + ": ";
  }

  std::vector<int> names_;
  std::mutex mutex_;
  std::vector<Entry> pending_;
  bool aborted_ = false;
};

}  // namespace baguarun::engine
