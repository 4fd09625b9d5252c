// What `baguarun.elastic` calls.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace baguarun::bindings {

void bindElastic(pybind11::module_& module);

}  // namespace baguarun::bindings
