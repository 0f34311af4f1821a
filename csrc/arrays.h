// NumPy arrays of int64 in the bindings. Functions throw std::invalid_argument unless the array has the shape in their
// comment; `what` names the array in the message.
#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace asyncmoe {

using Int64Array = pybind11::array_t<int64_t, pybind11::array::c_style>;

// "int64[2, 3]".
inline std::string shape_text(const Int64Array& array) {
    std::string text = "int64[";
    for (pybind11::ssize_t k = 0; k < array.ndim(); ++k) text += (k ? ", " : "") + std::to_string(array.shape(k));
    return text + "]";
}

// The rows of an array int64[n, columns].
inline const int64_t* rows_of(const Int64Array& array, int64_t columns, const std::string& what) {
    if (array.ndim() != 2 || array.shape(1) != columns)
        throw std::invalid_argument(what + ": got " + shape_text(array) + ", expected int64[n, " +
                                    std::to_string(columns) + "]");
    return array.data();
}

// The elements of an array int64[n].
inline std::vector<int64_t> numbers_of(const Int64Array& array, const std::string& what) {
    if (array.ndim() != 1) throw std::invalid_argument(what + ": got " + shape_text(array) + ", expected int64[n]");
    return {array.data(), array.data() + array.shape(0)};
}

}  // namespace asyncmoe
