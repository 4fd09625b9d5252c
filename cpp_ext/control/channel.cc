#include "control/channel.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace baguarun::control {

namespace {

constexpr size_t kHeaderBytes = 5;
constexpr int kNone = -1;

// The descriptor that a forked child closes. Its handler may not take a lock.
std::atomic<int> openDescriptor{kNone};

void closeInChild() {
  if (const int fd = openDescriptor.exchange(kNone); fd != kNone) {
    close(fd);
  }
}

[[noreturn]] void throwErrno(const char* what) {
  throw std::system_error(errno, std::generic_category(), std::string("control channel: ") + what);
}

bool isOrder(uint8_t topic) {
  return topic == static_cast<uint8_t>(Topic::kAbort) || topic == static_cast<uint8_t>(Topic::kSwitch) ||
         topic == static_cast<uint8_t>(Topic::kLeave);
}

std::string frame(Topic topic, std::string_view body) {
  const uint32_t length = htonl(static_cast<uint32_t>(body.size()));
  std::string framed(sizeof(length), '\0');
  std::memcpy(framed.data(), &length, sizeof(length));
  framed += static_cast<char>(topic);
  return framed.append(body);
}

// Appends a member to a flat JSON object that has lost its closing brace.
void append(std::string& object, std::string_view name, std::string_view value) {
  if (object.find(':') != std::string::npos) {
    object += ',';
  }
  object.append("\"").append(name).append("\":").append(value);
}

// As JSON writes it, whatever the program's locale.
template <typename Number>
std::string text(Number number) {
  std::array<char, 32> digits;
  return {digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr};
}

// Steps that are committed, when the last one was, and how long the process had waited for others by then.
struct Progress {
  uint64_t generation = 0;
  uint64_t steps = 0;
  std::chrono::steady_clock::time_point at;
  std::optional<std::chrono::nanoseconds> waited;
};

// Time from one to the other in which it did not wait, if both are of one World.
std::optional<std::chrono::nanoseconds> busyBetween(const Progress& before, const Progress& now) {
  if (before.generation != now.generation || !before.waited || !now.waited) {
    return std::nullopt;
  }
  return std::max(now.at - before.at - (*now.waited - *before.waited), std::chrono::nanoseconds{0});
}

// Cuts the first whole message off `bytes`.
std::optional<Message> cut(std::string& bytes) {
  if (bytes.size() < kHeaderBytes) {
    return std::nullopt;
  }
  uint32_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof(length));
  const size_t end = kHeaderBytes + ntohl(length);
  if (bytes.size() < end) {
    return std::nullopt;
  }
  Message message{static_cast<uint8_t>(bytes[4]), bytes.substr(kHeaderBytes, end - kHeaderBytes)};
  bytes.erase(0, end);
  return message;
}

}  // namespace

struct Channel::State {
  const pid_t pid = getpid();
  int fd = kNone;
  int stopFd = kNone;
  Calls calls;
  std::thread thread;
  std::atomic<bool> stops{false};

  std::mutex sending;
  mutable std::mutex mutex;
  std::condition_variable arrived;
  // Guarded by the mutex: messages and their numbers, and the newest order among them.
  std::deque<std::pair<uint64_t, Message>> queue;
  uint64_t numArrived = 0;
  std::optional<std::pair<uint64_t, Message>> order;
  std::atomic<bool> hasOrder{false};
  // Guarded by the mutex: as noted last, and as told last.
  Progress noted;
  Progress told;
  // Guarded by the mutex: none was told of before the first PING.
  std::optional<std::chrono::steady_clock::time_point> leasedUntil;
  std::atomic<bool> expectsNewcomers{false};

  ~State() {
    close(fd);
    close(stopFd);
  }

  bool isForked() const { return getpid() != pid; }

  void refuseFork() const {
    if (isForked()) {
      throw std::system_error(std::make_error_code(std::errc::not_connected),
                              "control channel: it belongs to the process that forked this one");
    }
  }

  void take(Message message) {
    if (message.topic == static_cast<uint8_t>(Topic::kPing)) {
      noteLease(message.body);
      expectsNewcomers = message.body.find("\"newcomers\":true") != std::string::npos;
      write(frame(Topic::kPong, answer(std::move(message.body))));
      return;
    }
    if (message.topic == static_cast<uint8_t>(Topic::kAbort)) {
      calls.onAbort(message.body);
    }
    {
      const std::scoped_lock lock(mutex);
      const uint64_t number = ++numArrived;
      if (isOrder(message.topic)) {
        order.emplace(number, message);
        hasOrder = true;
      }
      queue.emplace_back(number, std::move(message));
    }
    arrived.notify_all();
  }

  void noteLease(const std::string& body) {
    if (body.find("\"lease_ms\":") != std::string::npos) {
      const std::chrono::milliseconds left(numberIn(body, "lease_ms"));
      const std::scoped_lock lock(mutex);
      leasedUntil = std::chrono::steady_clock::now() + left;
    }
  }

  // The body of a PING and what there is to say.
  std::string answer(std::string body) {
    body.erase(std::min(body.rfind('}'), body.size()));
    const std::optional<bool> waits = calls.waits();
    append(body, "waits", waits ? (*waits ? "true" : "false") : "null");
    const std::scoped_lock lock(mutex);
    if (noted.generation != 0) {
      append(body, "generation", text(noted.generation));
      append(body, "steps", text(noted.steps));
      const auto busy = busyBetween(told, noted);
      append(body, "busy_s", busy ? text(std::chrono::duration<double>(*busy).count()) : "null");
      told = noted;
    }
    return body + "}";
  }

