// Python module baguarun._C: the engine, the c10d backend, and the codecs for tests. Nothing is decided here.
#include <ATen/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "bindings/backend.h"
#include "bindings/control.h"
#include "bindings/elastic.h"
#include "bindings/exchanges.h"
#include "bindings/timeline.h"
#include "c10d/live_groups.h"
#include "codec/codec.h"
#include "engine/engine.h"
#include "engine/errors.h"
#include "engine/momentum_update.h"

namespace py = pybind11;

namespace baguarun::bindings {

namespace {

using engine::CommunicationFailure;
using engine::Engine;
using engine::EngineSettings;
using engine::EngineStats;
using engine::NamedParameter;
using engine::OperationKind;
using engine::OperationSpec;
using engine::UsageFailure;

void bindErrors() {
  const py::module_ errors = py::module_::import("baguarun.errors");
  // Kept for ever: exceptions may be raised as long as the process lives.
  UsageFailure::pythonType() = errors.attr("UsageError").cast<py::object>().release().ptr();
  CommunicationFailure::pythonType() = errors.attr("CommunicationError").cast<py::object>().release().ptr();
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      std::rethrow_exception(pointer);
    } catch (torch::PyTorchError& error) {
      PyErr_SetString(error.python_type(), error.what());
    }
  });
}

// Where a codec call on `tensor` runs: the CPU, or the current stream of its device, which is to be the
// current device.
codec::Exec execOf(const at::Tensor& tensor) {
  if (tensor.is_cpu()) {
    return {codec::Device::cpu, nullptr};
  }
  const c10::impl::VirtualGuardImpl device(tensor.device().type());
  return {codec::Device::cuda, device.getStream(tensor.device()).native_handle()};
}

// Room for a chunk. Its padding, of less than 16 bytes at the end, is 0: equal chunks have equal bytes.
at::Tensor emptyChunk(const at::Tensor& like, codec::Format format, size_t numElements) {
  const auto bytes = static_cast<int64_t>(codec::encodedBytes(format, numElements));
  at::Tensor chunk = at::empty({bytes}, like.options().dtype(at::kByte));
  chunk.narrow(0, std::max<int64_t>(bytes - 16, 0), std::min<int64_t>(bytes, 16)).zero_();
  return chunk;
}

at::Tensor encode(const at::Tensor& values, codec::Wire wire, uint32_t keep, uint64_t seed) {
  const codec::Format format{wire, keep, seed};
  const at::Tensor plain = values.contiguous();
  at::Tensor chunk = emptyChunk(plain, format, static_cast<size_t>(plain.numel()));
  const c10::OptionalDeviceGuard guard(at::device_of(plain));
  codec::encode(execOf(plain), format, engine::codecType(plain.scalar_type()), plain.const_data_ptr(),
                static_cast<size_t>(plain.numel()), chunk.mutable_data_ptr());
  return chunk;
}

std::vector<const void*> pointersTo(const std::vector<at::Tensor>& chunks) {
  std::vector<const void*> pointers;
  pointers.reserve(chunks.size());
  for (const at::Tensor& chunk : chunks) {
    pointers.push_back(chunk.const_data_ptr());
  }
  return pointers;
}

at::Tensor encodeWithResidual(const at::Tensor& values, at::Tensor residual, codec::Wire wire, uint32_t keep,
                              uint64_t seed, const std::vector<at::Tensor>& others) {
  const codec::Format format{wire, keep, seed};
  const at::Tensor plain = values.contiguous();
  if (residual.scalar_type() != at::kFloat || residual.numel() != plain.numel() ||
      !residual.is_contiguous() || residual.device() != plain.device()) {
    throw engine::UsageFailure("residual: want " + std::to_string(plain.numel()) +
                               " contiguous float32 numbers on the device of the values");
  }
  at::Tensor chunk = emptyChunk(plain, format, static_cast<size_t>(plain.numel()));
  for (const at::Tensor& other : others) {
    if (other.nbytes() != chunk.nbytes() || !other.is_contiguous() || other.device() != plain.device()) {
      throw engine::UsageFailure("others: want contiguous chunks of " + std::to_string(chunk.nbytes()) +
                                 " bytes on the device of the values");
    }
  }
  const c10::OptionalDeviceGuard guard(at::device_of(plain));
  codec::encodeSumWithResidual(execOf(plain), format, engine::codecType(plain.scalar_type()),
                               plain.const_data_ptr(), pointersTo(others).data(), others.size(),
                               residual.mutable_data_ptr<float>(), static_cast<size_t>(plain.numel()),
                               chunk.mutable_data_ptr());
  return chunk;
}

