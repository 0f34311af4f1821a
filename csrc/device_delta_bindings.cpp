#include <pybind11/stl.h>

#include <algorithm>
#include <vector>

#include "arrays.h"
#include "delta_bindings.h"
#include "device_delta.h"
#ifdef ASYNCMOE_CUDA
#include "unlocked.h"
#endif

namespace py = pybind11;

namespace asyncmoe {
namespace {

const std::byte* bytes_at(uintptr_t address) { return reinterpret_cast<const std::byte*>(address); }

// (bytes of the payload, new terms less old ones or sum of terms, changed elements, dense blocks).
py::tuple as_tuple(const DeltaFound& found) {
    return py::make_tuple(found.nbytes, found.sum, found.changed, found.dense);
}

std::vector<int64_t> bases_of(const Int64Array& bases) { return numbers_of(bases, "bases"); }

}  // namespace

void bind_device_delta(py::module_& module) {
    module.def(
        "emulate_delta_encode",
        [](const DeltaTable& table, int64_t chunk, uintptr_t now, uintptr_t old, uintptr_t payload) {
            return as_tuple(emulate_delta_encode(table, chunk, bytes_at(now), bytes_at(old),
                                                 reinterpret_cast<std::byte*>(payload)));
        },
        py::arg("table"), py::arg("chunk"), py::arg("now"), py::arg("old"), py::arg("payload"),
        "DeviceDelta.encode and take, as the GPU's kernels would, in host memory. Slow. Addresses are not checked.");
    module.def(
        "emulate_delta_apply",
        [](const DeltaTable& table, int64_t chunk, uintptr_t payload, int64_t nbytes, const Int64Array& bases,
           bool write) {
            return as_tuple(emulate_delta_apply(table, chunk, bytes_at(payload), nbytes, bases_of(bases), write));
        },
        py::arg("table"), py::arg("chunk"), py::arg("payload"), py::arg("nbytes"), py::arg("bases").noconvert(),
        py::arg("write"), "DeviceDelta.apply and take, in host memory. Slow. Addresses are not checked.");
    module.def(
        "emulate_delta_read",
        [](const DeltaTable& table, int64_t chunk, const Int64Array& bases) {
            return as_tuple(emulate_delta_read(table, chunk, bases_of(bases)));
        },
        py::arg("table"), py::arg("chunk"), py::arg("bases").noconvert(),
        "DeviceDelta.read and take, in host memory. Slow. Addresses are not checked.");
#ifdef ASYNCMOE_CUDA
    py::class_<DeviceDelta, Owner<DeviceDelta>>(module, "DeviceDelta",
                                                "A table of deltas on a GPU (csrc/device_delta.h).")
        .def(py::init<const DeltaTable&, int>(), py::arg("table"), py::arg("device"), Unguarded(),
             py::keep_alive<1, 2>())
        .def("encode", &DeviceDelta::encode, py::arg("chunk"), py::arg("now"), py::arg("old"), py::arg("payload"),
             py::arg("stream"), Unguarded(), "Enqueue the comparison of a packed message with the one before.")
        .def(
            "apply",
            [](DeviceDelta& self, int64_t chunk, uintptr_t payload, int64_t nbytes, const Int64Array& bases, bool write,
               uintptr_t stream) {
                const auto places = bases_of(bases);
                py::gil_scoped_release released;
                self.apply(chunk, payload, nbytes, places, write, stream);
            },
            py::arg("chunk"), py::arg("payload"), py::arg("nbytes"), py::arg("bases").noconvert(), py::arg("write"),
            py::arg("stream"), "Enqueue the proof of a payload, or its scatter. Addresses are not checked.")
        .def(
            "read",
            [](DeviceDelta& self, int64_t chunk, const Int64Array& bases, uintptr_t stream) {
                const auto places = bases_of(bases);
                py::gil_scoped_release released;
                self.read(chunk, places, stream);
            },
            py::arg("chunk"), py::arg("bases").noconvert(), py::arg("stream"), "Enqueue the sum of a chunk's terms.")
        .def(
            "take", [](const DeviceDelta& self) { return as_tuple(self.take()); },
            "(bytes of the payload, new terms less old ones or sum of terms, changed elements, dense blocks) of the "
            "last "
            "call; wait for the stream first.");
#endif
}

}  // namespace asyncmoe
