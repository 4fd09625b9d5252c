// The connecting side of a link: a state machine that never blocks.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "net/env.h"
#include "net/hello.h"
#include "net/link.h"

namespace baguarun::net {

// Where to, and as whom.
struct Target {
  Address address;
  Nonce nonce;          // the listener's
  uint64_t sender = 0;  // what to be known by at the other side
  std::string peer;     // the name in errors; the address where empty
};

// Threads: one at a time.
class Connector {
 public:
  // Starts connecting. Throws Error as poll().
  Connector(Target target, const Env& env);
  // Gives up where there is no link yet, and the other side sees it. After fork() the child may do it without
  // harm to the parent's.
  ~Connector();
  Connector(Connector&&) = default;

  // The link once the other side has welcomed all streams; nullptr before. Throws Error: kRemote when nobody
  // listens there or the other side turned us away, kTimeout after env.connectTimeout.
  std::unique_ptr<Link> poll();

  // Readable when poll() may find something to do; call it at least every second while waiting.
  int pollFd() const noexcept { return epoll_.fd(); }

 private:
  struct Stream {
    enum class State { kConnecting, kAwaitingWelcome, kWelcomed };
    Fd fd;
    State state = State::kConnecting;
    HelloBytes hello{};
    std::array<uint8_t, kWelcomeBytes> welcome{};
    size_t received = 0;
  };

  void open(size_t index);
  void advance(size_t index);
  void sayHello(size_t index);
  void hearWelcome(size_t index);
  void agree(const Welcome& welcome);
  [[noreturn]] void fail(Fault fault, const std::string& message) const;

  const Env env_;
  const pid_t ownerPid_;
  const Target target_;
  const Clock::time_point deadline_;
  Nonce linkId_;
  Welcome agreed_;
  Epoll epoll_;
  std::vector<Stream> streams_;
  size_t numWelcomed_ = 0;
};

}  // namespace baguarun::net
