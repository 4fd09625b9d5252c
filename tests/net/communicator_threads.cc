// Ranks as threads, each with a communicator, so that a sanitizer sees all of them: on one host, on several
// and mixed. Exits with 0 where all came out right.
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "net/communicator.h"

using baguarun::net::Clock;
using baguarun::net::Communicator;
using baguarun::net::Dtype;
using baguarun::net::Env;
using baguarun::net::Error;
using baguarun::net::Fault;
using baguarun::net::ReduceOp;

namespace {

void expect(bool condition, const std::string& what) {
  if (!condition) {
    std::fprintf(stderr, "not so: %s\n", what.c_str());
    std::exit(1);
  }
}

// Hands blobs around among threads.
class Exchange {
 public:
  explicit Exchange(size_t size) : blobs_(size) {}

  std::vector<std::string> operator()(size_t rank, const std::string& mine) {
    std::unique_lock lock(mutex_);
    blobs_[rank] = mine;
    const size_t round = round_;
    if (++arrived_ == blobs_.size()) {
      arrived_ = 0;
      ++round_;
      result_ = blobs_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round; });
    return result_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> blobs_;
  std::vector<std::string> result_;
  size_t arrived_ = 0;
  size_t round_ = 0;
};

Clock::time_point soon() { return Clock::now() + std::chrono::seconds(60); }

void wait(Communicator& group, const std::vector<std::shared_ptr<Communicator::Message>>& messages) {
  for (const auto& message : messages) {
    while (!message->isDone()) {
      if (!group.progress()) {
        group.sleep(soon());
      }
    }
  }
}

void collect(Communicator& group) {
  const auto size = static_cast<size_t>(group.size());
  const auto rank = static_cast<float>(group.rank());
  const float sum = static_cast<float>(size * (size - 1)) / 2;
  for (size_t count : {size_t{0}, size_t{1}, size_t{16384}, size_t{16385}, size_t{300001}}) {
    std::vector<float> data(count, rank);
    group.allReduce(data.data(), count, Dtype::kFloat32, ReduceOp::kSum, soon());
    for (const float value : data) {
      expect(value == sum, "all-reduce");
    }
    std::vector<float> blocks(count * size, rank);
    group.reduceScatter(blocks.data(), data.data(), count, Dtype::kFloat32, ReduceOp::kMax, soon());
    group.allGather(data.data(), blocks.data(), count * sizeof(float), soon());
    for (const float value : blocks) {
      expect(value == static_cast<float>(size - 1), "reduce-scatter and all-gather");
    }
    const std::vector<size_t> bytes(size, count * sizeof(float));
    std::vector<float> other(count * size);
    group.allToAllV(blocks.data(), bytes, other.data(), bytes, soon());
    expect(other == blocks, "all-to-all");
    group.broadcast(data.data(), count * sizeof(float), group.size() - 1, soon());
    group.reduce(data.data(), count, Dtype::kFloat32, ReduceOp::kSum, 0, soon());
    group.gather(data.data(), other.data(), count * sizeof(float), 0, soon());
    group.scatter(blocks.data(), data.data(), count * sizeof(float), 0, soon());
    group.barrier(soon());
  }
}

// One thread drives, another posts.
void talk(Communicator& group) {
  const int after = (group.rank() + 1) % group.size();
  const int before = (group.rank() + group.size() - 1) % group.size();
  std::vector<std::vector<float>> sent;
  std::vector<std::vector<float>> received;
  for (const size_t count : {size_t{0}, size_t{10}, size_t{100'000}, size_t{16'384}}) {
    sent.emplace_back(count, static_cast<float>(group.rank()));
    received.emplace_back(count);
  }
  std::vector<std::shared_ptr<Communicator::Message>> messages(2 * sent.size());
  std::thread poster([&] {
    for (size_t i = 0; i < sent.size(); ++i) {
      const size_t bytes = sent[i].size() * sizeof(float);
      messages[2 * i] = group.isend(sent[i].data(), bytes, after, static_cast<uint32_t>(i));
      const size_t k = sent.size() - 1 - i;
      messages[2 * i + 1] =
          group.irecv(received[k].data(), received[k].size() * sizeof(float),
                      i % 2 == 0 ? before : Communicator::kAnySource, static_cast<uint32_t>(k));
    }
  });
  group.barrier(soon());
  poster.join();
  wait(group, messages);
  for (size_t i = 0; i < sent.size(); ++i) {
    expect(received[i] == std::vector<float>(sent[i].size(), static_cast<float>(before)), "a message");
  }
  group.barrier(soon());
}

// Another thread aborts rank 0 while all are in collectives.
void endAborted(Communicator& group) {
  std::thread aborter;
  if (group.rank() == 0) {
    aborter = std::thread([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      group.abort("a test");
    });
  }
  std::vector<float> data(100000, 1.0f);
  try {
    for (;;) {
      group.allReduce(data.data(), data.size(), Dtype::kFloat32, ReduceOp::kMax, soon());
    }
  } catch (const Error& error) {
    expect(error.fault() == (group.rank() == 0 ? Fault::kAborted : Fault::kRemote), error.what());
  }
  if (aborter.joinable()) {
    aborter.join();
  }
}

void run(const std::string& hosts) {
  const size_t size = hosts.size();
  Exchange exchange(size);
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Communicator group({.rank = static_cast<int>(rank),
                          .size = static_cast<int>(size),
                          .nonce = "threads-" + hosts,
                          .env = Env::read(),
                          .host = std::string(1, hosts[rank])},
                         [&](const std::string& mine) { return exchange(rank, mine); });
      collect(group);
      talk(group);
      endAborted(group);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace

int main() {
  for (const char* hosts : {"a", "aa", "ab", "abc", "aab", "abab"}) {
    run(hosts);
  }
  return 0;
}
