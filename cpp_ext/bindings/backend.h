// The c10d backend for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace baguarun::bindings {

void bindBackend(pybind11::module_& module);

}  // namespace baguarun::bindings
