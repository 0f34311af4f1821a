#pragma once

#include <pybind11/pybind11.h>

namespace asyncmoe {

// Adds csrc/scales.h to the extension: on the CPU, on a GPU if built with CUDA, and as an emulation of the GPU.
void bind_scales(pybind11::module_& module);

}  // namespace asyncmoe
