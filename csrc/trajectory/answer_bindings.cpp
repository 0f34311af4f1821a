#include "answer_bindings.h"

#include <pybind11/numpy.h>

#include <string_view>
#include <vector>

#include "answer.h"

namespace py = pybind11;

namespace asyncmoe::trajectory {

namespace {

// A short text is read sooner than another thread has taken the GIL and given it back.
constexpr size_t kWorthReleasing = 1 << 16;

// The text of an object with consecutive bytes, which keeps them while the GIL is released.
class Text {
  public:
    explicit Text(const py::buffer& buffer) : info_(buffer.request()) {
        if (info_.ndim != 1 || info_.itemsize != 1 || info_.strides[0] != 1)
            throw std::invalid_argument("text: got a buffer of other than consecutive bytes");
    }

    std::string_view view() const { return {static_cast<const char*>(info_.ptr), static_cast<size_t>(info_.size)}; }

  private:
    py::buffer_info info_;
};

template <typename Read>
bool unlocked(std::string_view text, Read&& read) {
    if (text.size() < kWorthReleasing) return read(text);
    py::gil_scoped_release released;
    return read(text);
}

template <typename Value>
py::array_t<Value> array_of(const std::vector<Value>& values) {
    return py::array_t<Value>(static_cast<py::ssize_t>(values.size()), values.data());
}

template <typename Value, bool (*read)(std::string_view, std::vector<Value>&)>
py::object numbers(const py::buffer& buffer) {
    const Text text(buffer);
    std::vector<Value> values;
    if (!unlocked(text.view(), [&](std::string_view view) { return read(view, values); })) return py::none();
    return array_of(values);
}

template <typename One, typename Other, bool (*read)(std::string_view, std::vector<One>&, std::vector<Other>&)>
py::object pairs(const py::buffer& buffer) {
    const Text text(buffer);
    std::vector<One> one;
    std::vector<Other> other;
    if (!unlocked(text.view(), [&](std::string_view view) { return read(view, one, other); })) return py::none();
    return py::make_tuple(array_of(one), array_of(other));
}

py::object base64(const py::buffer& buffer) {
    const Text text(buffer);
    const int64_t size = base64_bytes(text.view());
    if (size < 0) return py::none();
    auto made = py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(nullptr, size));
    if (!made) throw py::error_already_set();
    auto* to = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(made.ptr()));
    if (!unlocked(text.view(), [&](std::string_view view) { return read_base64(view, to); })) return py::none();
    return made;
}

}  // namespace

void bind_answer(py::module_& module) {
    module.def("read_ints", &numbers<int32_t, read_ints>, py::arg("text"));
    module.def("read_floats", &numbers<float, read_floats>, py::arg("text"));
    module.def("read_entries", &pairs<float, int32_t, read_entries>, py::arg("text"));
    module.def("read_lists", &pairs<int32_t, int32_t, read_lists>, py::arg("text"));
    module.def("read_base64", &base64, py::arg("text"));
}

}  // namespace asyncmoe::trajectory
