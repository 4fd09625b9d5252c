#include "c10d/question.h"

#include <utility>

namespace baguarun::backend {

void Question::ask(const Numbers& mine) {
  // Shared with the transport's thread, which may come to it after this object is gone.
  numbers_ = std::make_shared<Numbers>(mine);
  collective_ = group_->start(
      "question", [numbers = numbers_](net::Communicator& communicator, Clock::time_point deadline) {
        communicator.allReduce(numbers->data(), numbers->size(), net::Dtype::kInt64, net::ReduceOp::kMax,
                               deadline);
      });
}

Question::Numbers Question::answer() {
  TORCH_CHECK_VALUE(collective_, "no question was asked");
  group_->wait("question", *std::exchange(collective_, nullptr));
  return *numbers_;
}

}  // namespace baguarun::backend
