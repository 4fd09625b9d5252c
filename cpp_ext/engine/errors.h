// The two errors that the engine raises on purpose. Both keep their Python class on the way through autograd.
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include <exception>
#include <string>

namespace baguarun::engine {

// The script asks for something impossible (an unused parameter, a sparse gradient): `UsageError` in Python.
struct UsageFailure final : torch::PyTorchError {
  using torch::PyTorchError::PyTorchError;
  PyObject* python_type() override { return pythonType(); }
  // The Python class; set once by the bindings, never freed.
  static PyObject*& pythonType() {
    static PyObject* type = PyExc_RuntimeError;
    return type;
  }
};

// A collective failed: `CommunicationError` in Python. The message names bucket, operation and peer.
struct CommunicationFailure final : torch::PyTorchError {
  using torch::PyTorchError::PyTorchError;
  PyObject* python_type() override { return pythonType(); }
  // The Python class; set once by the bindings, never freed.
  static PyObject*& pythonType() {
    static PyObject* type = PyExc_RuntimeError;
    return type;
  }
};

// What went wrong, without the backtrace that torch's own errors carry.
inline std::string textOf(const std::exception& error) {
  const auto* fromTorch = dynamic_cast<const c10::Error*>(&error);
  return fromTorch != nullptr ? fromTorch->what_without_backtrace() : error.what();
}

}  // namespace baguarun::engine
