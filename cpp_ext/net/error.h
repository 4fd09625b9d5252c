// The one error of the transport: what a caller may recover from, with the peer it concerns.
//
// Broken invariants of our own are asserts (`NET_CHECK`), never an Error.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>

namespace baguarun::net {

// What the catcher should do about it.
enum class Fault {
  kSystem,   // this machine refused (no descriptors, no memory, no such interface): repair it
  kRemote,   // the peer is gone, silent or broke the protocol: form a new group without it
  kUsage,    // the caller's mistake (sizes that do not match, a bad setting): repair the program
  kAborted,  // somebody called abort(): unwind
  kTimeout,  // a deadline of the caller's passed: as kRemote, or wait longer
};

// A recoverable fault. what() is "<peer>: <what happened>", or only what happened where no peer is concerned.
class Error : public std::runtime_error {
 public:
  Error(Fault fault, std::string peer, const std::string& message)
      : std::runtime_error(peer.empty() ? message : peer + ": " + message),
        fault_(fault),
        peer_(std::move(peer)) {}

  Fault fault() const noexcept { return fault_; }

  // The name of the peer that the fault concerns ("rank 3 (10.0.0.4:4711)"); empty where it concerns none.
  const std::string& peer() const noexcept { return peer_; }

  // Whether the peer is merely silent, by the words, which are all that other ranks are told.
  bool isSilence() const { return message().find(kSilence) != std::string::npos; }
  static constexpr const char* kSilence = "has given no sign of life for ";

  // what() without the peer.
  std::string message() const { return peer_.empty() ? what() : what() + peer_.size() + 2; }

 private:
  Fault fault_;
  std::string peer_;
};

}  // namespace baguarun::net

// An invariant of this library: what fails here is a bug of ours, never the peer's or the caller's doing.
#define NET_CHECK(condition)                                                                     \
  do {                                                                                           \
    if (!(condition)) {                                                                          \
      std::fprintf(stderr, "baguarun::net bug at %s:%d: %s does not hold\n", __FILE__, __LINE__, \
                   #condition);                                                                  \
      std::abort();                                                                              \
    }                                                                                            \
  } while (false)