at::Tensor decode(const at::Tensor& chunk, codec::Wire wire, int64_t numElements, at::ScalarType dtype,
                  uint32_t keep, uint64_t seed) {
  at::Tensor values = at::empty({numElements}, chunk.options().dtype(dtype));
  const c10::OptionalDeviceGuard guard(at::device_of(chunk));
  codec::decode(execOf(chunk), {wire, keep, seed}, engine::codecType(dtype), chunk.const_data_ptr(),
                static_cast<size_t>(numElements), values.mutable_data_ptr());
  return values;
}

at::Tensor reduceEncode(const std::vector<at::Tensor>& chunks, codec::Wire wire, double scale,
                        int64_t numElements, uint32_t keep, uint64_t seed) {
  const codec::Format format{wire, keep, seed};
  at::Tensor result = emptyChunk(chunks.at(0), format, static_cast<size_t>(numElements));
  const c10::OptionalDeviceGuard guard(at::device_of(result));
  codec::reduceEncode(execOf(result), format, pointersTo(chunks).data(), chunks.size(),
                      static_cast<float>(scale), static_cast<size_t>(numElements), result.mutable_data_ptr());
  return result;
}

at::Tensor reduceDecode(const std::vector<at::Tensor>& chunks, codec::Wire wire, double scale,
                        int64_t numElements, at::ScalarType dtype, uint32_t keep, uint64_t seed) {
  at::Tensor values = at::empty({numElements}, chunks.at(0).options().dtype(dtype));
  const c10::OptionalDeviceGuard guard(at::device_of(values));
  codec::reduceDecode(execOf(values), {wire, keep, seed}, engine::codecType(dtype), pointersTo(chunks).data(),
                      chunks.size(), static_cast<float>(scale), static_cast<size_t>(numElements),
                      values.mutable_data_ptr());
  return values;
}

void bindCodec(py::module_& module) {
  py::enum_<codec::Wire>(module, "Wire")
      .value("F32", codec::Wire::f32)
      .value("F16", codec::Wire::f16)
      .value("BF16", codec::Wire::bf16)
      .value("MINMAX8", codec::Wire::minmax8)
      .value("MINMAX4", codec::Wire::minmax4)
      .value("SIGN1", codec::Wire::sign1)
      .value("TOPK", codec::Wire::topk)
      .value("RANDOMK", codec::Wire::randomk);
  const codec::Format defaults(codec::Wire::topk);
  const auto keep = py::arg("keep") = defaults.keep;
  const auto seed = py::arg("seed") = defaults.seed;
  module.def("cpu_path", &codec::cpuPath);
  module.def(
      "encoded_bytes",
      [](codec::Wire wire, size_t numElements, uint32_t kept) {
        return codec::encodedBytes({wire, kept, 0}, numElements);
      },
      py::arg("wire"), py::arg("num_elements"), keep);
  module.def("encode", &encode, py::arg("values"), py::arg("wire"), keep, seed);
  module.def("encode_with_residual", &encodeWithResidual, py::arg("values"), py::arg("residual"),
             py::arg("wire"), keep, seed, py::arg("others") = std::vector<at::Tensor>());
  module.def("decode", &decode, py::arg("chunk"), py::arg("wire"), py::arg("num_elements"), py::arg("dtype"),
             keep, seed);
  module.def("reduce_encode", &reduceEncode, py::arg("chunks"), py::arg("wire"), py::arg("scale"),
             py::arg("num_elements"), keep, seed);
  module.def("reduce_decode", &reduceDecode, py::arg("chunks"), py::arg("wire"), py::arg("scale"),
             py::arg("num_elements"), py::arg("dtype"), keep, seed);
}

