#include "engine/difference_exchange.h"

#include <ATen/ATen.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "engine/errors.h"
#include "engine/ranges.h"

namespace baguarun::engine {

namespace {

constexpr codec::Exec kHost{codec::Device::cpu, nullptr};

// Whole blocks of the codecs. One piece as fp32 stays in a core's cache.
constexpr size_t kPieceElements = size_t{128} << 10;

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

// out = (x - w) + sum(c - w)/(k+1). Differences first: they are small, and exact where replicas agree.
template <typename Value, typename State>
void difference(const Replica& replica, size_t first, size_t count, float* out) {
  const auto* weights = numbersOf<const Value>(replica.weights, first);
  const auto* own = numbersOf<const State>(replica.own, first);
  const auto* left = numbersOf<const State>(replica.copies.front(), first);
  if (replica.copies.size() == 1) {
    for (size_t i = 0; i < count; ++i) {
      const State change = static_cast<State>(weights[i]) - own[i];
      out[i] = static_cast<float>(change + (left[i] - own[i]) / State{2});
    }
    return;
  }
  const auto* right = numbersOf<const State>(replica.copies.back(), first);
  for (size_t i = 0; i < count; ++i) {
    const State change = static_cast<State>(weights[i]) - own[i];
    out[i] = static_cast<float>(change + ((left[i] - own[i]) + (right[i] - own[i])) / State{3});
  }
}

template <typename State>
void add(const float* decoded, size_t count, State* to) {
  for (size_t i = 0; i < count; ++i) {
    to[i] += static_cast<State>(decoded[i]);
  }
}

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
  size_t most = 0;
  for (const Piece& piece : pieces_) {
    most = std::max(most, piece.count);
  }
  numbers_.resize(most);
  connect();
}

void DifferenceExchange::start() {
  guarded([this] {
    ++round_;
    for (size_t position = 0; position < pieces_.size(); ++position) {
      if (running_) {
        take(position);
      }
      receive(position);
      give(position);
    }
    running_ = true;
  });
}

void DifferenceExchange::wait() {
  guarded([this] {
    for (size_t position = 0; running_ && position < pieces_.size(); ++position) {
      take(position);
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

// Encodes, applies here and sends.
void DifferenceExchange::give(size_t position) {
  const Piece& piece = pieces_[position];
  withTypes(piece.replica->weights.scalar_type(), [&]<typename Value, typename State>(Value, State) {
    const Span span("encode", "codec", bytesOf<Value>(piece.count));
    difference<Value, State>(*piece.replica, piece.first, piece.count, numbers_.data());
    codec::encode(kHost, wire_, codec::DType::f32, numbers_.data(), piece.count, piece.sent.data_ptr());
    codec::decode(kHost, wire_, codec::DType::f32, piece.sent.data_ptr(), piece.count, numbers_.data());
    auto* own = numbersOf<State>(piece.replica->own, piece.first);
    auto* weights = numbersOf<Value>(piece.replica->weights, piece.first);
    add(numbers_.data(), piece.count, own);
    for (size_t i = 0; i < piece.count; ++i) {
      weights[i] = static_cast<Value>(own[i]);
    }
  });
  for (Link& link : links_) {
    std::vector<at::Tensor> message{piece.sent};
    link.sends[position] =
        sendMessage(group_, message, link.rank, messageTag(round_, position, link.sendStage));
  }
}

// Ends the piece's messages of the last round.
void DifferenceExchange::take(size_t position) {
  const Piece& piece = pieces_[position];
  for (size_t which = 0; which < links_.size(); ++which) {
    Link& link = links_[which];
    await(link.receives[position], "receiving from", link.rank);
    withTypes(piece.replica->weights.scalar_type(), [&]<typename Value, typename State>(Value, State) {
      const Span span("decode", "codec", bytesOf<Value>(piece.count));
      codec::decode(kHost, wire_, codec::DType::f32, link.received[position].data_ptr(), piece.count,
                    numbers_.data());
      add(numbers_.data(), piece.count, numbersOf<State>(piece.replica->copies[which], piece.first));
    });
    await(link.sends[position], "sending to", link.rank);
  }
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
