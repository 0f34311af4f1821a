#pragma once

#include <pybind11/pybind11.h>

namespace asyncmoe::trajectory {

// read_ints, read_floats, read_entries, read_lists and read_base64, which return None for a text of another form.
void bind_answer(pybind11::module_& module);

}  // namespace asyncmoe::trajectory
