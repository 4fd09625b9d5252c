// Runs the operations of one group: collectives in the order of their start, messages beside them.
//
// Whoever drives calls the communicator; one thread at a time does. A thread that runs a collective while
// nothing is under way drives, and so does one that waits: a hand-over to another thread costs more than a
// small all-reduce. What nobody waits for is driven by a progress thread, which is started when it is first
// needed and sleeps on a condition while there is nothing to do but signs of life. A callback may wait for
// operations in whatever way, and start some: another thread takes the place of the one that it runs on.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "c10d/operation.h"

namespace baguarun::backend {

// Threads: any, but after fork() the child may only drop it.
class Driver : public std::enable_shared_from_this<Driver> {
 public:
  // `group` names it in errors.
  Driver(std::unique_ptr<net::Communicator> communicator, std::string group);
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;
  ~Driver();

  // Where the other ranks want signs of life, has the progress thread give them from now on, whatever the
  // threads of the program do. To be called once, before anything else.
  void beat();

  // Has the progress thread run `collective`, or whoever waits for it first.
  void start(const std::shared_ptr<Collective>& collective);

  // Runs `collective` to its end, after all that were started before.
  void run(const std::shared_ptr<Collective>& collective);

  // Starts a message. Throws net::Error if it cannot be started.
  void post(const std::shared_ptr<Transfer>& transfer);

  // Waits for an operation that was started, driving where nobody does. False: `deadline` has passed, or the
  // message was abandoned.
  bool wait(Collective& collective, Clock::time_point deadline);
  bool wait(Transfer& transfer, Clock::time_point deadline);

  // Ends all waits for `transfer`.
  void abandon(Transfer& transfer);

  // Ends everything under way, and all that is to come, with an error; tells the other ranks `reason`.
  void abort(const std::string& reason) noexcept;

  // Whether a rank that gives no sign of life breaks this group.
  bool isWatched() const noexcept { return beatInterval_.count() > 0 || isVouchedFor_.load(); }

  // This group is watched: has `other`, a group of the same ranks that gives no signs of life itself, end
  // with the same error when a rank is silent, as long as nothing else has broken this one.
  void vouchFor(const std::shared_ptr<Driver>& other);

  // Leaves the group. If `drain`, collectives that were started are run to their end first, and messages that
  // somebody still holds, as far as they end within a few seconds; slower ranks may need what they carry.
  // Else collectives are aborted. Messages still under way end with an error. Later calls do nothing.
  void shutdown(bool drain);

  // Memory that outlives the group; see net::Communicator::allocate().
  std::shared_ptr<void> allocate(size_t bytes);
  size_t roomLeft();

  // This process is a child of the one that made the group, which has no progress thread and no peers.
  bool isForked() const noexcept;

  const std::string& group() const noexcept { return group_; }

 private:
  using Lock = std::unique_lock<std::mutex>;

  // An operation that is over, and what it failed with.
  struct Ended {
    std::shared_ptr<Operation> operation;
    std::exception_ptr error;
  };

  std::shared_ptr<net::Communicator> communicator(const Lock& lock) const;
  void refuseFork() const;
  void fail(const net::Error& error) noexcept;
  void passOn(const net::Error& error) noexcept;
  std::exception_ptr execute(Collective& collective) noexcept;
  std::optional<Collective::AllReduce> findNext();
  bool moveMessages() noexcept;
  void attendMessages(const Lock& lock, bool isAttended);
  bool look(Lock& lock);
  void giveOverdueBeat(Lock& lock);
  void takeEnded(std::vector<Ended>& ended);
  void step(Lock& lock, Clock::time_point sleepUntil);
  void leave(Lock& lock, std::vector<Ended> ended);
  void finish(Lock& lock, std::vector<Ended> ended);
  bool hasWork(const Lock& lock) const;
  void handOver(Lock& lock);
  void drainMessages(Lock& lock);
  void handOverSafely() noexcept;
  void startThread(const Lock& lock);
  void stop(Lock& lock, std::vector<std::thread> threads);
  void loop();
  void rest(Lock& lock);
  bool isProgressThread(const Lock& lock) const;

  const pid_t pid_;
  const std::string group_;
  // 0: there are no beats.
  const std::chrono::milliseconds beatInterval_;
  std::atomic<bool> isVouchedFor_{false};
  std::mutex mutex_;
  // Below: guarded by the mutex.
  std::shared_ptr<net::Communicator> communicator_;
  std::deque<std::shared_ptr<Collective>> queue_;
  // What is known of the collective that runs.
  std::optional<Collective::AllReduce> running_;
  std::vector<std::shared_ptr<Transfer>> transfers_;
  // Who drives is in a collective: those who wait for one of these look by themselves.
  bool inCollective_ = false;
  // Groups that this one vouches for.
  std::vector<std::weak_ptr<Driver>> others_;
  uint64_t numPosted_ = 0;
  // Some thread drives; what it calls of the communicator is called without the mutex.
  bool driven_ = false;
  // Who drives sleeps in the communicator and wants a wake().
  bool sleeping_ = false;
  // When a sign of life is due, if nobody has looked at the links by then.
  Clock::time_point beatAt_;
  bool closed_ = false;
  bool threadStops_ = false;
  // The progress thread is in a callback: another one is started when there is something to do.
  bool isAway_ = false;
  std::thread thread_;
  // Former progress threads, in a callback that started an operation.
  std::vector<std::thread> former_;
  // There is something to do for the progress thread.
  std::condition_variable work_;
  // Nobody drives any more; only a shutdown waits for that.
  std::condition_variable idle_;
};

}  // namespace baguarun::backend
