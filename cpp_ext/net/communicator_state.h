// What is behind a Communicator. Internal to its sources.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "net/call.h"
#include "net/communicator.h"
#include "net/levels.h"
#include "net/mailbox.h"
#include "net/meeting.h"
#include "net/verdict.h"

namespace baguarun::net {

// Threads: as Communicator.
class Communicator::Implementation : private WireContext {
 public:
  Implementation(const Options& options, const BlobExchange& exchange);
  ~Implementation() override;

  // Runs a collective that must have ended by `deadline`: on one host `inside(group)`, between several
  // `across(levels, call)`, alone `alone()`. What they throw breaks the communicator.
  template <class Inside, class Across, class Alone>
  void collective(Call call, Clock::time_point deadline, Inside inside, Across across, Alone alone) {
    const Verdict::Drive drive(*verdict_);
    enter(call, deadline);
    try {
      if (levels_ != nullptr) {
        across(*levels_, call_);
      } else if (met_.shm != nullptr) {
        inside(*met_.shm);
      } else {
        alone();
      }
    } catch (const Error& error) {
      breakWith(error, true);
    }
  }

  void lookAheadBy(std::function<std::optional<NextAllReduce>()> find) { findNext_ = std::move(find); }
  std::shared_ptr<Message> post(bool isSend, void* data, size_t bytes, int peer, uint32_t tag);
  bool progress();
  bool hasUnsent() const {
    return verdict_->isBroken() ? met_.control != nullptr && !hasTold_ : mailbox_->hasUnsent();
  }
  void sleep(Clock::time_point until);
  void wake() noexcept;
  void abort(const std::string& reason) noexcept;
  void fail(const Error& error) noexcept;
  std::shared_ptr<void> allocate(size_t bytes);
  size_t roomLeft() const noexcept;
  void checkRoot(int root) const;

  int rank() const noexcept { return options_.rank; }
  int size() const noexcept { return options_.size; }
  std::chrono::milliseconds beatInterval() const noexcept {
    const bool beats = options_.beats && met_.control != nullptr;
    return beats ? options_.env.beatTimeout / 4 : std::chrono::milliseconds(0);
  }
  const Verdict& verdict() const noexcept { return *verdict_; }
  uint64_t bytesSent() const noexcept { return met_.mesh == nullptr ? 0 : met_.mesh->bytesSent(); }

 private:
  // A process of this host that has ended, and since when.
  struct Gone {
    int place;
    Clock::time_point since;
  };

  // WireContext
  Mesh& mesh() override { return *met_.mesh; }
  AllReduceWay allReduceWay() const noexcept override { return options_.env.allReduceWay; }
  void await(int rank) override;
  CallTrail ownTrail(uint64_t sequence) const override { return met_.control->ownTrail(sequence); }
  std::byte* scratch(size_t bytes) override;
  std::optional<Ahead> nextAllReduce() override;

  void watch();
  void makeCarriers();
  void enter(Call call, Clock::time_point deadline);
  [[noreturn]] void breakWith(const Error& error, bool isInCall);
  void tellOthers(Clock::duration patience) noexcept;
  bool waitBesides(int place);
  bool advance();
  bool advanceOnce();
  Carrier* carrierTo(int rank);
  bool receive(PacketSink& sink);
  void checkGone();
  void checkAwaited(int rank);
  void checkAny();
  bool hasNothingLeft(int rank);
  bool isNear(int rank) const;
  bool hasNearPackets() const;
  void doze(Clock::time_point until);
  void hear(uint64_t number);
  std::string name(int rank) const;
  int placeOf(int rank) const { return met_.map.placeOf[static_cast<size_t>(rank)]; }
  const std::vector<int>& neighbours() const;

  const Options options_;
  const int ownerPid_;
  const std::shared_ptr<Verdict> verdict_ = std::make_shared<Verdict>();
  Meeting met_;
  std::unique_ptr<Levels> levels_;                  // where there are several hosts
  std::vector<std::unique_ptr<Carrier>> carriers_;  // by rank
  std::unique_ptr<Mailbox> mailbox_;
  Epoll epoll_;
  Fd bell_;
  std::atomic<bool> isRung_{false};
  std::vector<Gone> gone_;
  size_t nextCarrier_ = 0;
  std::vector<std::byte> scratch_;
  uint64_t numCalls_ = 0;
  Call call_;
  std::function<std::optional<NextAllReduce>()> findNext_;
  std::atomic<bool> hasTold_{false};
};

}  // namespace baguarun::net
