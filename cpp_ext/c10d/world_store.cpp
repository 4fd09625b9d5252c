#include "c10d/world_store.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>

#include "c10d/live_groups.h"
#include "net/waits.h"

namespace baguarun::backend {

using ::c10d::TCPStore;
using std::chrono::milliseconds;

namespace {

// Between two looks whether the World has been given up.
constexpr milliseconds kLook{5};
// Between two looks whether somebody has set a key.
constexpr std::chrono::microseconds kFirstPause{200};
constexpr std::chrono::microseconds kLongestPause{5'000};

void throwIfInterrupted() {
  if (const auto why = LiveGroups::ofProcess().interruption()) {
    C10_THROW_ERROR(DistStoreError, "the World is given up: " + *why);
  }
}

}  // namespace

// The thread that owns the TCPStore, and what it is asked. Outlives the WorldStore while a call hangs.
struct WorldStore::Caller {
  struct Task {
    std::function<void()> run;
    bool done = false;
    std::exception_ptr error;
  };

  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by the mutex.
  std::deque<std::shared_ptr<Task>> queue;
  bool busy = false;
  bool stops = false;
  // Used by the thread alone.
  c10::intrusive_ptr<TCPStore> store;
  std::thread thread;

  static void serve(const std::shared_ptr<Caller>& self) {
    std::unique_lock lock(self->mutex);
    for (;;) {
      self->changed.wait(lock, [&] { return self->stops || !self->queue.empty(); });
      if (self->stops) {
        break;
      }
      const auto task = std::move(self->queue.front());
      self->queue.pop_front();
      self->busy = true;
      lock.unlock();
      try {
        task->run();
      } catch (...) {
        task->error = std::current_exception();
      }
      // What it captured may go with whoever gave it up.
      task->run = nullptr;
      lock.lock();
      self->busy = false;
      task->done = true;
      self->changed.notify_all();
    }
    lock.unlock();
    self->store.reset();
  }

  void run(std::function<void()> ask) {
    throwIfInterrupted();
    const net::Waiting waiting;
    const auto task = std::make_shared<Task>(Task{std::move(ask), false, nullptr});
    std::unique_lock lock(mutex);
    queue.push_back(task);
    changed.notify_all();
    while (!changed.wait_for(lock, kLook, [&] { return task->done; })) {
      throwIfInterrupted();
    }
    if (task->error) {
      std::rethrow_exception(task->error);
    }
  }

  ~Caller() {
    if (thread.joinable()) {
      thread.detach();
    }
  }
};

WorldStore::WorldStore(const std::string& host, uint16_t port, std::optional<int> listener,
                       milliseconds timeout)
    : Store(timeout), caller_(std::make_shared<Caller>()) {
  ::c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = listener.has_value();
  options.masterListenFd = listener;
  options.waitWorkers = false;
  options.timeout = timeout;
  caller_->thread = std::thread([caller = caller_] { Caller::serve(caller); });
  pthread_setname_np(caller_->thread.native_handle(), "bagua-store");
  try {
    auto* const caller = caller_.get();
    caller->run([caller, host, options] { caller->store = c10::make_intrusive<TCPStore>(host, options); });
  } catch (...) {
    {
      const std::scoped_lock lock(caller_->mutex);
      caller_->stops = true;
    }
    caller_->changed.notify_all();
    throw;
  }
}

WorldStore::WorldStore(std::shared_ptr<Caller> caller, const milliseconds& timeout)
    : Store(timeout), caller_(std::move(caller)) {}

WorldStore::~WorldStore() {
  // Clones share the thread.
  if (caller_.use_count() > 2) {
    return;
  }
  bool idle = false;
  {
    const std::scoped_lock lock(caller_->mutex);
    caller_->stops = true;
    idle = !caller_->busy;
  }
  caller_->changed.notify_all();
  if (idle) {
    caller_->thread.join();
  }
}

template <typename Result>
Result WorldStore::call(std::function<Result(TCPStore&)> ask) {
  auto* const caller = caller_.get();
  if constexpr (std::is_void_v<Result>) {
    caller->run([caller, ask = std::move(ask)] { ask(*caller->store); });
  } else {
    // Shared: a call that was given up still writes it.
    const auto result = std::make_shared<Result>();
    caller->run([caller, result, ask = std::move(ask)] { *result = ask(*caller->store); });
    return std::move(*result);
  }
}

c10::intrusive_ptr<::c10d::Store> WorldStore::clone() {
  return c10::intrusive_ptr<WorldStore>::unsafe_steal_from_new(new WorldStore(caller_, timeout_));
}

void WorldStore::set(const std::string& key, const Bytes& value) {
  call<void>([=](TCPStore& store) { store.set(key, value); });
}

WorldStore::Bytes WorldStore::compareSet(const std::string& key, const Bytes& expected,
                                         const Bytes& desired) {
  return call<Bytes>([=](TCPStore& store) { return store.compareSet(key, expected, desired); });
}

WorldStore::Bytes WorldStore::get(const std::string& key) {
  wait({key}, timeout_);
  return call<Bytes>([=](TCPStore& store) { return store.get(key); });
}

int64_t WorldStore::add(const std::string& key, int64_t value) {
  return call<int64_t>([=](TCPStore& store) { return store.add(key, value); });
}

bool WorldStore::deleteKey(const std::string& key) {
  return call<bool>([=](TCPStore& store) { return store.deleteKey(key); });
}

bool WorldStore::check(const std::vector<std::string>& keys) {
  return call<bool>([=](TCPStore& store) { return store.check(keys); });
}

int64_t WorldStore::getNumKeys() {
  return call<int64_t>([](TCPStore& store) { return store.getNumKeys(); });
}

void WorldStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void WorldStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  const auto deadline = timeAfter(timeout);
  for (auto pause = kFirstPause; !check(keys); pause = std::min(2 * pause, kLongestPause)) {
    if (Clock::now() >= deadline) {
      C10_THROW_ERROR(DistStoreError, "wait timeout after " + std::to_string(timeout.count()) +
                                          " ms, keys: " + c10::str(keys));
    }
    std::this_thread::sleep_for(pause);
  }
}

void WorldStore::append(const std::string& key, const Bytes& value) {
  call<void>([=](TCPStore& store) { store.append(key, value); });
}

std::vector<WorldStore::Bytes> WorldStore::multiGet(const std::vector<std::string>& keys) {
  wait(keys, timeout_);
  return call<std::vector<Bytes>>([=](TCPStore& store) { return store.multiGet(keys); });
}

void WorldStore::multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) {
  call<void>([=](TCPStore& store) { store.multiSet(keys, values); });
}

void WorldStore::setTimeout(const milliseconds& timeout) { timeout_ = timeout; }

}  // namespace baguarun::backend
