#include "net/inquiry.h"

namespace baguarun::net {

Inquiry::Inquiry(int size, int asker, const Call& call, const Error& error, Clock::time_point end)
    : asker_(asker),
      call_(call),
      error_(error),
      end_(end),
      answers_(static_cast<size_t>(size)),
      numSilent_(answers_.size()) {
  answer(asker, call);
}

void Inquiry::answer(int rank, const Call& call) {
  Answer& answer = answers_[static_cast<size_t>(rank)];
  numSilent_ -= answer.isGiven ? 0 : 1;
  answer = {.isGiven = true, .sequence = call.sequence};
}

Error Inquiry::conclude(const std::function<std::string(int)>& name) const {
  // Who is behind may wait for one that is silent.
  std::vector<int> late;
  for (int rank = 0; rank < static_cast<int>(answers_.size()); ++rank) {
    const Answer& answer = answers_[static_cast<size_t>(rank)];
    if (numSilent_ > 0 ? !answer.isGiven : answer.sequence < call_.sequence) {
      late.push_back(rank);
    }
  }
  if (late.empty()) {
    return Error(Fault::kTimeout, error_.peer(), error_.message() + " (found by " + name(asker_) + ")");
  }
  std::string others;
  for (size_t i = 1; i < late.size(); ++i) {
    others += (i == 1 ? ", nor did " : ", ") + name(late[i]);
  }
  return Error(Fault::kTimeout, name(late[0]), "did not take part in " + call_.text() + " in time" + others);
}

}  // namespace baguarun::net
