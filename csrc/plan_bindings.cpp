#include "plan_bindings.h"

#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "arrays.h"
#include "plan.h"

namespace py = pybind11;

namespace asyncmoe {

namespace {

std::vector<int64_t> values(const Int64Array& array) { return {array.data(), array.data() + array.size()}; }

Table table_of(const Int64Array& array) { return {rows_of(array, kPieceColumns, "pieces"), array.shape(0)}; }

// Keeps the arrays alive for the object that reads them.
struct Tables {
    std::vector<Int64Array> arrays;
    Side side;

    Tables(std::vector<Int64Array> tables, const Int64Array& ranks, const Int64Array& numbers)
        : arrays(std::move(tables)) {
        for (const auto& array : arrays) side.tables.push_back(table_of(array));
        side.ranks = values(ranks);
        for (int64_t number : values(numbers)) {
            if (number < 0 || number >= static_cast<int64_t>(arrays.size()))
                throw std::invalid_argument("table of a rank: got " + std::to_string(number) + ", expected below " +
                                            std::to_string(arrays.size()) + ", the number of tables");
            side.table_of.push_back(static_cast<int32_t>(number));
        }
        if (side.ranks.size() != side.table_of.size())
            throw std::invalid_argument("tables of ranks: got " + std::to_string(side.table_of.size()) + ", expected " +
                                        std::to_string(side.ranks.size()) + ", one for each rank");
    }
};

struct BoundHoldings {
    Tables tables;
    std::unique_ptr<Holdings> holdings;
};

struct BoundMatching {
    std::shared_ptr<BoundHoldings> sources;
    Tables tables;
    std::unique_ptr<Matching> matching;
};

Int64Array rows(const std::vector<int64_t>& flat, int64_t columns) {
    Int64Array made({static_cast<py::ssize_t>(flat.size() / columns), static_cast<py::ssize_t>(columns)});
    std::copy(flat.begin(), flat.end(), made.mutable_data());
    return made;
}

py::object find_bad(const Int64Array& pieces, const Int64Array& extents, const Int64Array& elements) {
    const Table table = table_of(pieces);
    const int64_t* bounds = rows_of(extents, kMaxDims, "extents");
    for (int64_t i = 0; i < table.count; ++i) {
        const int64_t tensor = table[i][kTensor], storage = table[i][kStorage];
        if (tensor < kPadding || tensor >= extents.shape(0) || storage < 0 || storage >= elements.size())
            throw std::invalid_argument("piece " + std::to_string(i) + ": got tensor " + std::to_string(tensor) +
                                        " and storage " + std::to_string(storage) + ", expected below " +
                                        std::to_string(extents.shape(0)) + " and " + std::to_string(elements.size()));
    }
    std::optional<BadRow> bad;
    {
        py::gil_scoped_release released;
        bad = find_bad_row(table, bounds, elements.data());
    }
    return bad ? py::object(py::make_tuple(bad->row, bad->outside_storage)) : py::none();
}

std::vector<int64_t> doubtful(const Int64Array& pieces, const Int64Array& shapes, bool covered) {
    const Table table = table_of(pieces);
    const int64_t* data = rows_of(shapes, kMaxDims, "shapes");
    const int64_t storages = shapes.shape(0);
    py::gil_scoped_release released;
    return doubtful_storages(table, data, storages, covered);
}

std::shared_ptr<BoundHoldings> hold(std::vector<Int64Array> pieces, const Int64Array& ranks, const Int64Array& numbers,
                                    int64_t tensors) {
    auto made = std::make_shared<BoundHoldings>(BoundHoldings{Tables(std::move(pieces), ranks, numbers), nullptr});
    py::gil_scoped_release released;
    made->holdings = std::make_unique<Holdings>(made->tables.side, tensors);
    return made;
}

Int64Array cells(const BoundHoldings& self, int64_t tensor) {
    std::vector<int64_t> flat;
    const auto [first, last] = self.holdings->cells_of(tensor);
    for (int64_t i = first; i < last; ++i) {
        const Region& region = self.holdings->cell(i).region;
        flat.insert(flat.end(), region.start.begin(), region.start.end());
        flat.insert(flat.end(), region.extent.begin(), region.extent.end());
    }
    return rows(flat, 2 * kMaxDims);
}

std::shared_ptr<BoundMatching> match(std::shared_ptr<BoundHoldings> sources, std::vector<Int64Array> pieces,
                                     const Int64Array& ranks, const Int64Array& numbers, const Int64Array& item_bytes,
                                     const std::vector<std::tuple<int64_t, int64_t, int64_t>>& casts) {
    auto made = std::make_shared<BoundMatching>(
        BoundMatching{std::move(sources), Tables(std::move(pieces), ranks, numbers), nullptr});
    std::vector<int64_t> items = values(item_bytes);
    std::vector<DtypeCast> known;
    for (const auto& [from, to, cast] : casts) known.push_back({from, to, cast});
    py::gil_scoped_release released;
    made->matching =
        std::make_unique<Matching>(*made->sources->holdings, made->tables.side, std::move(items), std::move(known));
    return made;
}

py::object fault(const BoundMatching& self) {
    const auto& found = self.matching->fault();
    if (!found) return py::none();
    return py::make_tuple(found->dtype, found->table, found->row, found->source_table, found->source_row);
}

py::tuple part(const BoundMatching& self, const Int64Array& ranks) {
    if (self.matching->fault())
        throw std::invalid_argument("matching: got one with a fault, expected one without; see its attribute fault");
    const std::vector<int64_t> wanted = values(ranks);
    Transfers made;
    {
        py::gil_scoped_release released;
        made = self.matching->part(wanted);
    }
    py::list pairs;
    for (const auto& pair : made.pairs)
        pairs.append(py::make_tuple(pair.source, pair.destination, pair.nbytes, pair.last));
    return py::make_tuple(rows(made.copies, kCopyColumns), pairs);
}

Int64Array traffic(const BoundMatching& self) {
    std::vector<int64_t> flat;
    {
        py::gil_scoped_release released;
        for (const auto& item : self.matching->traffic())
            flat.insert(flat.end(), {item.source, item.destination, item.nbytes});
    }
    return rows(flat, 3);
}

std::vector<int64_t> shares(const BoundMatching& self) { return self.matching->shares(); }

}  // namespace

void bind_plan(py::module_& module) {
    module.attr("PIECE_COLUMNS") = static_cast<int>(kPieceColumns);
    module.attr("COPY_COLUMNS") = static_cast<int>(kCopyColumns);
    module.def("find_bad_row", &find_bad, py::arg("pieces").noconvert(), py::arg("extents").noconvert(),
               py::arg("elements").noconvert(),
               "(row, whether it is outside its storage) of the first piece that is out of bounds, or None.");
    module.def("doubtful_storages", &doubtful, py::arg("pieces").noconvert(), py::arg("shapes").noconvert(),
               py::arg("covered"),
               "Storages for which a quick check cannot confirm that each element is in at most one piece, or exactly "
               "one (csrc/pieces.h).");
    py::class_<BoundHoldings, std::shared_ptr<BoundHoldings>>(module, "Holdings")
        .def(py::init(&hold), py::arg("tables"), py::arg("ranks").noconvert(), py::arg("table_of").noconvert(),
             py::arg("tensors"))
        .def("cells", &cells, py::arg("tensor"), "int64[n, 2 * MAX_DIMS]: start and extent of a tensor's cells.");
    py::class_<BoundMatching, std::shared_ptr<BoundMatching>>(module, "Matching")
        .def(py::init(&match), py::arg("holdings"), py::arg("tables"), py::arg("ranks").noconvert(),
             py::arg("table_of").noconvert(), py::arg("item_bytes").noconvert(), py::arg("casts"))
        .def_property_readonly("fault", &fault, "(dtype, table, row, source table, source row) or None.")
        .def_property_readonly("shares", &shares, "Bytes each source rank sends in the most even division.")
        .def("part", &part, py::arg("ranks").noconvert(),
             "All copies from or to some ranks: (copies int64[n, COPY_COLUMNS], [(source, destination, bytes, last "
             "copy)]).")
        .def("traffic", &traffic, "int64[n, 3]: source, destination, bytes; pairs may repeat.");
}

}  // namespace asyncmoe
