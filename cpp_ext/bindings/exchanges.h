// Exchanges of whole weights, for algorithms that work around optimizer steps.
#pragma once

#include <pybind11/pybind11.h>

namespace baguarun::bindings {

void bindExchanges(pybind11::module_& module);

}  // namespace baguarun::bindings
