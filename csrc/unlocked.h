// How Python owns objects whose construction or destruction may wait for a device or for threads of a library.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace asyncmoe {

// Releases the GIL while an object is destroyed.
struct Unlocked {
    template <typename T>
    void operator()(T* object) const {
        pybind11::gil_scoped_release released;
        delete object;
    }
};

template <typename T>
using Owner = std::unique_ptr<T, Unlocked>;

// Releases the GIL during a call.
using Unguarded = pybind11::call_guard<pybind11::gil_scoped_release>;

}  // namespace asyncmoe
