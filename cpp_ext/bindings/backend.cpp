#include "bindings/backend.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "c10d/average.h"
#include "c10d/backend.h"
#include "c10d/live_groups.h"
#include "c10d/question.h"

namespace py = pybind11;

namespace baguarun::bindings {

using backend::BaguanetBackend;

namespace {

c10::intrusive_ptr<BaguanetBackend> makeBackend(const ::c10d::DistributedBackendOptions& asked,
                                                size_t arenaBytes,
                                                const c10::intrusive_ptr<BaguanetBackend>& over) {
  const std::vector<uint64_t> globalRanks(asked.global_ranks_in_group.begin(),
                                          asked.global_ranks_in_group.end());
  auto options = c10::make_intrusive<BaguanetBackend::Options>(
      std::chrono::duration_cast<std::chrono::milliseconds>(asked.timeout), asked.group_id, globalRanks,
      arenaBytes);
  return c10::make_intrusive<BaguanetBackend>(asked.store, asked.group_rank, asked.group_size,
                                              std::move(options), over);
}

}  // namespace

void bindBackend(py::module_& module) {
  // The base class is bound there.
  py::module_::import("torch._C._distributed_c10d");
  const auto withoutGil = py::call_guard<py::gil_scoped_release>();
  py::class_<BaguanetBackend, ::c10d::Backend, c10::intrusive_ptr<BaguanetBackend>>(module, "Backend")
      .def(py::init(&makeBackend), py::arg("options"), py::kw_only(), py::arg("arena_bytes"),
           py::arg("over") = c10::intrusive_ptr<BaguanetBackend>(), withoutGil)
      .def("_set_default_timeout", &BaguanetBackend::setTimeout, py::arg("timeout"), withoutGil)
      .def_property_readonly("options", &BaguanetBackend::getBackendOptions);
  py::class_<backend::Question>(module, "Question")
      .def(py::init<c10::intrusive_ptr<BaguanetBackend>>(), py::arg("group"))
      .def("ask", &backend::Question::ask, py::arg("mine"), withoutGil)
      .def("answer", &backend::Question::answer, withoutGil);
  py::class_<backend::Average>(module, "Average")
      .def(py::init<BaguanetBackend&, const at::Tensor&, const at::Tensor&>(), py::arg("group"),
           py::arg("source"), py::arg("into"), withoutGil)
      .def("is_done", &backend::Average::isDone)
      .def("wait", &backend::Average::wait, py::arg("count"), withoutGil);
  // After the end of the interpreter no thread may call back into Python.
  const auto leave = [] { backend::LiveGroups::ofProcess().leaveAll(); };
  py::module_::import("atexit").attr("register")(py::cpp_function(leave, withoutGil));
}

}  // namespace baguarun::bindings
