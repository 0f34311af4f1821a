#pragma once

#include <pybind11/pybind11.h>

namespace asyncmoe {

// Adds the GPU functions, if they are built, and their emulation on the CPU to the extension.
void bind_cuda(pybind11::module_& module);

// Adds csrc/nccl.h to the extension.
void bind_nccl(pybind11::module_& module);

}  // namespace asyncmoe
