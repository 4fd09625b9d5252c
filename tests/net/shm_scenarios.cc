// How shared memory is handed over and waited for where ranks are slow or the system refuses.
// One scenario per run.
//
//   shm_scenarios NAME      exit code 0, or a message and 1
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "net/error.h"
#include "net/shm_handover.h"
#include "net/shm_sync.h"

namespace {

using namespace baguarun::net;
using namespace std::chrono_literals;

const std::string kToken(32, 't');

void expect(bool condition, const char* what) {
  if (!condition) {
    std::fprintf(stderr, "not so: %s\n", what);
    std::exit(1);
  }
}

std::string socketName() { return "baguarun-test-" + std::to_string(getpid()); }

Patience patience() { return {.deadline = Clock::now() + 20s, .check = {}}; }

ShmHandover handover() {
  return {.memory = Fd(open("/dev/null", O_RDONLY | O_CLOEXEC)), .doorbells = ShmHandover::makeDoorbells(2)};
}

// Rank 0 took a rank for a stranger, which had no turn for longer than a token may take.
void aSlowRankComesAgain() {
  const Fd listener = listenForShm(socketName(), 2);
  std::thread slow([] {
    const ShmHandover got = fetchShm(socketName(), kToken, 2, patience());
    expect(got.memory && got.doorbells.size() == 2, "all descriptors");
  });
  Fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  serveShm(listener, handover(), kToken, 1, patience());
  slow.join();
}

void aSystemThatRefusesIsSaidToDoSo() {
  const Fd listener = listenForShm(socketName(), 2);
  const ShmHandover all = handover();
  std::thread waiting([] {
    try {
      fetchShm(socketName(), kToken, 2, {.deadline = Clock::now() + 5s, .check = {}});
    } catch (const Error&) {
      // Nobody hands over anything.
    }
  });
  std::this_thread::sleep_for(200ms);
  const Fd lowest(dup(listener.get()));
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = static_cast<rlim_t>(lowest.get());
  setrlimit(RLIMIT_NOFILE, &limit);
  try {
    serveShm(listener, all, kToken, 1, {.deadline = Clock::now() + 3s, .check = {}});
    expect(false, "an error");
  } catch (const Error& error) {
    expect(error.fault() == Fault::kSystem && error.message().find("open files") != std::string::npos,
           error.what());
  }
  waiting.join();
}

// Who has seen the value by itself may be about to sleep for the next one when its poster looks for sleepers.
void aPostLeavesTheMarkOfWhoIsAboutToSleep() {
  ShmState state{};
  ShmReason reason{};
  ShmFlag left{};
  ShmFlag flag{};
  ShmWaiter waiter(ShmSegment::forThreads(1, 1 << 20), 0, &state, &reason, &left);
  flag.numWaiters.store(1);
  waiter.post(flag, 1);
  expect(flag.numWaiters.load() == 1, "still marked");
  flag.numWaiters.store(0);
  waiter.wait(flag, 1, 0, Clock::now() + 1s);
  try {
    waiter.wait(flag, 2, 0, Clock::now() + 10ms);
    expect(false, "a timeout");
  } catch (const Error&) {
    // Nobody posts.
  }
  expect(flag.numWaiters.load() == 0, "nobody waits any more");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc == 2 ? argv[1] : "";
  if (name == "slow") {
    aSlowRankComesAgain();
  } else if (name == "refused") {
    aSystemThatRefusesIsSaidToDoSo();
  } else if (name == "mark") {
    aPostLeavesTheMarkOfWhoIsAboutToSleep();
  } else {
    std::fprintf(stderr, "usage: shm_scenarios slow|refused|mark\n");
    return 2;
  }
  return 0;
}