void bindOperations(py::module_& module) {
  py::enum_<OperationKind>(module, "OperationKind")
      .value("ALL_REDUCE", OperationKind::kAllReduce)
      .value("SCATTER_REDUCE_GATHER", OperationKind::kScatterReduceGather)
      .value("POWER_SGD", OperationKind::kPowerSgd);
  py::class_<OperationSpec>(module, "OperationSpec")
      .def(py::init<OperationKind, codec::Wire, bool, uint32_t, bool>(), py::kw_only(), py::arg("kind"),
           py::arg("wire"), py::arg("average"), py::arg("keep"), py::arg("error_feedback"))
      .def_readonly("kind", &OperationSpec::kind)
      .def_readonly("wire", &OperationSpec::wire)
      .def_readonly("average", &OperationSpec::average)
      .def_readonly("keep", &OperationSpec::keep)
      .def_readonly("error_feedback", &OperationSpec::errorFeedback)
      .def_readwrite("matrix_rank", &OperationSpec::matrixRank)
      .def("exchange_by_rail", [](OperationSpec& spec, const engine::Rails& rails) {
        spec.rails = std::make_shared<engine::Rails>(rails);
      });
  py::class_<engine::Rails>(module, "Rails")
      .def(py::init<std::vector<int>, std::vector<int>, size_t, size_t, size_t, engine::Group,
                    engine::Group>(),
           py::kw_only(), py::arg("node"), py::arg("rail"), py::arg("num_rails"), py::arg("num_nodes"),
           py::arg("num_ranks"), py::arg("node_group"), py::arg("rail_group"));
}

std::shared_ptr<Engine> makeEngine(
    const std::vector<std::tuple<std::string, at::Tensor, OperationSpec>>& parameters,
    const engine::Lanes& lanes, const EngineSettings& settings) {
  std::vector<NamedParameter> named;
  named.reserve(parameters.size());
  for (const auto& [name, tensor, operation] : parameters) {
    named.push_back({name, tensor, operation});
  }
  return Engine::create(std::move(named), lanes, settings);
}

void setMomentum(Engine& engine, const std::vector<at::Tensor>& averages, const std::vector<double>& betas,
                 double lossScale) {
  std::vector<engine::Momentum> momentum;
  for (size_t index = 0; index < averages.size(); ++index) {
    momentum.push_back({averages[index], betas.at(index)});
  }
  engine.setMomentum(momentum, lossScale);
}

void bindEngineState(py::module_& module) {
  using engine::EngineState;
  py::class_<EngineState>(module, "EngineState")
      .def(py::init([](std::vector<size_t> order, bool orderAdopted, std::vector<at::Tensor> residuals,
                       std::vector<at::Tensor> committed) {
             return EngineState{std::move(order), orderAdopted, std::move(residuals), std::move(committed)};
           }),
           py::kw_only(), py::arg("order"), py::arg("order_adopted"), py::arg("residuals"),
           py::arg("committed") = std::vector<at::Tensor>())
      .def_readonly("order", &EngineState::order)
      .def_readonly("order_adopted", &EngineState::orderAdopted)
      .def_readonly("residuals", &EngineState::residuals)
      .def_readonly("committed", &EngineState::committed);
}

