// Binds what a worker needs where its job is resized in place: control channel, orders to all groups, store.
#pragma once

#include <pybind11/pybind11.h>

namespace baguarun::bindings {

void bindControl(pybind11::module_& module);

}  // namespace baguarun::bindings
