// Threads that run, start and await collectives and messages of one driver, while another aborts or closes
// it. Built with ThreadSanitizer by test_backend_threads.py.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "c10d/driver.h"

namespace {

using namespace baguarun;
using namespace baguarun::backend;

constexpr int kThreads = 4;
constexpr int kTurns = 300;

enum class Ending { kNone, kAbort, kShutdown };

std::shared_ptr<Driver> makeDriver(const std::string& name) {
  const net::Communicator::Options options{.rank = 0, .size = 1, .nonce = name, .env = {}};
  auto communicator = std::make_unique<net::Communicator>(
      options, [](const std::string& mine) { return std::vector<std::string>{mine}; });
  return std::make_shared<Driver>(std::move(communicator), name);
}

void require(bool holds, const char* what) {
  if (!holds) {
    std::printf("does not hold: %s\n", what);
    std::exit(1);
  }
}

// Throws what it failed with.
template <class Kind>
void await(Driver& driver, Kind& operation) {
  require(driver.wait(operation, timeAfter(std::chrono::seconds(20))), "an operation ends");
  if (const auto error = operation.error()) {
    std::rethrow_exception(error);
  }
}

void collect(Driver& driver, int turn, std::atomic<int>& told) {
  const auto collective = std::make_shared<Collective>(
      [](net::Communicator& communicator, Clock::time_point deadline) {
        float values[64] = {};
        communicator.allReduce(values, 64, net::Dtype::kFloat32, net::ReduceOp::kSum, deadline);
      },
      std::chrono::seconds(10));
  if (turn % 2 == 0) {
    driver.run(collective);
    return;
  }
  driver.start(collective);
  collective->onDone([&told] { ++told; });
  await(driver, *collective);
}

void talk(Driver& driver, uint32_t tag) {
  // Kept by the messages, which may outlive this call when the driver is closed.
  const auto sent = std::make_shared<std::string>("message " + std::to_string(tag));
  const auto found = std::make_shared<std::string>(sent->size(), ' ');
  const auto receive = std::make_shared<Transfer>(
      [=](net::Communicator& communicator) {
        return communicator.irecv(found->data(), found->size(), 0, tag);
      },
      [] {});
  const auto send = std::make_shared<Transfer>(
      [=](net::Communicator& communicator) { return communicator.isend(sent->data(), sent->size(), 0, tag); },
      [] {});
  driver.post(receive);
  driver.post(send);
  await(driver, *send);
  await(driver, *receive);
  require(*found == *sent, "a message arrives");
}

void play(Ending ending, const std::string& name) {
  std::printf("%s\n", name.c_str());
  const auto driver = makeDriver(name);
  std::atomic<int> told{0};
  std::atomic<int> turns{0};
  const auto work = [&](uint32_t number) {
    try {
      for (int turn = 0; turn < kTurns; ++turn, ++turns) {
        number % 2 == 0 ? collect(*driver, turn, told) : talk(*driver, number);
      }
    } catch (const net::Error& error) {
      require(ending != Ending::kNone, error.what());
    }
  };
  std::vector<std::thread> threads;
  for (uint32_t number = 0; number < kThreads; ++number) {
    threads.emplace_back(work, number);
  }
  while (turns < kThreads * kTurns / 8) {
    std::this_thread::yield();
  }
  if (ending == Ending::kAbort) {
    driver->abort("the test wants it");
  } else if (ending == Ending::kShutdown) {
    driver->shutdown(/*drain=*/true);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  driver->shutdown(/*drain=*/true);
  require(ending != Ending::kNone || (turns == kThreads * kTurns && told == kTurns), "all is done");
}

}  // namespace

int main() {
  play(Ending::kNone, "none");
  play(Ending::kAbort, "abort");
  play(Ending::kShutdown, "shutdown");
}
