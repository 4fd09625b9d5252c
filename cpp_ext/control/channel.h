// The worker's end of its control channel (baguarun/contract.py): a thread that reads it whatever training
// does. Knows neither torch nor Python.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace baguarun::control {

// As `Topic` in the contract: those that the thread itself looks at.
enum class Topic : uint8_t { kAbort = 2, kSwitch = 3, kLeave = 4, kPing = 5, kPong = 19 };

struct Message {
  uint8_t topic = 0;
  std::string body;
};

// Answers PING, also with what `waits` says and what was noted last, tells `onAbort` of every ABORT at once,
// and keeps all else until it is asked for. When the channel closes the agent is gone, and the process ends
// at once with status 1.
//
// A process has one at a time. A child made by fork() has none: it closes the descriptor, and `next` and
// `send` fail there. Threads: any.
class Channel {
 public:
  struct Calls {
    // With the body of an ABORT.
    std::function<void(const std::string& body)> onAbort;
    // Whether the process waits for other ranks; nullopt: unknown.
    std::function<std::optional<bool>()> waits;
    // For how long it has waited for them so far; nullopt: unknown.
    std::function<std::optional<std::chrono::nanoseconds>()> waited;
  };

  // Takes over `fd`, a connected stream socket, and closes it in programs that this one executes. `calls` are
  // made on the channel's thread and must not block or throw.
  Channel(int fd, Calls calls);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // The oldest message that has not been handed out; waits for one.
  std::optional<Message> next(std::chrono::milliseconds timeout);
  // The newest SWITCH, LEAVE or ABORT that `next` has not handed out.
  std::optional<Message> pending() const;
  // Whether the newest PING's lease still runs; also if none has told of one.
  bool isLeased() const;
  // Whether newcomers are on their way, as the newest PING says.
  bool expectsNewcomers() const;
  // So many steps are committed in the World of `generation`: told with the answers to PING. Wakes nobody.
  void note(uint64_t generation, uint64_t steps);
  // Sends bytes that the contract has framed. Throws std::system_error.
  void send(std::string_view framed);

 private:
  struct State;
  static void readOn(const std::shared_ptr<State>& state);
  std::shared_ptr<State> state_;
};

// The number that follows `"name":` in a flat JSON object, else 0.
uint64_t numberIn(const std::string& json, const std::string& name);
// The text that follows `"name":`, as it is written there, else "".
std::string textIn(const std::string& json, const std::string& name);

}  // namespace baguarun::control