  // False: the other side is gone, or `stop`.
  bool write(std::string_view bytes) {
    const std::scoped_lock lock(sending);
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent >= 0) {
        bytes.remove_prefix(static_cast<size_t>(sent));
      } else if (errno == EAGAIN) {
        pollfd writable{fd, POLLOUT, 0};
        poll(&writable, 1, -1);
      } else if (errno != EINTR) {
        return false;
      }
    }
    return true;
  }
};

Channel::Channel(int fd, Calls calls) : state_(std::make_shared<State>()) {
  static const int registered = pthread_atfork(nullptr, nullptr, closeInChild);
  if (registered != 0) {
    errno = registered;
    throwErrno("pthread_atfork");
  }
  if (fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
    throwErrno("not an open descriptor");
  }
  int none = kNone;
  if (!openDescriptor.compare_exchange_strong(none, fd)) {
    errno = EBUSY;
    throwErrno("this process has one already");
  }
  state_->fd = fd;
  state_->stopFd = eventfd(0, EFD_CLOEXEC);
  state_->calls = std::move(calls);
  // Signals are for the threads of the program.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  state_->thread = std::thread([state = state_] { readOn(state); });
  pthread_setname_np(state_->thread.native_handle(), "bagua-control");
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Channel::~Channel() {
  if (state_->isForked()) {
    // Its thread exists in the parent only: nothing of it can be destroyed here.
    new std::shared_ptr<State>(state_);
    return;
  }
  state_->stops = true;
  eventfd_write(state_->stopFd, 1);
  state_->thread.join();
  int own = state_->fd;
  openDescriptor.compare_exchange_strong(own, kNone);
}

void Channel::readOn(const std::shared_ptr<State>& state) {
  std::string bytes;
  std::array<char, 4096> chunk;
  for (;;) {
    std::array<pollfd, 2> ready{pollfd{state->fd, POLLIN, 0}, pollfd{state->stopFd, POLLIN, 0}};
    poll(ready.data(), ready.size(), -1);
    if (state->stops) {
      return;
    }
    const ssize_t got = recv(state->fd, chunk.data(), chunk.size(), MSG_DONTWAIT);
    if (got > 0) {
      bytes.append(chunk.data(), static_cast<size_t>(got));
      while (auto message = cut(bytes)) {
        state->take(std::move(*message));
      }
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
      dprintf(STDERR_FILENO, "baguarun: the agent of this worker (pid %d) is gone; the worker ends\n",
              static_cast<int>(state->pid));
      _exit(1);
    }
  }
}

std::optional<Message> Channel::next(std::chrono::milliseconds timeout) {
  state_->refuseFork();
  std::unique_lock lock(state_->mutex);
  if (!state_->arrived.wait_for(lock, timeout, [this] { return !state_->queue.empty(); })) {
    return std::nullopt;
  }
  auto [number, message] = std::move(state_->queue.front());
  state_->queue.pop_front();
  if (state_->order && state_->order->first == number) {
    state_->order.reset();
    state_->hasOrder = false;
  }
  return std::move(message);
}

std::optional<Message> Channel::pending() const {
  if (!state_->hasOrder || state_->isForked()) {
    return std::nullopt;
  }
  const std::scoped_lock lock(state_->mutex);
  return state_->order ? std::optional(state_->order->second) : std::nullopt;
}

bool Channel::isLeased() const {
  const std::scoped_lock lock(state_->mutex);
  return !state_->leasedUntil || std::chrono::steady_clock::now() < *state_->leasedUntil;
}

bool Channel::expectsNewcomers() const { return state_->expectsNewcomers; }

void Channel::note(uint64_t generation, uint64_t steps) {
  if (state_->isForked()) {
    return;
  }
  const Progress progress{generation, steps, std::chrono::steady_clock::now(), state_->calls.waited()};
  const std::scoped_lock lock(state_->mutex);
  state_->noted = progress;
}

void Channel::send(std::string_view framed) {
  state_->refuseFork();
  if (!state_->write(framed)) {
    throwErrno("the agent is gone");
  }
}

uint64_t numberIn(const std::string& json, const std::string& name) {
  const std::string key = "\"" + name + "\":";
  size_t at = json.find(key);
  if (at == std::string::npos) {
    return 0;
  }
  at = json.find_first_not_of(' ', at + key.size());
  uint64_t number = 0;
  if (at != std::string::npos) {
    std::from_chars(json.data() + at, json.data() + json.size(), number);
  }
  return number;
}

std::string textIn(const std::string& json, const std::string& name) {
  const std::string key = "\"" + name + "\":";
  size_t at = json.find(key);
  at = at == std::string::npos ? at : json.find('"', at + key.size());
  if (at == std::string::npos) {
    return "";
  }
  size_t end = at + 1;
  while (end < json.size() && json[end] != '"') {
    end += json[end] == '\\' ? 2 : 1;
  }
  return json.substr(at + 1, std::min(end, json.size()) - at - 1);
}

}  // namespace baguarun::control
