// The file of a timeline: Chrome's trace event format, one event per line, whole JSON after each write.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <ctime>
#include <memory>
#include <set>
#include <string>

namespace baguarun::engine {

using TimelineLabel = std::shared_ptr<const std::string>;

struct TimelineEvent {
  // Both live for ever.
  const char* name = "";
  const char* category = "";
  // CLOCK_MONOTONIC. Equal: a moment, not a span.
  int64_t startNs = 0;
  int64_t endNs = 0;
  // Of the thread that records, in a span of its own; negative: not known.
  int64_t cpuNs = -1;
  // Negative: none.
  int64_t bytes = -1;
  int64_t peer = -1;
  int64_t round = -1;
  // 0: the thread that records.
  uint32_t track = 0;
  // What it is about, mostly a bucket.
  TimelineLabel label = nullptr;
};

int64_t clockNs(clockid_t clock);

// Whose events: the file shows the rank as the process.
struct TimelineOwner {
  int64_t rank = 0;
  std::string name;
};

// Threads: one at a time.
class TimelineFile {
 public:
  // Replaces the file at `path`. Throws std::system_error.
  TimelineFile(const TimelineOwner& owner, const std::string& path);
  ~TimelineFile();
  TimelineFile(const TimelineFile&) = delete;
  TimelineFile& operator=(const TimelineFile&) = delete;

  // Adds to what `write` will write. `threadName` is used at the thread's first event.
  void add(const TimelineEvent& event, pid_t thread, const std::string& threadName);
  void addDropped(uint64_t events);
  // Throws std::system_error; the file then ends where it ended before.
  void write();
  // Bytes that no later write changes: all but the closing brackets.
  off_t end() const { return end_; }

 private:
  void nameRow(int64_t row, const std::string& name);
  void addLine(const std::string& line);

  int64_t rank_;
  // From CLOCK_MONOTONIC to kEpoch, once: a clock that is set meanwhile does not tear the file.
  int64_t offsetNs_;
  int descriptor_ = -1;
  // Where the closing brackets lie.
  off_t end_ = 0;
  std::string pending_;
  std::set<int64_t> namedRows_;
};

}  // namespace baguarun::engine