void bindEngine(py::module_& module) {
  const auto withoutGil = py::call_guard<py::gil_scoped_release>();
  py::class_<EngineSettings>(module, "EngineSettings")
      .def(py::init([](size_t bucketBytes, size_t smallBucketBytes, bool findUnused, bool staticGraph,
                       size_t arenaBytes) {
             return EngineSettings{{bucketBytes, smallBucketBytes}, findUnused, staticGraph, arenaBytes};
           }),
           py::kw_only(), py::arg("bucket_bytes"), py::arg("small_bucket_bytes"), py::arg("find_unused"),
           py::arg("static_graph"), py::arg("arena_bytes"));
  py::class_<EngineStats>(module, "EngineStats")
      .def_readonly("steps", &EngineStats::steps)
      .def_readonly("bytes_sent", &EngineStats::bytesSent)
      .def_readonly("buckets", &EngineStats::buckets)
      .def_readonly("exposed_wait_s", &EngineStats::exposedWaitSeconds);
  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine")
      .def(py::init(&makeEngine), py::arg("parameters"), py::arg("lanes"), py::arg("settings"), withoutGil)
      .def("settle", &Engine::settle, withoutGil)
      .def("in_round", &Engine::inRound, withoutGil)
      .def("before_forward", &Engine::beforeForward, py::arg("communicates"), withoutGil)
      .def("after_forward", &Engine::afterForward, py::arg("outputs"), withoutGil)
      .def("after_local_forward", &Engine::afterLocalForward, withoutGil)
      .def("take_part", &Engine::takePart, withoutGil)
      .def("set_operations", &Engine::setOperations, py::arg("operations"), withoutGil)
      .def("set_momentum", &setMomentum, py::arg("averages"), py::arg("betas"), py::arg("loss_scale"),
           withoutGil)
      .def("momentum_is_known_finite", &Engine::momentumIsKnownFinite, withoutGil)
      .def("state", &Engine::state, withoutGil)
      .def("load_state", &Engine::loadState, py::arg("state"), withoutGil)
      .def("close", &Engine::close, withoutGil)
      .def(
          "require_complete",
          [](Engine& engine, bool again) {
            engine.requireComplete([] { return backend::LiveGroups::ofProcess().interruption(); }, again);
          },
          py::arg("again"), withoutGil)
      .def("keep_committed", &Engine::keepCommitted, py::arg("keep"), withoutGil)
      .def("commit", &Engine::commit, withoutGil)
      .def("roll_back", &Engine::rollBack, withoutGil)
      .def("compress_after", &Engine::compressAfter, py::arg("rounds"), withoutGil)
      .def("rank", &Engine::rank)
      .def("world_size", &Engine::worldSize)
      .def("low_rank_tensors", &Engine::lowRankTensors, withoutGil)
      .def("needs_outputs", &Engine::needsOutputs)
      .def("stats", &Engine::stats, withoutGil)
      .def("plan", &Engine::plan, withoutGil);
}

void bindMomentumUpdate(py::module_& module) {
  const auto withoutGil = py::call_guard<py::gil_scoped_release>();
  module.def(
      "apply_momentum",
      [](const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& momenta,
         const std::vector<at::Tensor>& averages, const std::vector<at::Tensor>& denominators,
         const std::vector<double>& sizes, double decay) {
        std::vector<engine::MomentumUpdate> updates;
        for (size_t i = 0; i < parameters.size(); ++i) {
          updates.push_back(
              {parameters[i], momenta.at(i), averages.at(i), denominators.at(i), sizes.at(i), decay});
        }
        return engine::update(updates);
      },
      py::arg("parameters"), py::arg("momenta"), py::arg("averages"), py::arg("denominators"),
      py::arg("sizes"), py::arg("decay") = 0.0, withoutGil,
      "average = momentum + decay * parameter; parameter += size * average / denominator, of tensors on the "
      "CPU. Returns whether all of the average is finite.");
  module.def("all_finite", &engine::allFinite, py::arg("tensors"), withoutGil,
             "Whether there is neither an infinity nor a NaN in tensors on the CPU.");
}

}  // namespace

}  // namespace baguarun::bindings

PYBIND11_MODULE(_C, module) {
  using namespace baguarun;
  bindings::bindErrors();
  bindings::bindCodec(module);
  bindings::bindOperations(module);
  bindings::bindEngineState(module);
  bindings::bindEngine(module);
  bindings::bindMomentumUpdate(module);
  bindings::bindExchanges(module);
  bindings::bindBackend(module);
  bindings::bindControl(module);
  bindings::bindElastic(module);
  bindings::bindTimeline(module);
  module.def(
      "broadcast_coalesced",
      [](const engine::Group& group, const std::vector<at::Tensor>& tensors, size_t bufferBytes) {
        c10d::broadcast_coalesced(group, tensors, bufferBytes, 0);
      },
      py::arg("group"), py::arg("tensors"), py::arg("buffer_bytes"), py::call_guard<py::gil_scoped_release>(),
      "Overwrites `tensors` with those of rank 0, gathered by type into buffers of about `buffer_bytes`.");
}
