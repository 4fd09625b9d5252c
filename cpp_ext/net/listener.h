// The accepting side of links: a port on which members of the job are let in and strangers are dropped.
//
// Nothing blocks. Whoever is not of the job (wrong magic, nonce or secret, too slow, too chatty) is dropped
// without an answer and without an effect on the others; the number of strangers held at a time is bounded,
// and so is what each of them may occupy: a descriptor and 96 bytes for `helloTimeout`.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "net/env.h"
#include "net/hello.h"
#include "net/link.h"

namespace baguarun::net {

// Threads: one at a time.
class Listener {
 public:
  struct Accepted {
    std::unique_ptr<Link> link;
    uint64_t sender;  // what the connecting side wants to be known by
  };

  static constexpr size_t kUsualStrangers = 128;

  // Listens on `address`; port 0 takes a free one. Of more than `maxStrangers` that have not said their hello
  // some are dropped. Throws Error(kSystem): no such address here, port taken.
  Listener(const Address& address, const Env& env, size_t maxStrangers = kUsualStrangers);
  // Turns away who is on the way in. After fork() the child may do it without harm to the parent's.
  ~Listener();
  Listener(Listener&&) = default;

  // With the port that was taken.
  const Address& address() const noexcept { return address_; }
  // To be handed to the members of the job, and to nobody else.
  const Nonce& nonce() const noexcept { return nonce_; }

  // The next link whose streams have all arrived, if there is one. Its peer is named by its address.
  std::optional<Accepted> accept();

  // Readable when accept() may find something to do; call it at least every second while waiting.
  int pollFd() const noexcept { return epoll_.fd(); }

 private:
  // Connected, and has not said all of its hello.
  struct Stranger {
    Fd fd;
    HelloBytes hello{};
    size_t received = 0;
    Clock::time_point deadline;
  };
  // A link of which some streams have arrived.
  struct Assembly {
    std::vector<Fd> streams;
    size_t arrived = 0;
    Welcome agreed;
    uint64_t sender = 0;
    Clock::time_point deadline;
  };

  using Strangers = std::map<int, Stranger>;  // by descriptor

  void acceptStrangers();
  void listenTo(int fd);
  Strangers::iterator drop(Strangers::iterator stranger);
  void admit(Stranger stranger, const Hello& hello);
  void dropOverdue();
  std::optional<Accepted> takeComplete();

  const Env env_;
  const size_t maxStrangers_;
  const pid_t ownerPid_;
  Fd fd_;
  Address address_;
  Nonce nonce_;
  Epoll epoll_;
  Strangers strangers_;
  std::map<Nonce, Assembly> assemblies_;
  std::set<Nonce> linksBegun_;  // by members: who overheard their hellos cannot begin a link with them
};

}  // namespace baguarun::net
