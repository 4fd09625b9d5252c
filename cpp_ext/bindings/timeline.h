// The timeline for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace baguarun::bindings {

void bindTimeline(pybind11::module_& module);

}  // namespace baguarun::bindings
