#include "bindings/control.h"

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <system_error>
#include <utility>

#include "c10d/live_groups.h"
#include "c10d/world_store.h"
#include "control/channel.h"
#include "engine/errors.h"
#include "engine/fail_point.h"
#include "net/fail_point.h"
#include "net/waits.h"

namespace py = pybind11;

namespace baguarun::bindings {

namespace {

using backend::LiveGroups;
using backend::WorldStore;
using control::Channel;
using control::Message;

// Who waits for NCCL's kernels does so in calls of CUDA, which nobody counts.
std::optional<bool> knownToWait() {
  return LiveGroups::ofProcess().hasOthers() ? std::nullopt : std::optional(net::Waits::ofProcess().any());
}

std::optional<std::chrono::nanoseconds> knownToHaveWaited() {
  return LiveGroups::ofProcess().hasOthers() ? std::nullopt : std::optional(net::Waits::ofProcess().total());
}

std::unique_ptr<Channel> makeChannel(int fd) {
  Channel::Calls calls;
  calls.onAbort = [](const std::string& body) {
    LiveGroups::ofProcess().interrupt(control::numberIn(body, "generation"), control::textIn(body, "reason"));
  };
  calls.waits = knownToWait;
  calls.waited = knownToHaveWaited;
  return std::make_unique<Channel>(fd, std::move(calls));
}

py::object inPython(std::optional<Message> message) {
  if (!message) {
    return py::none();
  }
  return py::make_tuple(message->topic, py::bytes(message->body));
}

py::object next(Channel& channel, std::chrono::milliseconds timeout) {
  std::optional<Message> message;
  {
    const py::gil_scoped_release withoutGil;
    // For news of the others.
    const net::Waiting waiting;
    message = channel.next(timeout);
  }
  return inPython(std::move(message));
}

void send(Channel& channel, const std::string& framed) {
  try {
    channel.send(framed);
  } catch (const std::system_error& error) {
    throw engine::CommunicationFailure(error.what());
  }
}

}  // namespace

void bindControl(py::module_& module) {
  py::module_::import("torch._C._distributed_c10d");
  const auto withoutGil = py::call_guard<py::gil_scoped_release>();
  py::class_<Channel>(module, "ControlChannel")
      .def(py::init(&makeChannel), py::arg("fd"))
      .def("next", &next, py::arg("timeout"))
      .def("pending", [](const Channel& channel) { return inPython(channel.pending()); })
      .def("is_leased", &Channel::isLeased)
      .def("expects_newcomers", &Channel::expectsNewcomers)
      .def("note", &Channel::note, py::arg("generation"), py::arg("steps"))
      .def("send", &send, py::arg("framed"), withoutGil);
  py::class_<WorldStore, ::c10d::Store, c10::intrusive_ptr<WorldStore>>(module, "WorldStore")
      .def(py::init([](const std::string& host, uint16_t port, std::optional<int> listener,
                       std::chrono::milliseconds timeout) {
             return c10::make_intrusive<WorldStore>(host, port, listener, timeout);
           }),
           py::arg("host"), py::arg("port"), py::arg("listener"), py::arg("timeout"), withoutGil);
  module.def(
      "enter_generation", [](uint64_t generation) { LiveGroups::ofProcess().enter(generation); },
      py::arg("generation"));
  module.def("interruption", [] { return LiveGroups::ofProcess().interruption(); });
  module.def(
      "interrupt_generation",
      [](uint64_t generation, const std::string& reason) {
        LiveGroups::ofProcess().interrupt(generation, reason);
      },
      py::arg("generation"), py::arg("reason"), withoutGil,
      "As an ABORT that announces `generation`: all groups end, and none can be made before it is entered.");
  module.def(
      "bound_meetings",
      [](std::optional<std::chrono::milliseconds> bound) { LiveGroups::ofProcess().boundMeetings(bound); },
      py::arg("bound"), "Ranks of groups to come wait for each other no longer than this.");
  module.def(
      "abort_groups", [](const std::string& reason) { LiveGroups::ofProcess().abortAll(reason); },
      py::arg("reason"), withoutGil);
  module.def(
      "fail_after_sends", [](int64_t numSends) { engine::FailPoint::ofProcess().failAfterSends(numSends); },
      py::arg("num_sends"), "For tests: dies by SIGKILL where it would send one message more of a bucket.");
  module.def(
      "fail_after_messages", [](int64_t numMessages) { net::FailPoint::ofProcess().failAfter(numMessages); },
      py::arg("num_messages"),
      "For tests: dies by SIGKILL where it would send one large message more of a collective over links.");
  module.def(
      "abort_with_groups",
      [](const c10::intrusive_ptr<::c10d::Backend>& backend) { LiveGroups::ofProcess().add(backend); },
      py::arg("backend"));
}

}  // namespace baguarun::bindings
