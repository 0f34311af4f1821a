#pragma once

#include <pybind11/pybind11.h>

namespace asyncmoe {

// Adds csrc/delta.h and delta_places.h to the extension.
void bind_delta(pybind11::module_& module);

// Adds csrc/device_delta.h.
void bind_device_delta(pybind11::module_& module);

}  // namespace asyncmoe
