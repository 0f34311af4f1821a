#pragma once

#include <pybind11/pybind11.h>

namespace asyncmoe {

// Adds what csrc/plan.h declares to the extension.
void bind_plan(pybind11::module_& module);

}  // namespace asyncmoe
