#include "c10d/backend.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <optional>
#include <utility>

#include "c10d/group_exchange.h"
#include "c10d/live_groups.h"
#include "c10d/store_exchange.h"
#include "c10d/tensors.h"
#include "net/env.h"
#include "net/waits.h"

namespace baguarun::backend {

using std::chrono::milliseconds;

namespace {

// A timeout that suits operations may be too short for ranks that come when they have got so far.
constexpr milliseconds kShortestJoin{5'000};
// Arenas are measured in these.
constexpr size_t kPage = 4096;

// A string that no other group has: rank 0's. An exchange.
std::string agreeOnNonce(const net::BlobExchange& exchange, int size) {
  std::array<uint8_t, 16> random;
  net::fillRandom(random);
  std::string nonce;
  for (const uint8_t byte : random) {
    std::array<char, 3> hex;
    std::snprintf(hex.data(), hex.size(), "%02x", byte);
    nonce += hex.data();
  }
  const std::string sizeText = std::to_string(size) + " ";
  const std::vector<std::string> all = exchange(sizeText + nonce);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const std::string& blob = all[rank];
    if (!blob.starts_with(sizeText)) {
      throw net::Error(
          net::Fault::kUsage, "rank " + std::to_string(rank),
          "its group has " + blob.substr(0, blob.find(' ')) + " ranks, this one's " + std::to_string(size));
    }
  }
  return all[0].substr(sizeText.size());
}

// How errors call the group. Ranks in them count within it, so its place in the World is told with its name.
std::string nameOf(const BaguanetBackend::Options& options) {
  const std::vector<uint64_t>& members = options.global_ranks_in_group;
  std::string list;
  bool areTheSame = true;
  for (size_t rank = 0; rank < members.size(); ++rank) {
    areTheSame = areTheSame && members[rank] == rank;
    list += (rank > 0 ? ", " : "") + std::to_string(members[rank]);
  }
  return areTheSame ? options.group_name : options.group_name + " (its ranks are the World's " + list + ")";
}

void checkTag(int tag) { TORCH_CHECK_VALUE(tag >= 0, "baguanet: found tag ", tag, "; want zero or more"); }

}  // namespace

BaguanetBackend::Options::Options(milliseconds timeout, std::string group, std::vector<uint64_t> globalRanks,
                                  size_t arenaBytes)
    : ::c10d::Backend::Options(kName, timeout), arenaBytes((arenaBytes + kPage - 1) / kPage * kPage) {
  group_name = std::move(group);
  global_ranks_in_group = std::move(globalRanks);
}

BaguanetBackend::BaguanetBackend(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size,
                                 c10::intrusive_ptr<Options> options,
                                 const c10::intrusive_ptr<BaguanetBackend>& over)
    : Backend(rank, size), options_(std::move(options)), timeout_(options_->timeout) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size, "baguanet: found rank ", rank, " of ", size,
                    "; want 0 <= rank < size");
  TORCH_CHECK_VALUE(!over || (over->getRank() == rank && over->getSize() == size), "baguanet: found rank ",
                    rank, " of ", size, " to be made over a group of other ranks; want the same");
  connect(store, over ? over->driver_ : nullptr);
  init();
}

void BaguanetBackend::connect(const c10::intrusive_ptr<::c10d::Store>& store,
                              const std::shared_ptr<Driver>& over) {
  const milliseconds timeout =
      LiveGroups::ofProcess().boundedMeeting(std::max(timeout_.load(), kShortestJoin));
  std::optional<StoreExchange> byStore;
  try {
    if (over) {
      GroupExchange byGroup(over, timeout);
      // A sign of life costs a hundred microseconds when nothing of it is in a cache.
      const bool isWatched = over->isWatched();
      join([&](const std::string& mine) { return byGroup.exchange(mine); }, timeout, !isWatched);
      if (isWatched) {
        over->vouchFor(driver_);
      }
      return;
    }
    byStore.emplace(store, rank_, size_, timeout);
    byStore->claim();
    join([&](const std::string& mine) { return byStore->exchange(mine); }, timeout, /*beats=*/true);
    byStore->finish();
  } catch (const std::exception& error) {
    const auto failure = std::current_exception();
    if (byStore) {
      byStore->failed(error.what());
    }
    if (driver_) {
      // It has a thread that keeps it, and gives signs of life.
      driver_->shutdown(/*drain=*/false);
    }
    const Label label{.operation = "joining"};
    std::rethrow_exception(translate(failure, label, nameOf(*options_)));
  }
}

void BaguanetBackend::join(const net::BlobExchange& exchange, milliseconds timeout, bool beats) {
  const net::Communicator::Options options{.rank = rank_,
                                           .size = size_,
                                           .nonce = agreeOnNonce(exchange, size_),
                                           .env = net::Env::read(),
                                           .timeout = timeout,
                                           .arenaBytes = options_->arenaBytes,
                                           .beats = beats,
                                           .check = [] { LiveGroups::ofProcess().throwIfInterrupted(); }};
  driver_ =
      std::make_shared<Driver>(std::make_unique<net::Communicator>(options, exchange), nameOf(*options_));
  driver_->beat();
  LiveGroups::ofProcess().add(driver_);
}

BaguanetBackend::~BaguanetBackend() {
  if (!driver_) {
    return;
  }
  if (driver_->isForked()) {
    // Threads that wait on its conditions exist in the parent only: nothing of it can be destroyed here.
    new std::shared_ptr<Driver>(driver_);
    return;
  }
  driver_->shutdown(/*drain=*/false);
}

void BaguanetBackend::setTimeout(milliseconds timeout) {
  timeout_ = timeout;
  options_->timeout = timeout;
}

