#include "engine/timeline.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <system_error>

namespace baguarun::engine {

namespace {

constexpr auto kInterval = std::chrono::milliseconds(500);
// Of one thread, from one write to the next.
constexpr size_t kMaxPending = size_t{1} << 15;

}  // namespace

// Events of one thread that are still to be written. The lock is free but for two moments a second.
struct Timeline::Buffer {
  std::mutex mutex;
  std::vector<TimelineEvent> events;
  uint64_t dropped = 0;
  pid_t thread = 0;
  std::string threadName;
};

Timeline& Timeline::ofProcess() {
  static auto* const timeline = new Timeline();
  return *timeline;
}

Timeline::Timeline() {
  pthread_atfork(nullptr, nullptr, [] {
    // The thread that writes is not in the child, and the file is the parent's.
    on_.store(false, std::memory_order_relaxed);
    Timeline& here = ofProcess();
    static_cast<void>(here.thread_.release());
    static_cast<void>(here.file_.release());
  });
}

int64_t Timeline::nowNs() { return clockNs(CLOCK_MONOTONIC); }

int64_t Timeline::cpuNs() { return clockNs(CLOCK_THREAD_CPUTIME_ID); }

void Timeline::start(const TimelineOwner& owner, const std::string& path, uint64_t maxEvents) {
  const std::scoped_lock control(controlMutex_);
  if (thread_) {
    throw std::logic_error("a timeline is being recorded already; stop it first");
  }
  auto file = std::make_unique<TimelineFile>(owner, path);
  for (const auto& buffer : takeBuffers()) {
    // Of spans that ended while an earlier recording stopped.
    const std::scoped_lock lock(buffer->mutex);
    buffer->events.clear();
    buffer->dropped = 0;
  }
  file_ = std::move(file);
  eventsLeft_ = maxEvents;
  dropped_ = 0;
  failure_ = 0;
  stopping_ = false;
  on_.store(true, std::memory_order_relaxed);
  thread_ = std::make_unique<std::thread>([this] { run(); });
}

Timeline::Written Timeline::flush() {
  const std::scoped_lock control(controlMutex_);
  if (!thread_) {
    return {};
  }
  std::unique_lock lock(mutex_);
  const uint64_t asked = ++flushesAsked_;
  wake_.notify_one();
  flushed_.wait(lock, [this, asked] { return flushesDone_ >= asked; });
  return written_;
}

uint64_t Timeline::stop() {
  const std::scoped_lock control(controlMutex_);
  if (!thread_) {
    return 0;
  }
  on_.store(false, std::memory_order_relaxed);
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_->join();
  thread_.reset();
  file_.reset();
  if (failure_ != 0) {
    throw std::system_error(failure_, std::generic_category(), "write");
  }
  return dropped_;
}

void Timeline::record(TimelineEvent event) {
  if (!isOn()) {
    return;
  }
  Buffer& buffer = ownBuffer();
  const std::scoped_lock lock(buffer.mutex);
  if (buffer.events.size() < kMaxPending) {
    buffer.events.push_back(std::move(event));
  } else {
    ++buffer.dropped;
  }
}

Timeline::Buffer& Timeline::ownBuffer() {
  thread_local std::shared_ptr<Buffer> own;
  if (!own) {
    own = std::make_shared<Buffer>();
    own->thread = static_cast<pid_t>(syscall(SYS_gettid));
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof(name));
    own->threadName = own->thread == getpid() ? "main thread" : name;
    const std::scoped_lock lock(buffersMutex_);
    buffers_.push_back(own);
  }
  return *own;
}

void Timeline::run() {
  pthread_setname_np(pthread_self(), "bagua-timeline");
  bool last = false;
  uint64_t asked = 0;
  while (!last) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait_for(lock, kInterval, [this] { return stopping_ || flushesAsked_ != flushesDone_; });
      last = stopping_;
      asked = flushesAsked_;
    }
    if (failure_ == 0) {
      writeSome(last);
    }
    const std::scoped_lock lock(mutex_);
    flushesDone_ = asked;
    written_ = {.bytes = file_->end(), .leftOut = dropped_};
    flushed_.notify_one();
  }
}

void Timeline::writeSome(bool isLast) {
  try {
    writeOut();
    if (isLast && dropped_ > 0) {
      file_->addDropped(dropped_);
      file_->write();
    }
  } catch (const std::system_error& error) {
    // Training goes on; stop() tells again.
    on_.store(false, std::memory_order_relaxed);
    failure_ = error.code().value();
    std::fprintf(stderr, "baguarun: the timeline ends here, it cannot be written: %s\n",
                 std::strerror(failure_));
  }
}

void Timeline::writeOut() {
  for (const auto& buffer : takeBuffers()) {
    std::vector<TimelineEvent> events;
    {
      const std::scoped_lock lock(buffer->mutex);
      events.reserve(buffer->events.size());
      events.swap(buffer->events);
      dropped_ += buffer->dropped;
      buffer->dropped = 0;
    }
    for (const TimelineEvent& event : events) {
      if (eventsLeft_ == 0) {
        ++dropped_;
        continue;
      }
      --eventsLeft_;
      file_->add(event, buffer->thread, buffer->threadName);
    }
  }
  file_->write();
}

// All there are; those of threads that have ended are taken off the list.
std::vector<std::shared_ptr<Timeline::Buffer>> Timeline::takeBuffers() {
  const std::scoped_lock lock(buffersMutex_);
  std::vector<std::shared_ptr<Buffer>> taken = buffers_;
  std::erase_if(buffers_, [](const auto& buffer) { return buffer.use_count() == 2; });
  return taken;
}

}  // namespace baguarun::engine
