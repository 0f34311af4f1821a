#include "delta_bindings.h"

#include <pybind11/stl.h>

#include <vector>

#include "arrays.h"
#include "device_delta.h"
#ifdef ASYNCMOE_CUDA
#include "unlocked.h"
#endif

namespace py = pybind11;

namespace asyncmoe {
namespace {

std::byte* bytes_at(uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

// (bytes of the payload, new terms minus old ones or sum of terms, changed elements).
py::tuple as_tuple(const DeltaFound& found) { return py::make_tuple(found.nbytes, found.sum, found.changed); }

DeltaTable make_table(const Int64Array& rows, const Int64Array& firsts, const Int64Array& seeds) {
    const int64_t* data = rows_of(rows, kColumns, "rows of a delta");
    return {data, rows.shape(0), numbers_of(firsts, "firsts"), numbers_of(seeds, "seeds")};
}

uint64_t read(const DeltaTable& table, int64_t chunk, const Int64Array& bases, uintptr_t message, int threads) {
    const auto places = numbers_of(bases, "bases");
    py::gil_scoped_release released;
    return table.read(chunk, places, bytes_at(message), threads);
}

uint64_t apply(const DeltaTable& table, int64_t chunk, uintptr_t payload, int64_t nbytes, const Int64Array& bases,
               bool write, int threads) {
    const auto places = numbers_of(bases, "bases");
    py::gil_scoped_release released;
    return table.apply(chunk, bytes_at(payload), nbytes, places, write, threads);
}

py::tuple encode(const DeltaTable& table, const Program& pack, int64_t chunk, const Int64Array& sources, uintptr_t base,
                 uintptr_t payload, int threads) {
    const auto from = numbers_of(sources, "sources");
    DeltaFound found{};
    {
        py::gil_scoped_release released;
        found = encode_delta(table, pack, chunk, from, bytes_at(base), bytes_at(payload), threads);
    }
    return as_tuple(found);
}

void bind_emulation(py::module_& module) {
    module.def(
        "emulate_delta_encode",
        [](const DeltaTable& table, int64_t chunk, uintptr_t now, uintptr_t base, uintptr_t payload) {
            return as_tuple(emulate_delta_encode(table, chunk, bytes_at(now), bytes_at(base), bytes_at(payload)));
        },
        py::arg("table"), py::arg("chunk"), py::arg("now"), py::arg("base"), py::arg("payload"),
        "DeviceDelta.encode and take, as the GPU's kernels would, in host memory. Slow. Addresses are not checked.");
    module.def(
        "emulate_delta_apply",
        [](const DeltaTable& table, int64_t chunk, uintptr_t payload, int64_t nbytes, const Int64Array& bases,
           bool write) {
            return as_tuple(
                emulate_delta_apply(table, chunk, bytes_at(payload), nbytes, numbers_of(bases, "bases"), write));
        },
        py::arg("table"), py::arg("chunk"), py::arg("payload"), py::arg("nbytes"), py::arg("bases").noconvert(),
        py::arg("write"), "DeviceDelta.apply and take, in host memory. Slow. Addresses are not checked.");
    module.def(
        "emulate_delta_read",
        [](const DeltaTable& table, int64_t chunk, const Int64Array& bases, uintptr_t message) {
            return as_tuple(emulate_delta_read(table, chunk, numbers_of(bases, "bases"), bytes_at(message)));
        },
        py::arg("table"), py::arg("chunk"), py::arg("bases").noconvert(), py::arg("message"),
        "DeviceDelta.read and take, in host memory. Slow. Addresses are not checked.");
}

#ifdef ASYNCMOE_CUDA
void bind_device(py::module_& module) {
    py::class_<DeviceDelta, Owner<DeviceDelta>>(module, "DeviceDelta",
                                                "A table of deltas on a GPU (csrc/device_delta.h).")
        .def(py::init<const DeltaTable&, int>(), py::arg("table"), py::arg("device"), Unguarded(),
             py::keep_alive<1, 2>())
        .def("encode", &DeviceDelta::encode, py::arg("chunk"), py::arg("now"), py::arg("base"), py::arg("payload"),
             py::arg("stream"), Unguarded(), "Enqueue the comparison of a packed message with the one before.")
        .def(
            "apply",
            [](DeviceDelta& self, int64_t chunk, uintptr_t payload, int64_t nbytes, const Int64Array& bases, bool write,
               uintptr_t stream) {
                const auto places = numbers_of(bases, "bases");
                py::gil_scoped_release released;
                self.apply(chunk, payload, nbytes, places, write, stream);
            },
            py::arg("chunk"), py::arg("payload"), py::arg("nbytes"), py::arg("bases").noconvert(), py::arg("write"),
            py::arg("stream"), "Enqueue the proof of a payload, or its scatter. Addresses are not checked.")
        .def(
            "read",
            [](DeviceDelta& self, int64_t chunk, const Int64Array& bases, uintptr_t message, uintptr_t stream) {
                const auto places = numbers_of(bases, "bases");
                py::gil_scoped_release released;
                self.read(chunk, places, message, stream);
            },
            py::arg("chunk"), py::arg("bases").noconvert(), py::arg("message"), py::arg("stream"),
            "Enqueue the sum of a chunk's terms.")
        .def(
            "take", [](const DeviceDelta& self) { return as_tuple(self.take()); },
            "(bytes of the payload, new terms less old ones or sum of terms, changed elements) of the last call; wait "
            "for the stream first.");
}
#endif

}  // namespace

void bind_delta(py::module_& module) {
    module.attr("DELTA_BLOCK_BYTES") = kDeltaBlock;
    module.attr("DELTA_ENTRY_BYTES") = kEntry;
    py::class_<DeltaTable>(module, "DeltaTable", "Elements of messages: which they are, where they lie (csrc/delta.h).")
        .def(py::init(&make_table), py::arg("rows").noconvert(), py::arg("firsts").noconvert(),
             py::arg("seeds").noconvert())
        .def("bytes", &DeltaTable::bytes, py::arg("chunk"))
        .def("bound", &DeltaTable::bound, py::arg("chunk"))
        .def("read", &read, py::arg("chunk"), py::arg("bases").noconvert(), py::arg("message") = 0,
             py::arg("threads") = 0,
             "The sum of the terms of a chunk's elements, in storages or in a message. Addresses are not checked.")
        .def("apply", &apply, py::arg("chunk"), py::arg("payload"), py::arg("nbytes"), py::arg("bases").noconvert(),
             py::arg("write"), py::arg("threads") = 0,
             "New terms less old ones of a payload's elements, which are written if asked. Addresses are not checked.");
    module.def("encode_delta", &encode, py::arg("table"), py::arg("pack"), py::arg("chunk"),
               py::arg("sources").noconvert(), py::arg("base"), py::arg("payload"), py::arg("threads") = 0,
               "(bytes of the payload, new terms less old ones, changed elements); the base is the message as it is "
               "now. Addresses are not checked.");
    bind_emulation(module);
#ifdef ASYNCMOE_CUDA
    bind_device(module);
#endif
}

}  // namespace asyncmoe
