#include "c10d/driver.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

#include "net/waits.h"

namespace baguarun::backend {

using net::Error;
using net::Fault;
using std::chrono::microseconds;

namespace {

// How long a thread that waits for a message sleeps between two looks while another one is in a collective.
constexpr microseconds kFirstLook{50};
constexpr microseconds kLastLook{10'000};

constexpr std::chrono::seconds kLongestSleep{1};

// How often to see, once a sign of life is due, whether who drives has left.
constexpr int kLooksInBeat = 8;

// For messages whose other end may never come.
constexpr std::chrono::seconds kLongestFarewell{10};

constexpr const char* kClosed = "the process group was destroyed";

// Signals are for the threads of the program.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

Driver::Driver(std::unique_ptr<net::Communicator> communicator, std::string group)
    : pid_(getpid()),
      group_(std::move(group)),
      beatInterval_(communicator->beatInterval()),
      communicator_(std::move(communicator)) {
  communicator_->lookAheadBy([this] { return findNext(); });
}

Driver::~Driver() = default;

bool Driver::isForked() const noexcept { return getpid() != pid_; }

void Driver::refuseFork() const {
  if (isForked()) {
    throw Error(Fault::kUsage, "",
                "the process group belongs to process " + std::to_string(pid_) +
                    "; a child made by fork() cannot use it, make a group in the child");
  }
}

std::shared_ptr<net::Communicator> Driver::communicator(const Lock& /*lock*/) const {
  if (closed_) {
    throw Error(Fault::kAborted, "", kClosed);
  }
  return communicator_;
}

void Driver::beat() {
  if (beatInterval_.count() > 0) {
    const Lock lock(mutex_);
    startThread(lock);
  }
}

void Driver::start(const std::shared_ptr<Collective>& collective) {
  refuseFork();
  Lock lock(mutex_);
  const auto communicator = this->communicator(lock);
  startThread(lock);
  queue_.push_back(collective);
  collective->listed_ = true;
  const bool sleeping = sleeping_;
  lock.unlock();
  if (sleeping) {
    communicator->wake();
  }
  work_.notify_one();
}

void Driver::run(const std::shared_ptr<Collective>& collective) {
  refuseFork();
  Lock lock(mutex_);
  const auto communicator = this->communicator(lock);
  if (driven_ || !queue_.empty()) {
    lock.unlock();
    start(collective);
    wait(*collective, Clock::time_point::max());
    return;
  }
  queue_.push_back(collective);
  collective->listed_ = true;
  step(lock, Clock::now());
  handOver(lock);
}

void Driver::post(const std::shared_ptr<Transfer>& transfer) {
  refuseFork();
  Lock lock(mutex_);
  const auto communicator = this->communicator(lock);
  lock.unlock();
  transfer->message_ = transfer->start_(*communicator);
  lock.lock();
  // The group may have been left meanwhile: throws then.
  this->communicator(lock);
  transfers_.push_back(transfer);
  transfer->listed_ = true;
  if (inCollective_) {
    transfer->attend(false);
  }
  ++numPosted_;
  if (!driven_ && queue_.empty()) {
    // A short message is often through at once.
    step(lock, Clock::time_point::min());
  } else if (sleeping_) {
    communicator->wake();
  }
  handOver(lock);
}

bool Driver::wait(Collective& collective, Clock::time_point deadline) {
  refuseFork();
  // A collective cannot be left half-way, so who wants to give up before its end must not drive.
  if (deadline == Clock::time_point::max()) {
    Lock lock(mutex_);
    while (collective.listed_ && !driven_ && !closed_) {
      step(lock, Clock::now());
    }
    handOver(lock);
  }
  return collective.waitUntil(std::min(deadline, timeAfter(Clock::duration::max())));
}

bool Driver::wait(Transfer& transfer, Clock::time_point deadline) {
  refuseFork();
  {
    Lock lock(mutex_);
    while (transfer.listed_ && !driven_ && !closed_ && queue_.empty() && !transfer.isAbandoned() &&
           Clock::now() < deadline) {
      step(lock, deadline);
    }
    handOver(lock);
  }
  // Whoever drives tells, but not while it is in a collective.
  for (microseconds interval = kFirstLook;; interval = std::min(2 * interval, kLastLook)) {
    if (transfer.waitUntil(deadline, interval)) {
      return true;
    }
    Lock lock(mutex_);
    if (transfer.listed_ && transfer.hasEnded()) {
      const auto it = std::find_if(transfers_.begin(), transfers_.end(),
                                   [&](const auto& other) { return other.get() == &transfer; });
      const std::shared_ptr<Transfer> held = *it;
      transfers_.erase(it);
      held->listed_ = false;
      finish(lock, {{held, nullptr}});
      return true;
    }
    if (Clock::now() >= deadline || transfer.isAbandoned()) {
      return false;
    }
  }
}

void Driver::abandon(Transfer& transfer) {
  transfer.abandon();
  const Lock lock(mutex_);
  if (sleeping_) {
    communicator_->wake();
  }
}

void Driver::abort(const std::string& reason) noexcept {
  if (isForked()) {
    return;
  }
  Lock lock(mutex_);
  const auto communicator = communicator_;
  lock.unlock();
  if (communicator) {
    communicator->abort(reason);
    handOverSafely();
  }
}

void Driver::vouchFor(const std::shared_ptr<Driver>& other) {
  other->isVouchedFor_.store(true);
  Lock lock(mutex_);
  std::erase_if(others_, [](const auto& each) { return each.expired(); });
  others_.push_back(other);
  const auto communicator = communicator_;
  lock.unlock();
  // It may have broken while the other one was made.
  if (const auto error = communicator ? communicator->failure() : std::nullopt) {
    passOn(*error);
  }
}

void Driver::fail(const Error& error) noexcept {
  Lock lock(mutex_);
  const auto communicator = communicator_;
  lock.unlock();
  if (communicator) {
    communicator->fail(error);
    handOverSafely();
  }
  passOn(error);
}

// What else this one breaks with the others find out themselves, or is no affair of theirs.
void Driver::passOn(const Error& error) noexcept {
  if (!error.isSilence()) {
    return;
  }
  Lock lock(mutex_);
  const auto others = others_;
  lock.unlock();
  for (const auto& each : others) {
    if (const auto other = each.lock()) {
      other->fail(error);
    }
  }
}

std::shared_ptr<void> Driver::allocate(size_t bytes) {
  refuseFork();
  const Lock lock(mutex_);
  return communicator(lock)->allocate(bytes);
}

size_t Driver::roomLeft() {
  if (isForked()) {
    return 0;
  }
  const Lock lock(mutex_);
  return closed_ ? 0 : communicator_->roomLeft();
}

// Runs one collective, or looks after the messages once. The mutex is held, and nobody drives, before and
// after; sleeps up to `sleepUntil` where messages do not move.
void Driver::step(Lock& lock, Clock::time_point sleepUntil) {
  std::vector<Ended> ended;
  driven_ = true;
  if (!queue_.empty()) {
    const std::shared_ptr<Collective> next = std::move(queue_.front());
    queue_.pop_front();
    running_ = next->allReduce_;
    attendMessages(lock, false);
    lock.unlock();
    auto error = execute(*next);
    lock.lock();
    attendMessages(lock, true);
    giveOverdueBeat(lock);
    next->listed_ = false;
    ended.push_back({next, std::move(error)});
    takeEnded(ended);
  } else {
    const uint64_t seen = numPosted_;
    const bool moved = look(lock);
    takeEnded(ended);
    const bool nothingNew = queue_.empty() && numPosted_ == seen && !closed_;
    if (!moved && ended.empty() && nothingNew && Clock::now() < sleepUntil) {
      sleeping_ = true;
      lock.unlock();
      communicator_->sleep(std::min(sleepUntil, Clock::now() + kLongestSleep));
      lock.lock();
      sleeping_ = false;
    }
  }
  leave(lock, std::move(ended));
}

// Who runs a collective moves messages, too, but does not look at which have ended.
void Driver::attendMessages(const Lock& /*lock*/, bool isAttended) {
  inCollective_ = !isAttended;
  for (const auto& transfer : transfers_) {
    transfer->attend(isAttended);
  }
}

// Moves messages, and gives a sign of life if one is due.
bool Driver::look(Lock& lock) {
  beatAt_ = Clock::now() + beatInterval_;
  lock.unlock();
  const bool moved = moveMessages();
  lock.lock();
  return moved;
}

// A collective that found everything there has not looked at the links.
void Driver::giveOverdueBeat(Lock& lock) {
  if (beatInterval_.count() > 0 && Clock::now() >= beatAt_) {
    look(lock);
  }
}

// Those who wait are told when nobody drives: what they call then may start and await operations itself.
void Driver::leave(Lock& lock, std::vector<Ended> ended) {
  driven_ = false;
  idle_.notify_all();
  if (!ended.empty()) {
    finish(lock, std::move(ended));
  }
}

// All end before the first callback, which may wait for any of them, or for what has been started since: so
// somebody else drives meanwhile, and gives signs of life.
void Driver::finish(Lock& lock, std::vector<Ended> ended) {
  std::vector<std::function<void()>> then;
  lock.unlock();
  for (auto& [operation, error] : ended) {
    std::ranges::move(operation->end(std::move(error)), std::back_inserter(then));
  }
  lock.lock();
  if (then.empty()) {
    return;
  }
  if (beatInterval_.count() > 0 && !closed_) {
    startThread(lock);
  }
  handOver(lock);
  const bool wasAway = isAway_;
  isAway_ = isAway_ || isProgressThread(lock);
  lock.unlock();
  for (const auto& call : then) {
    call();
  }
  lock.lock();
  if (isProgressThread(lock)) {
    isAway_ = wasAway;
  }
}

std::exception_ptr Driver::execute(Collective& collective) noexcept {
  try {
    collective.body_(*communicator_, timeAfter(collective.timeout_));
  } catch (const Error& error) {
    passOn(error);
    return std::current_exception();
  } catch (const std::exception& error) {
    // Without this the others would wait for this rank in vain.
    communicator_->abort(error.what());
    return std::current_exception();
  }
  return nullptr;
}

// Whatever is in front of the queue runs next, if what runs is a single call; and its data are final, if that
// does not write to them.
std::optional<Collective::AllReduce> Driver::findNext() {
  const auto isBefore = [](const Collective::AllReduce& left, const Collective::AllReduce& right) {
    const auto* const end = static_cast<const std::byte*>(left.data) + left.count * elementBytes(left.dtype);
    return std::less_equal<>()(end, static_cast<const std::byte*>(right.data));
  };
  const Lock lock(mutex_);
  const auto next = queue_.empty() ? std::nullopt : queue_.front()->allReduce_;
  const bool isApart = running_ && next && (isBefore(*running_, *next) || isBefore(*next, *running_));
  return isApart ? next : std::nullopt;
}

bool Driver::moveMessages() noexcept {
  try {
    return communicator_->progress();
  } catch (const Error& error) {
    // Every message ends with that error.
    passOn(error);
    return true;
  }
}

void Driver::takeEnded(std::vector<Ended>& ended) {
  std::erase_if(transfers_, [&](const std::shared_ptr<Transfer>& transfer) {
    if (!transfer->hasEnded()) {
      return false;
    }
    transfer->listed_ = false;
    ended.push_back({transfer, nullptr});
    return true;
  });
}

bool Driver::hasWork(const Lock& /*lock*/) const {
  return !queue_.empty() || !transfers_.empty() || (communicator_ && communicator_->hasUnsent());
}

// Leaves what is still to do to the progress thread.
void Driver::handOver(Lock& lock) {
  if (driven_ || closed_ || !hasWork(lock)) {
    return;
  }
  startThread(lock);
  work_.notify_one();
}

// What broke the group is to reach the other ranks though nobody here has anything else to do.
void Driver::handOverSafely() noexcept {
  try {
    Lock lock(mutex_);
    handOver(lock);
  } catch (const std::exception&) {
    // No thread to be had: they are told by the next call, or when the group is left.
  }
}

void Driver::startThread(const Lock& lock) {
  if (thread_.joinable() && !isProgressThread(lock) && !isAway_) {
    return;
  }
  if (thread_.joinable()) {
    // It is about to call a callback, or is in one.
    former_.push_back(std::move(thread_));
  }
  isAway_ = false;
  const SignalsBlocked blocked;
  // It keeps the driver: the last other reference may be dropped by what it calls at the end of an operation.
  thread_ = std::thread([self = shared_from_this()] { self->loop(); });
  pthread_setname_np(thread_.native_handle(), "baguanet");
}

bool Driver::isProgressThread(const Lock& /*lock*/) const {
  return thread_.get_id() == std::this_thread::get_id();
}

void Driver::loop() {
  net::Waits::ignoreThisThread();
  Lock lock(mutex_);
  while (!threadStops_ && isProgressThread(lock)) {
    if (driven_ || !hasWork(lock)) {
      rest(lock);
    } else {
      step(lock, Clock::time_point::max());
    }
  }
  const auto it = std::ranges::find(former_, std::this_thread::get_id(), &std::thread::get_id);
  if (it != former_.end()) {
    it->detach();
    former_.erase(it);
  }
}

// Until there may be work, or a sign of life is due, which is given here. What is started meanwhile does not
// put that off: who starts something every few milliseconds may never have to wait in it.
void Driver::rest(Lock& lock) {
  if (beatInterval_.count() == 0) {
    work_.wait(lock);
  } else if (Clock::now() < beatAt_) {
    work_.wait_until(lock, beatAt_);
  } else if (driven_) {
    // Who drives gives signs of life itself while it waits, but may be gone again before it has waited.
    work_.wait_for(lock, beatInterval_ / kLooksInBeat);
  } else {
    step(lock, Clock::time_point::min());
  }
}

void Driver::shutdown(bool drain) {
  if (isForked()) {
    return;
  }
  Lock lock(mutex_);
  if (closed_) {
    return;
  }
  if (drain) {
    drainMessages(lock);
    if (closed_) {
      return;
    }
  }
  closed_ = true;
  const auto communicator = communicator_;
  if (!drain && (driven_ || !queue_.empty())) {
    communicator->abort(kClosed);
  }
  communicator->wake();
  threadStops_ = true;
  work_.notify_all();
  if (thread_.joinable()) {
    std::vector<std::thread> threads;
    threads.push_back(std::move(thread_));
    stop(lock, std::move(threads));
  }
  while (driven_ || !queue_.empty()) {
    if (driven_) {
      idle_.wait(lock);
    } else {
      step(lock, Clock::now());
    }
  }
  std::vector<Ended> left;
  for (const auto& transfer : std::exchange(transfers_, {})) {
    transfer->listed_ = false;
    left.push_back({transfer, std::make_exception_ptr(Error(Fault::kAborted, "", kClosed))});
  }
  // Before the buffers of the messages are let go of.
  communicator_.reset();
  leave(lock, std::move(left));
  // Last: they may wait for any of these.
  stop(lock, std::exchange(former_, {}));
}

void Driver::drainMessages(Lock& lock) {
  const auto isAwaited = [](const std::shared_ptr<Transfer>& transfer) {
    return transfer.use_count() > 1 && !transfer->isAbandoned();
  };
  const auto deadline = Clock::now() + kLongestFarewell;
  while (!closed_ && Clock::now() < deadline &&
         (communicator_->hasUnsent() || std::ranges::any_of(transfers_, isAwaited))) {
    if (driven_) {
      idle_.wait_until(lock, std::min(deadline, Clock::now() + kLastLook));
    } else {
      step(lock, deadline);
    }
  }
}

void Driver::stop(Lock& lock, std::vector<std::thread> threads) {
  lock.unlock();
  for (std::thread& thread : threads) {
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();
    } else {
      thread.join();
    }
  }
  lock.lock();
}

}  // namespace baguarun::backend
