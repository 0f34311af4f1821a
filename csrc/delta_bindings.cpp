#include "delta_bindings.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "arrays.h"
#include "delta.h"
#include "delta_places.h"

namespace py = pybind11;

namespace asyncmoe {
namespace {

const std::byte* bytes_at(uintptr_t address) { return reinterpret_cast<const std::byte*>(address); }

void check_size(int64_t nbytes) {
    if (nbytes < 0)
        throw std::invalid_argument("bytes of a payload: got " + std::to_string(nbytes) + ", expected at least 0");
}

DeltaTable make_table(const Int64Array& rows, const Int64Array& firsts, const Int64Array& seeds) {
    const int64_t* data = rows_of(rows, kColumns, "rows of a delta");
    return {data, rows.shape(0), numbers_of(firsts, "firsts"), numbers_of(seeds, "seeds")};
}

uint64_t read(const DeltaTable& table, int64_t chunk, const Int64Array& bases, int threads) {
    const auto places = numbers_of(bases, "bases");
    py::gil_scoped_release released;
    return table.read(chunk, places, threads);
}

std::optional<std::string> fault(const DeltaTable& table, int64_t chunk, uintptr_t payload, int64_t nbytes,
                                 int threads) {
    check_size(nbytes);
    py::gil_scoped_release released;
    return table.fault(chunk, bytes_at(payload), nbytes, threads);
}

uint64_t apply(const DeltaTable& table, int64_t chunk, uintptr_t payload, int64_t nbytes, const Int64Array& bases,
               bool write, int threads) {
    check_size(nbytes);
    const auto places = numbers_of(bases, "bases");
    py::gil_scoped_release released;
    return table.apply(chunk, bytes_at(payload), nbytes, places, write, threads);
}

py::tuple encode(const DeltaTable& table, const Program& pack, int64_t chunk, const Int64Array& sources, uintptr_t base,
                 int64_t front, int64_t back, int threads) {
    check_size(std::min(front, back));
    const auto from = numbers_of(sources, "sources");
    Encoded made;
    {
        py::gil_scoped_release released;
        made = encode_delta(table, pack, chunk, from, bytes_at(base), threads);
    }
    py::array_t<uint8_t> frame(front + made.nbytes() + back);
    auto* data = reinterpret_cast<std::byte*>(frame.mutable_data());
    {
        py::gil_scoped_release released;
        made.write(data + front);
    }
    return py::make_tuple(frame, made.difference, made.changed, made.dense);
}

uint64_t fill(const DeltaTable& table, const Program& pack, int64_t chunk, const Int64Array& sources, uintptr_t base,
              int threads) {
    const auto from = numbers_of(sources, "sources");
    py::gil_scoped_release released;
    return fill_delta_base(table, pack, chunk, from, reinterpret_cast<std::byte*>(base), threads);
}

Int64Array places(const Int64Array& pieces, const Int64Array& queries) {
    const Table table{rows_of(pieces, kPieceColumns, "pieces"), pieces.shape(0)};
    const int64_t* asked = rows_of(queries, kPlaceColumns, "places");
    std::vector<int64_t> flat;
    {
        py::gil_scoped_release released;
        flat = elements_at(table, asked, queries.shape(0));
    }
    Int64Array made({queries.shape(0), static_cast<py::ssize_t>(kElementColumns)});
    std::copy(flat.begin(), flat.end(), made.mutable_data());
    return made;
}

}  // namespace

void bind_delta(py::module_& module) {
    module.attr("DELTA_BLOCK_BYTES") = kDeltaBlock;
    py::class_<DeltaTable>(module, "DeltaTable", "Elements of messages: which they are, where they lie (csrc/delta.h).")
        .def(py::init(&make_table), py::arg("rows").noconvert(), py::arg("firsts").noconvert(),
             py::arg("seeds").noconvert())
        .def_property_readonly("chunks", &DeltaTable::chunks)
        .def("bytes", &DeltaTable::bytes, py::arg("chunk"))
        .def("bound", &DeltaTable::bound, py::arg("chunk"))
        .def("read", &read, py::arg("chunk"), py::arg("bases").noconvert(), py::arg("threads") = 0,
             "The sum of the terms of a chunk's elements; a null base holds zeros. Addresses are not checked.")
        .def("fault", &fault, py::arg("chunk"), py::arg("payload"), py::arg("nbytes"), py::arg("threads") = 0,
             "What is wrong with a payload, or None.")
        .def("apply", &apply, py::arg("chunk"), py::arg("payload"), py::arg("nbytes"), py::arg("bases").noconvert(),
             py::arg("write"), py::arg("threads") = 0,
             "New terms less old ones of a payload's elements, which are written if asked. Addresses are not checked.");
    module.def("encode_delta", &encode, py::arg("table"), py::arg("pack"), py::arg("chunk"),
               py::arg("sources").noconvert(), py::arg("base"), py::arg("front"), py::arg("back"),
               py::arg("threads") = 0,
               "(uint8[front + payload + back], new terms less old ones, changed elements, dense blocks); front and "
               "back are left as they are. Addresses are not checked.");
    module.def("fill_delta_base", &fill, py::arg("table"), py::arg("pack"), py::arg("chunk"),
               py::arg("sources").noconvert(), py::arg("base"), py::arg("threads") = 0,
               "Pack a message and return the sum of its elements' terms. Addresses are not checked.");
    module.def("elements_at", &places, py::arg("pieces").noconvert(), py::arg("places").noconvert(),
               "int64[n, 1 + MAX_DIMS]: tensor and coordinates of elements int64[n, 2]: storage and offset in it.");
}

}  // namespace asyncmoe
