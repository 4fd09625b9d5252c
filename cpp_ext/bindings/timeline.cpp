#include "bindings/timeline.h"

#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <utility>

#include "engine/errors.h"
#include "engine/ranges.h"
#include "engine/timeline.h"

namespace py = pybind11;

namespace baguarun::bindings {

using engine::Flight;
using engine::Span;
using engine::Timeline;
using engine::UsageFailure;

namespace {

// The same text for ever: events keep pointers. Names are few.
const char* forEver(const std::string& text) {
  static auto* const mutex = new std::mutex();
  static auto* const texts = new std::set<std::string>();
  const std::scoped_lock lock(*mutex);
  return texts->insert(text).first->c_str();
}

void start(const std::string& path, int64_t rank, const std::string& processName, uint64_t maxEvents) {
  try {
    Timeline::ofProcess().start({rank, processName}, path, maxEvents);
  } catch (const std::system_error& error) {
    throw UsageFailure("timeline " + path + ": " + error.code().message() +
                       "; want a file that can be written");
  } catch (const std::logic_error& error) {
    throw UsageFailure("timeline " + path + ": " + error.what());
  }
}

uint64_t stop() {
  try {
    return Timeline::ofProcess().stop();
  } catch (const std::system_error& error) {
    throw UsageFailure("the timeline is not complete: " + error.code().message());
  }
}

// A span for `with`: recorded if the timeline is on when it begins.
class SpanContext {
 public:
  SpanContext(const std::string& name, const std::string& category, int64_t bytes)
      : name_(forEver(name)), category_(forEver(category)), bytes_(bytes) {}

  void enter() { span_.emplace(name_, category_, bytes_).countCpu(); }
  void exit(const py::args& /*error*/) { span_.reset(); }

 private:
  const char* name_;
  const char* category_;
  int64_t bytes_;
  std::optional<Span> span_;
};

void record(const std::string& name, const std::string& category, int64_t startNs) {
  Timeline::ofProcess().record(
      {.name = forEver(name), .category = forEver(category), .startNs = startNs, .endNs = Timeline::nowNs()});
}

}  // namespace

void bindTimeline(py::module_& module) {
  const auto withoutGil = py::call_guard<py::gil_scoped_release>();
  module.attr("TIMELINE_MAX_EVENTS") = Timeline::kMaxEvents;
  module.def("timeline_start", &start, py::arg("path"), py::arg("rank"), py::arg("process_name"),
             py::arg("max_events"), withoutGil);
  module.def(
      "timeline_flush",
      [] {
        const Timeline::Written written = Timeline::ofProcess().flush();
        return std::pair(written.bytes, written.leftOut);
      },
      withoutGil);
  module.def("timeline_stop", &stop, withoutGil);
  module.def("timeline_is_on", &Timeline::isOn);
  module.def("timeline_now_ns", &Timeline::nowNs);
  module.def("timeline_record", &record, py::arg("name"), py::arg("category"), py::arg("start_ns"));
  py::class_<SpanContext>(module, "TimelineSpan")
      .def(py::init<const std::string&, const std::string&, int64_t>(), py::arg("name"), py::arg("category"),
           py::arg("size_bytes") = -1)
      .def("__enter__", &SpanContext::enter)
      .def("__exit__", &SpanContext::exit);
  py::class_<Flight>(module, "TimelineFlight")
      .def(py::init([](const std::string& name, const std::string& category, int64_t bytes) {
             return std::make_unique<Flight>(forEver(name), forEver(category), bytes);
           }),
           py::arg("name"), py::arg("category"), py::arg("size_bytes") = -1)
      .def("end", &Flight::end);
}

}  // namespace baguarun::bindings
