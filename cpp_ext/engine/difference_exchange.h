// Weights and their neighbours' on a ring, kept together by coded differences: low-precision decentralized
// SGD (Tang et al., arXiv 1803.06317, algorithm 1; Bagua, arXiv 2107.01499).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "engine/schedule.h"
#include "engine/transfers.h"

namespace baguarun::engine {

// One flat buffer of weights on the CPU, and what this rank and its neighbours agree that weights are. All
// are one-dimensional, of one length.
struct Replica {
  // x: float32, float16, bfloat16 or float64; changed by the optimizer between exchanges.
  at::Tensor weights;
  // w: what the neighbours hold of this rank. float64 for weights of float64, else float32.
  at::Tensor own;
  // What this rank holds of each neighbour, of the type of `own`: of the rank before it on the ring and of
  // the one after it; of two ranks, of the other one.
  std::vector<at::Tensor> copies;
};

// In each exchange every rank sends q = Q((x - w) + sum(c - w)/(k+1)) to its k neighbours, c being its copies
// of them; whoever holds w adds deQ(q) to it, and x becomes w. So the copies stay, bit for bit, what they are
// copies of, and weights are mixed in equal parts: thirds on a ring, halves with two ranks.
//
// What comes in is needed in the next exchange only, so start() returns when x is final and all messages are
// handed to the network, receives as well: whoever leaves the group in good order lets them end. Buffers
// travel in pieces, and each piece of an exchange sets out before the next one is looked at. What neighbours
// sent of it in the last exchange is taken in on the same way through memory, and only that piece is waited
// for: so the line is never empty, and a message's trip is hidden behind the other pieces. If a neighbour is
// lost meanwhile, the pieces before are mixed already, and the others are not.
//
// Threads: the one that trains.
class DifferenceExchange {
 public:
  // `replicas` are the same on all ranks but for their values. Throws UsageFailure for what cannot be coded.
  DifferenceExchange(Group group, codec::Wire wire, std::vector<Replica> replicas);

  // Begins an exchange, after the one before. All ranks, equally often. Throws CommunicationFailure, now and
  // on every later call, if an exchange failed.
  void start();
  // Until all copies are what they are copies of. Throws as start().
  void wait();

  // Bytes sent by this rank in one exchange.
  uint64_t bytesPerRound() const;

 private:
  struct Piece {
    const Replica* replica;
    size_t first;
    size_t count;
    at::Tensor sent;
  };

  // The way to and from one neighbour; messages by the piece's position.
  struct Link {
    int rank = 0;
    Stage sendStage = Stage::kScatter;
    Stage receiveStage = Stage::kScatter;
    std::vector<at::Tensor> received;
    std::vector<Work> sends;
    std::vector<Work> receives;
  };

  void check(const Replica& replica) const;
  void cut(const Replica& replica);
  void connect();
  void await(size_t position);
  void work(size_t position, bool takes, bool gives);
  void receive(size_t position);
  void send(size_t position);
  void guarded(const std::function<void()>& run);

  const Group group_;
  const codec::Wire wire_;
  const std::vector<Replica> replicas_;
  std::vector<Piece> pieces_;
  std::vector<Link> links_;
  std::vector<float> numbers_;
  uint32_t round_ = 0;
  bool running_ = false;
  std::string failure_;
};

// 64 bits of the tensors' bytes, in order. To find copies that differ, not for security.
uint64_t checksum(const std::vector<at::Tensor>& tensors);

}  // namespace baguarun::engine
