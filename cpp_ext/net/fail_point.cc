#include "net/fail_point.h"

#include <signal.h>
#include <unistd.h>

namespace baguarun::net {

FailPoint& FailPoint::ofProcess() {
  static FailPoint only;
  return only;
}

void FailPoint::posted(size_t bytes) {
  if (left_ > 0 && bytes > kSmallBytes) {
    --left_;
  }
}

void FailPoint::die() {
  kill(getpid(), SIGKILL);
  while (true) {
    pause();
  }
}

}  // namespace baguarun::net
