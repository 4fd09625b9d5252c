#include "c10d/question.h"

#include <utility>

namespace baguarun::backend {

void Question::ask(const Numbers& mine) {
  // Shared with the transport's thread, which may come to it after this object is gone.
  numbers_ = std::make_shared<Numbers>(mine);
  started_ = group_->start("question",
                           [numbers = numbers_](net::Communicator& communicator, Clock::time_point deadline) {
                             communicator.allReduce(numbers->data(), numbers->size(), net::Dtype::kInt64,
                                                    net::ReduceOp::kMax, deadline);
                           });
}

Question::Numbers Question::answer() {
  TORCH_CHECK_VALUE(started_, "no question was asked");
  std::exchange(started_, std::nullopt)->wait();
  return *numbers_;
}

}  // namespace baguarun::backend
