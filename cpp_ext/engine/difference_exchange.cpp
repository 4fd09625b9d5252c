#include "engine/difference_exchange.h"

#include <ATen/ATen.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "engine/clones.h"
#include "engine/errors.h"
#include "engine/ranges.h"

namespace baguarun::engine {

namespace {

constexpr codec::Exec kHost{codec::Device::cpu, nullptr};

constexpr size_t kPieceElements = size_t{128} << 10;
// A piece is decoded, mixed and encoded in parts, of which all that is read and written stays in a core's
// second cache meanwhile. Whole blocks of the codecs, so that it takes as many bytes as in one.
constexpr size_t kPartElements = size_t{8} << 10;
static_assert(kPieceElements % kPartElements == 0 && kPartElements % codec::kBlockElems == 0);

at::ScalarType stateType(at::ScalarType weights) { return weights == at::kDouble ? at::kDouble : at::kFloat; }

// Calls `run` with a number of the weights' type and one of the state's.
template <typename Run>
void withTypes(at::ScalarType weights, const Run& run) {
  if (weights == at::kFloat) {
    run(float{}, float{});
  } else if (weights == at::kHalf) {
    run(c10::Half{}, float{});
  } else if (weights == at::kBFloat16) {
    run(c10::BFloat16{}, float{});
  } else if (weights == at::kDouble) {
    run(double{}, double{});
  } else {
    throw UsageFailure(
        std::string("weights of type ") + c10::toString(weights) +
        " cannot be exchanged as coded differences; want float32, float16, bfloat16 or float64");
  }
}

template <typename Number>
int64_t bytesOf(size_t count) {
  return static_cast<int64_t>(count * sizeof(Number));
}

template <typename Number>
Number* numbersOf(const at::Tensor& tensor, size_t first) {
  return static_cast<Number*>(tensor.data_ptr()) + first;
}

void* bytesAt(const at::Tensor& tensor, size_t offset) {
  return static_cast<std::byte*>(tensor.data_ptr()) + offset;
}

// What the loops below go through: `count` numbers of each.
template <typename Value, typename State>
struct Part {
  Value* weights;
  State* own;
  std::array<State*, 2> copies;
  size_t numCopies;
  size_t count;
};

template <typename Value, typename State>
Part<Value, State> partOf(const Replica& replica, size_t first, size_t count) {
  return {numbersOf<Value>(replica.weights, first),
          numbersOf<State>(replica.own, first),
          {numbersOf<State>(replica.copies.front(), first), numbersOf<State>(replica.copies.back(), first)},
          replica.copies.size(),
          count};
}

// out = (x - w) + sum(c - w)/(k+1). Differences first: they are small, and exact where replicas agree.
template <typename Value, typename State>
[[gnu::always_inline]] inline void difference(const Part<Value, State>& part, float* out) {
  const auto [left, right] = part.copies;
  if (part.numCopies == 1) {
    for (size_t i = 0; i < part.count; ++i) {
      const State change = static_cast<State>(part.weights[i]) - part.own[i];
      out[i] = static_cast<float>(change + (left[i] - part.own[i]) / State{2});
    }
    return;
  }
  for (size_t i = 0; i < part.count; ++i) {
    const State change = static_cast<State>(part.weights[i]) - part.own[i];
    out[i] = static_cast<float>(change + ((left[i] - part.own[i]) + (right[i] - part.own[i])) / State{3});
  }
}

// w += q, x = w.
template <typename Value, typename State>
[[gnu::always_inline]] inline void apply(const float* decoded, const Part<Value, State>& part) {
  for (size_t i = 0; i < part.count; ++i) {
    part.own[i] += static_cast<State>(decoded[i]);
    part.weights[i] = static_cast<Value>(part.own[i]);
  }
}

template <typename State>
[[gnu::always_inline]] inline void add(const float* decoded, size_t count, State* to) {
  for (size_t i = 0; i < count; ++i) {
    to[i] += static_cast<State>(decoded[i]);
  }
}

// fp32, which most models have, with the widest vectors of the machine.
BAGUARUN_CLONES void difference(const Part<float, float>& part, float* out) {
  difference<float, float>(part, out);
}

BAGUARUN_CLONES void apply(const float* decoded, const Part<float, float>& part) {
  apply<float, float>(decoded, part);
}

BAGUARUN_CLONES void add(const float* decoded, size_t count, float* to) { add<float>(decoded, count, to); }

uint64_t mixed(uint64_t hash, uint64_t word) {
  // An odd factor and a rotation lose nothing and carry a changed sign bit down to all others.
  return std::rotl((hash ^ word) * 0x9e3779b97f4a7c15U, 29);
}

void await(const Work& work, const char* verb, int rank) {
  bool completed = false;
  try {
    const WireSpan span(verb, rank);
    completed = work->wait();
  } catch (const std::exception& error) {
    throw CommunicationFailure(std::string(verb) + " rank " + std::to_string(rank) + ": " + textOf(error));
  }
  if (!completed) {
    throw CommunicationFailure(std::string(verb) + " rank " + std::to_string(rank) + ": aborted");
  }
}

}  // namespace

DifferenceExchange::DifferenceExchange(Group group, codec::Wire wire, std::vector<Replica> replicas)
    : group_(std::move(group)),
      wire_(wire),
      replicas_(std::move(replicas)),
      links_(group_->getSize() == 2 ? 1 : 2) {
  for (const Replica& replica : replicas_) {
    check(replica);
    cut(replica);
  }
  if (pieces_.size() > kMaxBuckets) {
    throw UsageFailure("the model has more than " + std::to_string(kMaxBuckets * kPieceElements) +
                       " weights: too many for one exchange of coded differences");
  }
  numbers_.resize(kPartElements);
  connect();
}

void DifferenceExchange::start() {
  guarded([this] {
    ++round_;
    for (size_t position = 0; position < pieces_.size(); ++position) {
      if (running_) {
        await(position);
      }
      work(position, running_, true);
      receive(position);
      send(position);
    }
    running_ = true;
  });
}

void DifferenceExchange::wait() {
  guarded([this] {
    for (size_t position = 0; running_ && position < pieces_.size(); ++position) {
      await(position);
      work(position, true, false);
    }
    running_ = false;
  });
}

uint64_t DifferenceExchange::bytesPerRound() const {
  uint64_t bytes = 0;
  for (const Piece& piece : pieces_) {
    bytes += static_cast<uint64_t>(piece.sent.numel()) * links_.size();
  }
  return bytes;
}

void DifferenceExchange::check(const Replica& replica) const {
  const at::ScalarType type = replica.weights.scalar_type();
  withTypes(type, [](auto, auto) {});
  if (replica.copies.size() != links_.size()) {
    throw UsageFailure("a replica has " + std::to_string(replica.copies.size()) +
                       " copies of neighbours; want " + std::to_string(links_.size()));
  }
  std::vector<at::Tensor> all{replica.weights, replica.own};
  all.insert(all.end(), replica.copies.begin(), replica.copies.end());
  for (size_t i = 0; i < all.size(); ++i) {
    if (!all[i].is_cpu() || !all[i].is_contiguous() || all[i].numel() != replica.weights.numel() ||
        (i > 0 && all[i].scalar_type() != stateType(type))) {
      throw UsageFailure(
          "a replica's tensors differ in length, are not contiguous CPU tensors, or its copies are not " +
          std::string(c10::toString(stateType(type))));
    }
  }
}

void DifferenceExchange::cut(const Replica& replica) {
  const auto total = static_cast<size_t>(replica.weights.numel());
  for (size_t first = 0; first < total; first += kPieceElements) {
    const size_t count = std::min(kPieceElements, total - first);
    const auto bytes = static_cast<int64_t>(codec::encodedBytes(wire_, count));
    pieces_.push_back({&replica, first, count, at::zeros({bytes}, at::kByte)});
  }
}

void DifferenceExchange::connect() {
  const int rank = group_->getRank();
  const int size = group_->getSize();
  links_.front().rank = (rank + size - 1) % size;
  links_.back().rank = (rank + 1) % size;
  if (links_.size() == 2) {
    links_.front().sendStage = Stage::kGather;
    links_.back().receiveStage = Stage::kGather;
  }
  for (Link& link : links_) {
    for (const Piece& piece : pieces_) {
      link.received.push_back(at::zeros_like(piece.sent));
    }
    link.sends.resize(pieces_.size());
    link.receives.resize(pieces_.size());
  }
}

void DifferenceExchange::receive(size_t position) {
  for (Link& link : links_) {
    std::vector<at::Tensor> message{link.received[position]};
    link.receives[position] =
        group_->recv(message, link.rank, messageTag(round_, position, link.receiveStage));
  }
}

// Until the piece's messages of the last round have ended.
void DifferenceExchange::await(size_t position) {
  for (Link& link : links_) {
    engine::await(link.receives[position], "receiving from", link.rank);
    engine::await(link.sends[position], "sending to", link.rank);
  }
}

void DifferenceExchange::send(size_t position) {
  for (Link& link : links_) {
    std::vector<at::Tensor> message{pieces_[position].sent};
    link.sends[position] =
        sendMessage(group_, message, link.rank, messageTag(round_, position, link.sendStage));
  }
}

// Takes in what neighbours have sent of the piece, encodes what has changed, and applies that here.
void DifferenceExchange::work(size_t position, bool takes, bool gives) {
  const Piece& piece = pieces_[position];
  const char* const name = takes ? gives ? "decode and encode" : "decode" : "encode";
  withTypes(piece.replica->weights.scalar_type(), [&]<typename Value, typename State>(Value, State) {
    const Span span(name, "codec", bytesOf<Value>(piece.count));
    float* const numbers = numbers_.data();
    for (size_t done = 0; done < piece.count; done += kPartElements) {
      const auto part = partOf<Value, State>(*piece.replica, piece.first + done,
                                             std::min(kPartElements, piece.count - done));
      // Parts before it are whole.
      const auto offset = done / kPartElements * codec::encodedBytes(wire_, kPartElements);
      for (size_t which = 0; takes && which < links_.size(); ++which) {
        codec::decode(kHost, wire_, codec::DType::f32, bytesAt(links_[which].received[position], offset),
                      part.count, numbers);
        add(numbers, part.count, part.copies[which]);
      }
      if (gives) {
        difference(part, numbers);
        codec::encode(kHost, wire_, codec::DType::f32, numbers, part.count, bytesAt(piece.sent, offset));
        codec::decode(kHost, wire_, codec::DType::f32, bytesAt(piece.sent, offset), part.count, numbers);
        apply(numbers, part);
      }
    }
  });
}

void DifferenceExchange::guarded(const std::function<void()>& run) {
  if (!failure_.empty()) {
    throw CommunicationFailure(failure_);
  }
  try {
    run();
  } catch (const std::exception& error) {
    failure_ = std::string("exchange of coded differences: ") + textOf(error);
    throw CommunicationFailure(failure_);
  }
}

uint64_t checksum(const std::vector<at::Tensor>& tensors) {
  uint64_t total = 0;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor plain = tensor.contiguous();
    const auto* bytes = static_cast<const char*>(plain.const_data_ptr());
    const size_t size = plain.nbytes();
    // Four chains side by side: one alone waits for its multiplications.
    std::array<uint64_t, 4> chains{1, 2, 3, 4};
    constexpr size_t kStride = sizeof(chains);
    size_t place = 0;
    std::array<uint64_t, 4> words{};
    for (; place + kStride <= size; place += kStride) {
      std::memcpy(words.data(), bytes + place, kStride);
      for (size_t i = 0; i < words.size(); ++i) {
        chains[i] = mixed(chains[i], words[i]);
      }
    }
    words = {};
    std::memcpy(words.data(), bytes + place, size - place);
    for (size_t i = 0; i < words.size(); ++i) {
      total = mixed(total, mixed(chains[i], words[i]));
    }
    total = mixed(total, size);
  }
  return total;
}

}  // namespace baguarun::engine
