#include "bindings/elastic.h"

#include <pybind11/stl.h>

#include "elastic/committed.h"
#include "elastic/known_values.h"
#include "elastic/pages.h"

namespace py = pybind11;

namespace baguarun::bindings {

using elastic::CpuRandomState;
using elastic::KnownValues;
using elastic::MemoryCopy;
using elastic::TensorCopies;

void bindElastic(py::module_& module) {
  py::class_<TensorCopies>(module, "TensorCopies")
      .def(py::init<>())
      .def("take", &TensorCopies::take, py::arg("live"))
      .def("put_back", &TensorCopies::putBack, py::arg("live"));
  py::class_<KnownValues>(module, "KnownValues")
      .def(py::init<>())
      .def("are", &KnownValues::are, py::arg("dicts"))
      .def("forget", &KnownValues::forget);
  module.def("own_pages", &elastic::ownPages, py::arg("address"), py::arg("size_bytes"),
             py::call_guard<py::gil_scoped_release>());
  module.def("values_in", &elastic::valuesIn, py::arg("dicts"));
  py::class_<MemoryCopy>(module, "MemoryCopy")
      .def(py::init<uintptr_t, size_t>(), py::arg("address"), py::arg("size_bytes"))
      .def("take", &MemoryCopy::take)
      .def("bytes", [](const MemoryCopy& self) { return py::bytes(self.bytes()); });
  py::class_<CpuRandomState>(module, "CpuRandomState")
      .def(py::init<>())
      .def("take", &CpuRandomState::take)
      .def("put_back", &CpuRandomState::putBack);
}

}  // namespace baguarun::bindings
