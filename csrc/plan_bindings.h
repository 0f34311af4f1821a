#pragma once

#include <pybind11/pybind11.h>

namespace asyncmoe {

// Adds csrc/pieces.h, holdings.h and plan.h to the extension.
void bind_plan(pybind11::module_& module);

}  // namespace asyncmoe
