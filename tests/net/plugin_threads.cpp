// The plugin's tables from many threads at once, as NCCL's proxies of several communicators use them.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "nccl_plugin/nccl_net.h"

extern "C" const baguarun::nccl::NetV10 ncclNetPlugin_v10;
extern "C" const baguarun::nccl::NetV11 ncclNetPlugin_v11;
extern "C" const baguarun::nccl::NetV12 ncclNetPlugin_v12;

namespace {

using baguarun::nccl::kHandleBytes;
using baguarun::nccl::Result;

void expect(bool condition, const char* what) {
  if (!condition) {
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
  }
}

// A communicator's life: init, connections to itself, messages, the end.
template <typename Net>
void live(const Net& net, int round) {
  void* context = nullptr;
  expect(net.init(&context, 1, nullptr, nullptr, nullptr) == Result::kSuccess, "init");
  char handle[kHandleBytes];
  void* listening = nullptr;
  expect(net.listen(context, 0, handle, &listening) == Result::kSuccess, "listen");
  void* send = nullptr;
  void* recv = nullptr;
  while (send == nullptr || recv == nullptr) {
    if (send == nullptr) {
      expect(net.connect(context, 0, handle, &send, nullptr) == Result::kSuccess, "connect");
    }
    if (recv == nullptr) {
      expect(net.accept(listening, &recv, nullptr) == Result::kSuccess, "accept");
    }
  }
  std::vector<char> data(static_cast<size_t>(round) * 10'000 + 1, 'x');
  std::vector<char> room(data.size());
  void* rooms[] = {room.data()};
  size_t sizes[] = {room.size()};
  int tags[] = {0};
  void* requests[2] = {};
  expect(net.irecv(recv, 1, rooms, sizes, tags, nullptr, nullptr, &requests[0]) == Result::kSuccess, "irecv");
  expect(net.isend(send, data.data(), data.size(), 0, nullptr, nullptr, &requests[1]) == Result::kSuccess,
         "isend");
  while (requests[0] != nullptr || requests[1] != nullptr) {
    for (void*& request : requests) {
      int done = 0;
      if (request != nullptr) {
        expect(net.test(request, &done, nullptr) == Result::kSuccess, "test");
      }
      request = done != 0 ? nullptr : request;
    }
  }
  expect(room == data, "what arrived is not what was sent");
  expect(net.closeSend(send) == Result::kSuccess && net.closeRecv(recv) == Result::kSuccess, "close");
  expect(net.closeListen(listening) == Result::kSuccess, "closeListen");
  expect(net.finalize(context) == Result::kSuccess, "finalize");
}

}  // namespace

int main() {
  std::vector<std::thread> threads;
  for (int number = 0; number < 6; ++number) {
    threads.emplace_back([number] {
      expect(ncclNetPlugin_v10.init(nullptr, nullptr) == Result::kSuccess, "init of version 10");
      for (int round = 0; round < 15; ++round) {
        if ((number + round) % 2 == 0) {
          live(ncclNetPlugin_v11, round);
        } else {
          live(ncclNetPlugin_v12, round);
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return 0;
}
