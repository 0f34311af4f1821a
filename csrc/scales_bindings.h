#pragma once

#include <pybind11/pybind11.h>

namespace asyncmoe {

// Scales of blocks (csrc/scales.h), on the CPU, on a GPU where that is built, and as a GPU would on the CPU.
void bind_scales(pybind11::module_& module);

}  // namespace asyncmoe