bool BaguanetBackend::supportsTensorAlloc(c10::DeviceIndex /*device*/) { return driver_->roomLeft() > 0; }

at::Tensor BaguanetBackend::allocateTensor(long size, at::TensorOptions options) {
  TORCH_CHECK_VALUE(size >= 0 && options.device().is_cpu(), "baguanet: found a tensor of ", size,
                    " elements on ", options.device(), "; want zero or more on the CPU");
  const size_t bytes = static_cast<size_t>(size) * options.dtype().itemsize();
  std::shared_ptr<void> memory;
  try {
    memory = driver_->allocate(bytes);
    if (memory == nullptr) {
      throw net::Error(net::Fault::kSystem, "",
                       std::to_string(bytes) + " bytes of shared memory wanted, " +
                           std::to_string(driver_->roomLeft()) + " left of the group's arena of " +
                           std::to_string(options_->arenaBytes));
    }
  } catch (const net::Error&) {
    const Label label{.operation = "allocate_tensor"};
    std::rethrow_exception(translate(std::current_exception(), label, options_->group_name));
  }
  void* const data = memory.get();
  return at::from_blob(
      data, {size}, [memory = std::move(memory)](void* /*data*/) {}, options);
}

void BaguanetBackend::abort() { driver_->abort("abort() was called on rank " + std::to_string(rank_)); }

void BaguanetBackend::shutdown() { driver_->shutdown(/*drain=*/true); }

Started BaguanetBackend::start(const char* name, Collective::Body body,
                               std::optional<Collective::AllReduce> allReduce) {
  auto collective = std::make_shared<Collective>(std::move(body), timeout_.load(), allReduce);
  const Label label{.operation = name, .number = ++number_};
  try {
    driver_->start(collective);
  } catch (const net::Error&) {
    std::rethrow_exception(translate(std::current_exception(), label, driver_->group()));
  }
  return {driver_, std::move(collective), label};
}

milliseconds BaguanetBackend::timeoutOf(milliseconds asked) const {
  return asked == ::c10d::kUnsetTimeout ? timeout_.load() : asked;
}

void BaguanetBackend::checkRank(int64_t rank, const char* what) const {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "baguanet: found ", what, " ", rank, "; want 0 to ",
                    size_ - 1);
}

BaguanetBackend::Result BaguanetBackend::submit(const Call& call, const Tensors& inputs,
                                                const Tensors& outputs, Collective::Body body,
                                                std::optional<Collective::AllReduce> allReduce) {
  auto collective = std::make_shared<Collective>(
      [body = std::move(body)](net::Communicator& communicator, Deadline deadline) {
        // Copies of tensors are no business of autograd's.
        const at::AutoDispatchBelowADInplaceOrView guard;
        body(communicator, deadline);
      },
      timeoutOf(call.timeout), allReduce);
  const Label label{.operation = call.name, .number = ++number_};
  auto work = c10::make_intrusive<Work>(
      rank_, call.type, Work::Parts{driver_, collective, nullptr, label, outputs, milliseconds::zero()},
      call.title, inputs);
  try {
    if (call.isAsync) {
      driver_->start(collective);
      return work;
    }
    const net::Waiting waiting;
    driver_->run(collective);
  } catch (const net::Error&) {
    std::rethrow_exception(translate(std::current_exception(), label, driver_->group()));
  }
  work->wait(kNoTimeout);
  return work;
}

BaguanetBackend::Result BaguanetBackend::post(const Call& call, const Tensors& tensors, int peer,
                                              Transfer::Start start, std::function<void()> atEnd) {
  auto transfer = std::make_shared<Transfer>(std::move(start), std::move(atEnd));
  const Label label{.operation = call.name, .peer = peer};
  auto work = c10::make_intrusive<Work>(
      rank_, call.type, Work::Parts{driver_, nullptr, transfer, label, tensors, timeout_.load()}, call.title,
      tensors);
  try {
    driver_->post(transfer);
  } catch (const net::Error&) {
    std::rethrow_exception(translate(std::current_exception(), label, driver_->group()));
  }
  return work;
}

BaguanetBackend::Result BaguanetBackend::send(Tensors& tensors, int to, int tag) {
  const at::Tensor plain = toPlain(onlyOne(tensors));
  checkRank(to, "destination");
  checkTag(tag);
  return post(
      {::c10d::OpType::SEND, "send to", "baguanet:send", timeout_, true}, tensors, to,
      [=](net::Communicator& communicator) {
        return communicator.isend(plain.const_data_ptr(), plain.nbytes(), to, static_cast<uint32_t>(tag));
      },
      [] {});
}

BaguanetBackend::Result BaguanetBackend::recv(Tensors& tensors, int from, int tag) {
  checkRank(from, "source");
  return receive(tensors, from, tag, ::c10d::OpType::RECV);
}

BaguanetBackend::Result BaguanetBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive(tensors, net::Communicator::kAnySource, tag, ::c10d::OpType::RECVANYSOURCE);
}

BaguanetBackend::Result BaguanetBackend::receive(Tensors& tensors, int from, int tag, ::c10d::OpType type) {
  const auto output = std::make_shared<Output>(onlyOne(tensors));
  const size_t bytes = tensors[0].nbytes();
  checkTag(tag);
  return post(
      {type, "receive from", "baguanet:recv", timeout_, true}, tensors, from,
      [=](net::Communicator& communicator) {
        return communicator.irecv(output->data(), bytes, from, static_cast<uint32_t>(tag));
      },
      [output] {
        const at::AutoDispatchBelowADInplaceOrView guard;
        output->write();
      });
}

}  // namespace baguarun::backend
