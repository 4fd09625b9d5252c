#include "bindings/exchanges.h"

#include <torch/csrc/utils/pybind.h>

#include <bit>

#include "engine/difference_exchange.h"
#include "engine/tensor_reduction.h"
#include "engine/tensor_swap.h"

namespace py = pybind11;

namespace baguarun::bindings {

using engine::DifferenceExchange;
using engine::Replica;
using engine::TensorReduction;

namespace {

using ReplicaTuple = std::tuple<at::Tensor, at::Tensor, std::vector<at::Tensor>>;

std::unique_ptr<DifferenceExchange> makeDifferenceExchange(const engine::Group& group, codec::Wire wire,
                                                           const std::vector<ReplicaTuple>& replicas) {
  std::vector<Replica> found;
  found.reserve(replicas.size());
  for (const auto& [weights, own, copies] : replicas) {
    found.push_back({weights, own, copies});
  }
  return std::make_unique<DifferenceExchange>(group, wire, std::move(found));
}

}  // namespace

void bindExchanges(py::module_& module) {
  const auto withoutGil = py::call_guard<py::gil_scoped_release>();
  py::class_<DifferenceExchange>(module, "DifferenceExchange")
      .def(py::init(&makeDifferenceExchange), py::arg("group"), py::arg("wire"), py::arg("replicas"),
           withoutGil)
      .def("start", &DifferenceExchange::start, withoutGil)
      .def("wait", &DifferenceExchange::wait, withoutGil)
      .def("bytes_per_round", &DifferenceExchange::bytesPerRound);
  py::class_<TensorReduction>(module, "TensorReduction")
      .def(py::init<const engine::Group&, const std::vector<at::Tensor>&, const engine::OperationSpec&,
                    uint32_t>(),
           py::arg("group"), py::arg("tensors"), py::arg("operation"), py::arg("round"), withoutGil)
      .def("wait", &TensorReduction::wait, withoutGil)
      .def("bytes", &TensorReduction::bytes);
  module.def("swap_tensors", &engine::swapTensors, py::arg("one"), py::arg("other"), withoutGil,
             "Gives each of two tensors on the CPU the numbers of the other.");
  module.def(
      "checksum",
      [](const std::vector<at::Tensor>& tensors) {
        // What fits into an int64 tensor.
        return std::bit_cast<int64_t>(engine::checksum(tensors));
      },
      py::arg("tensors"), withoutGil,
      "64 bits of the bytes of `tensors`, in order: two lists that differ have different ones.");
}

}  // namespace baguarun::bindings
