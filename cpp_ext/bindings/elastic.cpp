#include "bindings/elastic.h"

#include "elastic/committed.h"

namespace py = pybind11;

namespace baguarun::bindings {

using elastic::CpuRandomState;
using elastic::TensorCopies;

void bindElastic(py::module_& module) {
  py::class_<TensorCopies>(module, "TensorCopies")
      .def(py::init<>())
      .def("take", &TensorCopies::take, py::arg("live"))
      .def("put_back", &TensorCopies::putBack, py::arg("live"));
  py::class_<CpuRandomState>(module, "CpuRandomState")
      .def(py::init<>())
      .def("take", &CpuRandomState::take)
      .def("put_back", &CpuRandomState::putBack);
}

}  // namespace baguarun::bindings
