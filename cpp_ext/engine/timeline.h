// What this process did when, written to a file that Perfetto and chrome://tracing read.
//
// Threads record into buffers of their own. A thread of the timeline writes them out twice a second, and what
// it writes is whole JSON each time: a process that is killed leaves all but its last half second. The first
// `maxEvents` are kept, later ones are counted. Off, a place that could record costs one relaxed load.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/timeline_file.h"

namespace baguarun::engine {

// Of the process: one file shows all engines in it. Never destroyed, since threads may record to the last.
//
// Threads: all calls from anywhere. A forked child starts with the timeline off.
class Timeline {
 public:
  // Some 100 bytes each in the file.
  static constexpr uint64_t kMaxEvents = uint64_t{1} << 20;

  static Timeline& ofProcess();
  static bool isOn() { return on_.load(std::memory_order_relaxed); }
  static int64_t nowNs();
  // What the calling thread has used of a CPU.
  static int64_t cpuNs();

  // Opens the file and writes to it at once. Throws std::system_error if that fails, std::logic_error if a
  // recording is going on.
  void start(const TimelineOwner& owner, const std::string& path, uint64_t maxEvents);

  // What is in the file for good, in whole lines, and how many events are not, for all that were to be kept.
  struct Written {
    int64_t bytes = 0;
    uint64_t leftOut = 0;
  };
  // Returns when all events of before are in the file, or cannot be written. Nothing if nothing is recorded.
  Written flush();

  // Writes out the rest and returns how many events were left out; 0 if nothing was being recorded. Throws
  // std::system_error if some write failed since the start; the file then ends before it.
  uint64_t stop();

  // Keeps `event` if the timeline is on.
  void record(TimelineEvent event);

  // A row of its own below those of the threads, named by the label of its first event.
  uint32_t newTrack() { return nextTrack_.fetch_add(1, std::memory_order_relaxed); }

 private:
  struct Buffer;

  Timeline();
  Buffer& ownBuffer();
  void run();
  void writeSome(bool isLast);
  void writeOut();
  std::vector<std::shared_ptr<Buffer>> takeBuffers();

  static inline std::atomic<bool> on_ = false;
  std::atomic<uint32_t> nextTrack_ = 1;

  std::mutex buffersMutex_;
  std::vector<std::shared_ptr<Buffer>> buffers_;

  // One start, flush or stop at a time.
  std::mutex controlMutex_;
  // Guards what follows, except that the thread alone uses the file while it runs.
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::condition_variable flushed_;
  uint64_t flushesAsked_ = 0;
  uint64_t flushesDone_ = 0;
  Written written_;
  std::unique_ptr<TimelineFile> file_;
  uint64_t eventsLeft_ = 0;
  uint64_t dropped_ = 0;
  int failure_ = 0;
  // Replaced, not joined, in a forked child.
  std::unique_ptr<std::thread> thread_;
};

}  // namespace baguarun::engine
