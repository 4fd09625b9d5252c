// What is behind a Communicator. Internal to its sources.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "net/communicator.h"
#include "net/host_map.h"
#include "net/mailbox.h"
#include "net/shm_carrier.h"
#include "net/shm_group.h"
#include "net/verdict.h"

namespace baguarun::net {

// Threads: as Communicator.
class Communicator::Implementation {
 public:
  Implementation(const Options& options, const BlobExchange& exchange);
  ~Implementation();

  // Runs a collective: `go` must have ended by `deadline`. What it throws breaks the communicator.
  template <class Go>
  void collective(Clock::time_point deadline, Go go) {
    const Verdict::Drive drive(*verdict_);
    verdict_->check();
    if (shm_ != nullptr) {
      shm_->setDeadline(deadline);
    }
    try {
      go();
    } catch (const Error& error) {
      breakWith(error);
    }
  }

  std::shared_ptr<Message> post(bool isSend, void* data, size_t bytes, int peer, uint32_t tag);
  bool progress();
  void sleep(Clock::time_point until);
  void wake() noexcept;
  void abort(const std::string& reason) noexcept;
  void* allocate(size_t bytes);
  void checkRoot(int root) const;

  int rank() const noexcept { return options_.rank; }
  int size() const noexcept { return options_.size; }
  const Verdict& verdict() const noexcept { return *verdict_; }
  // Where all ranks are on one host.
  ShmGroup* local() const noexcept { return shm_.get(); }

 private:
  // A process of this host that has ended without a word, and when that is a failure.
  struct Gone {
    int place;
    Clock::time_point since;
  };

  void meet(const BlobExchange& exchange);
  void watch();
  [[noreturn]] void breakWith(const Error& error);
  bool advance();
  bool receive(PacketSink& sink);
  void checkGone();
  void hear(uint64_t number);
  std::string name(int rank) const;

  const Options options_;
  const std::shared_ptr<Verdict> verdict_ = std::make_shared<Verdict>();
  HostMap map_;
  std::unique_ptr<ShmGroup> shm_;
  std::vector<std::unique_ptr<Carrier>> carriers_;  // by rank
  std::unique_ptr<Mailbox> mailbox_;
  Epoll epoll_;
  Fd bell_;
  std::atomic<bool> isRung_{false};
  std::vector<Gone> gone_;
  size_t nextCarrier_ = 0;
};

}  // namespace baguarun::net
