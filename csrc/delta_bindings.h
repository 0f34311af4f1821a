#pragma once

#include <pybind11/pybind11.h>

namespace asyncmoe {

// Adds csrc/delta.h and device_delta.h to the extension.
void bind_delta(pybind11::module_& module);

}  // namespace asyncmoe
