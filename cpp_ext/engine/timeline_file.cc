#include "engine/timeline_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <ctime>
#include <string_view>
#include <system_error>

namespace baguarun::engine {

namespace {

// Times count from here (2026-01-01 UTC), so that ranks line up and a double holds them to nanoseconds.
constexpr int64_t kEpochS = 1767225600;
constexpr std::string_view kHead =
    R"({"displayTimeUnit":"ms","otherData":{"ts counts from":"2026-01-01T00:00:00Z"},"traceEvents":[)"
    "\n";
constexpr std::string_view kTail = "\n]}\n";
// Rows of tracks come after all thread ids that Linux gives out.
constexpr int64_t kFirstTrackRow = int64_t{1} << 22;
// A disk without room for a few seconds' events is refused at the start.
constexpr off_t kReservedBytes = off_t{1} << 20;

// Microseconds with all digits of the nanoseconds.
std::string microseconds(int64_t ns) {
  char text[32];
  const int64_t size = ns < 0 ? -ns : ns;
  std::snprintf(text, sizeof(text), "%s%" PRId64 ".%03" PRId64, ns < 0 ? "-" : "", size / 1000, size % 1000);
  return text;
}

std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (code < 0x20 || code == 0x7f) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", code);
      result += escape;
    } else {
      result += c;
    }
  }
  return result + '"';
}

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

void writeAt(int descriptor, std::string_view text, off_t offset) {
  while (!text.empty()) {
    const ssize_t written = pwrite(descriptor, text.data(), text.size(), offset);
    if (written < 0 && errno != EINTR) {
      fail("write");
    }
    if (written > 0) {
      text.remove_prefix(static_cast<size_t>(written));
      offset += written;
    }
  }
}

}  // namespace

int64_t clockNs(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

TimelineFile::TimelineFile(const TimelineOwner& owner, const std::string& path)
    : rank_(owner.rank),
      offsetNs_(clockNs(CLOCK_REALTIME) - clockNs(CLOCK_MONOTONIC) - kEpochS * 1'000'000'000),
      descriptor_(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) {
  if (descriptor_ < 0) {
    fail("open");
  }
  try {
    // Not every file system knows how; those learn of a full disk when it is full.
    if (fallocate(descriptor_, FALLOC_FL_KEEP_SIZE, 0, kReservedBytes) != 0 && errno == ENOSPC) {
      fail("write");
    }
    writeAt(descriptor_, kHead, 0);
    end_ = static_cast<off_t>(kHead.size());
    const std::string rank = std::to_string(rank_);
    pending_ = R"({"ph":"M","name":"process_name","pid":)" + rank + R"(,"args":{"name":)" +
               quoted(owner.name) + "}}";
    addLine(R"({"ph":"M","name":"process_sort_index","pid":)" + rank + R"(,"args":{"sort_index":)" + rank +
            "}}");
    write();
  } catch (const std::system_error&) {
    close(descriptor_);
    throw;
  }
}

TimelineFile::~TimelineFile() { close(descriptor_); }

void TimelineFile::add(const TimelineEvent& event, pid_t thread, const std::string& threadName) {
  const int64_t row = event.track == 0 ? thread : kFirstTrackRow + event.track;
  nameRow(row, event.track == 0 ? threadName : *event.label);
  std::string name = event.name;
  if (event.peer >= 0) {
    name += " rank " + std::to_string(event.peer);
  }
  const bool isMoment = event.startNs == event.endNs;
  std::string line = R"({"ph":")" + std::string(isMoment ? "i" : "X") + R"(","name":)" + quoted(name) +
                     R"(,"cat":")" + event.category + R"(","pid":)" + std::to_string(rank_) + R"(,"tid":)" +
                     std::to_string(row) + R"(,"ts":)" + microseconds(event.startNs + offsetNs_);
  line += isMoment ? R"(,"s":"t")" : R"(,"dur":)" + microseconds(event.endNs - event.startNs);
  if (event.cpuNs >= 0) {
    line += R"(,"tdur":)" + microseconds(event.cpuNs);
  }
  std::string arguments;
  if (event.label) {
    arguments += R"(,"of":)" + quoted(*event.label);
  }
  if (event.round >= 0) {
    arguments += R"(,"round":)" + std::to_string(event.round);
  }
  if (event.bytes >= 0) {
    arguments += R"(,"bytes":)" + std::to_string(event.bytes);
  }
  if (!arguments.empty()) {
    line += R"(,"args":{)" + arguments.substr(1) + "}";
  }
  addLine(line + "}");
}

void TimelineFile::addDropped(uint64_t events) {
  addLine(R"({"ph":"M","name":"events left out","pid":)" + std::to_string(rank_) + R"(,"args":{"events":)" +
          std::to_string(events) + "}}");
}

void TimelineFile::write() {
  if (pending_.empty()) {
    return;
  }
  try {
    writeAt(descriptor_, pending_ + std::string(kTail), end_);
  } catch (const std::system_error&) {
    // The old end again, in blocks that the file has; best effort, the first error counts.
    if (pwrite(descriptor_, kTail.data(), kTail.size(), end_) == static_cast<ssize_t>(kTail.size())) {
      static_cast<void>(ftruncate(descriptor_, end_ + static_cast<off_t>(kTail.size())) == 0);
    }
    throw;
  }
  end_ += static_cast<off_t>(pending_.size());
  pending_.clear();
}

void TimelineFile::nameRow(int64_t row, const std::string& name) {
  if (namedRows_.insert(row).second) {
    addLine(R"({"ph":"M","name":"thread_name","pid":)" + std::to_string(rank_) + R"(,"tid":)" +
            std::to_string(row) + R"(,"args":{"name":)" + quoted(name) + "}}");
  }
}

void TimelineFile::addLine(const std::string& line) { pending_ += ",\n" + line; }

}  // namespace baguarun::engine
