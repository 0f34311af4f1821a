#pragma once

#include <pybind11/pybind11.h>

namespace asyncmoe {

// What runs on a GPU, where it is built; and its emulation, everywhere.
void bind_cuda(pybind11::module_& module);

// NCCL (csrc/nccl.h).
void bind_nccl(pybind11::module_& module);

}  // namespace asyncmoe
