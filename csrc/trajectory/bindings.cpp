#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "crc32c.h"
#include "masks.h"
#include "routes.h"

namespace py = pybind11;

namespace {

using Int32Array = py::array_t<int32_t, py::array::c_style>;
using Int64Array = py::array_t<int64_t, py::array::c_style>;
using Bytes = py::array_t<uint8_t, py::array::c_style>;

asyncmoe::trajectory::RouteShape shape_of(int64_t rows, int64_t top_k, int64_t experts) {
    int bits = 1;
    while (int64_t{1} << bits < experts) ++bits;
    if (rows < 0 || rows > INT32_MAX || top_k < 1 || top_k > asyncmoe::trajectory::kMaxTopK || experts < 1 || bits > 16)
        throw std::invalid_argument("routes: got " + std::to_string(rows) + " rows, top " + std::to_string(top_k) +
                                    " of " + std::to_string(experts) +
                                    " experts, expected fewer than 2^31 rows, top 1 to 256 of 1 to 65536 experts");
    return {rows, top_k, bits, experts};
}

py::tuple pack_routes(const Int32Array& routes, const Int64Array& layers, int64_t experts) {
    if (routes.ndim() != 3 || layers.ndim() != 1)
        throw std::invalid_argument("routes and layers: got " + std::to_string(routes.ndim()) + " and " +
                                    std::to_string(layers.ndim()) +
                                    " dimensions, expected 3 (rows, layers, top_k) and 1");
    const auto shape = shape_of(routes.shape(0), routes.shape(2), experts);
    for (py::ssize_t i = 0; i < layers.size(); ++i)
        if (layers.data()[i] < 0 || layers.data()[i] >= routes.shape(1))
            throw std::invalid_argument("layer: got " + std::to_string(layers.data()[i]) + ", expected below " +
                                        std::to_string(routes.shape(1)));
    Bytes planes(layers.size() * shape.plane_bytes());
    uint8_t* to = planes.mutable_data();
    int64_t bad;
    {
        py::gil_scoped_release released;
        bad =
            asyncmoe::trajectory::pack_routes(routes.data(), shape, routes.shape(1), layers.data(), layers.size(), to);
    }
    return py::make_tuple(planes, bad);
}

template <typename Id>
py::tuple unpack_as(const Bytes& planes, const asyncmoe::trajectory::RouteShape& shape, int64_t count) {
    py::array_t<Id> ids({count, shape.rows, shape.top_k});
    Id* to = ids.mutable_data();
    int64_t bad;
    {
        py::gil_scoped_release released;
        bad = asyncmoe::trajectory::unpack_routes(planes.data(), shape, count, to);
    }
    return py::make_tuple(ids, bad);
}

asyncmoe::trajectory::RouteShape shape_of(const Bytes& planes, int64_t rows, int64_t top_k, int64_t experts,
                                          int64_t count) {
    const auto shape = shape_of(rows, top_k, experts);
    // Divides, because count * plane_bytes may overflow 64 bits.
    const int64_t plane = shape.plane_bytes();
    if (count < 0 || (plane ? planes.size() % plane || planes.size() / plane != count : planes.size() != 0))
        throw std::invalid_argument("planes: got " + std::to_string(planes.size()) + " bytes, expected " +
                                    std::to_string(count) + " planes of " + std::to_string(plane));
    return shape;
}

bool routes_valid(const Bytes& planes, int64_t rows, int64_t top_k, int64_t experts, int64_t count) {
    const auto shape = shape_of(planes, rows, top_k, experts, count);
    py::gil_scoped_release released;
    return asyncmoe::trajectory::routes_valid(planes.data(), shape, count);
}

py::array_t<uint32_t> digest_routes(const Bytes& planes, int64_t rows, int64_t top_k, int64_t experts,
                                    const Int64Array& layers) {
    const auto shape = shape_of(planes, rows, top_k, experts, layers.size());
    py::array_t<uint32_t> digests(layers.size());
    uint32_t* to = digests.mutable_data();
    {
        py::gil_scoped_release released;
        asyncmoe::trajectory::digest_routes(planes.data(), shape, layers.data(), layers.size(), to);
    }
    return digests;
}

py::tuple unpack_routes(const Bytes& planes, int64_t rows, int64_t top_k, int64_t experts, int64_t count) {
    const auto shape = shape_of(planes, rows, top_k, experts, count);
    return shape.bits <= 8 ? unpack_as<uint8_t>(planes, shape, count) : unpack_as<uint16_t>(planes, shape, count);
}

void check_vocabulary(int64_t vocabulary) {
    if (vocabulary < 1 || vocabulary > INT32_MAX)
        throw std::invalid_argument("vocabulary: got " + std::to_string(vocabulary) + ", expected 1 to 2^31 - 1");
}

std::string ends_of(const Int32Array& offsets) {
    if (offsets.ndim() != 1) return std::to_string(offsets.ndim()) + " dimensions";
    const py::ssize_t size = offsets.size();
    return size < 1 ? "none" : std::to_string(offsets.at(0)) + " to " + std::to_string(offsets.at(size - 1));
}

Bytes encode_masks(const Int32Array& offsets, const Int32Array& ids, int64_t vocabulary) {
    check_vocabulary(vocabulary);
    if (ids.ndim() != 1 || ids.size() > INT32_MAX)
        throw std::invalid_argument("ids: got " + std::to_string(ids.size()) + " in " + std::to_string(ids.ndim()) +
                                    " dimensions, expected fewer than 2^31 in one");
    if (offsets.ndim() != 1 || offsets.size() < 1 || offsets.at(0) != 0 || offsets.at(offsets.size() - 1) != ids.size())
        throw std::invalid_argument("offsets: got " + ends_of(offsets) + ", expected 0 to " +
                                    std::to_string(ids.size()) + ", the number of ids");
    for (py::ssize_t i = 1; i < offsets.size(); ++i)
        if (offsets.data()[i] < offsets.data()[i - 1])
            throw std::invalid_argument("offsets: got " + std::to_string(offsets.data()[i]) + " after " +
                                        std::to_string(offsets.data()[i - 1]) + ", expected offsets that do not fall");
    const auto bytes = asyncmoe::trajectory::encode_masks(offsets.data(), offsets.size() - 1, ids.data(), vocabulary);
    return Bytes(static_cast<py::ssize_t>(bytes.size()), bytes.data());
}

py::tuple decode_masks(const Bytes& bytes, int64_t rows, int64_t count, int64_t vocabulary) {
    check_vocabulary(vocabulary);
    if (rows < 0 || rows >= INT32_MAX || count < 0 || count > INT32_MAX)
        throw std::invalid_argument("masks: got " + std::to_string(rows) + " rows and " + std::to_string(count) +
                                    " ids, expected fewer than 2^31 of each");
    const auto masks = asyncmoe::trajectory::decode_masks(bytes.data(), bytes.size(), rows, count, vocabulary);
    return py::make_tuple(Int32Array(static_cast<py::ssize_t>(masks.offsets.size()), masks.offsets.data()),
                          Int32Array(static_cast<py::ssize_t>(masks.ids.size()), masks.ids.data()));
}

using Crc = uint32_t (*)(const uint8_t*, size_t, uint32_t);

template <Crc crc>
uint32_t crc_of(const py::buffer& buffer, uint32_t before) {
    constexpr size_t kWorthReleasing = 1 << 16;
    const auto info = buffer.request();
    if (info.ndim > 1 || (info.ndim == 1 && info.strides[0] != info.itemsize))
        throw std::invalid_argument("buffer: got one with gaps or several dimensions, expected consecutive bytes");
    const auto* bytes = static_cast<const uint8_t*>(info.ptr);
    const auto size = static_cast<size_t>(info.size * info.itemsize);
    if (size < kWorthReleasing) return crc(bytes, size, before);
    py::gil_scoped_release released;
    return crc(bytes, size, before);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
    module.attr("SOURCES") = ASYNCMOE_SOURCES;
    module.def("crc32c", &crc_of<asyncmoe::trajectory::crc32c>, py::arg("buffer"), py::arg("before") = 0);
    module.def("crc32c_by_table", &crc_of<asyncmoe::trajectory::crc32c_by_table>, py::arg("buffer"),
               py::arg("before") = 0);
    module.def("pack_routes", &pack_routes, py::arg("routes").noconvert(), py::arg("layers"), py::arg("experts"));
    module.def("unpack_routes", &unpack_routes, py::arg("planes").noconvert(), py::arg("rows"), py::arg("top_k"),
               py::arg("experts"), py::arg("count"));
    module.def("routes_valid", &routes_valid, py::arg("planes").noconvert(), py::arg("rows"), py::arg("top_k"),
               py::arg("experts"), py::arg("count"));
    module.def("digest_routes", &digest_routes, py::arg("planes").noconvert(), py::arg("rows"), py::arg("top_k"),
               py::arg("experts"), py::arg("layers"));
    module.def("encode_masks", &encode_masks, py::arg("offsets").noconvert(), py::arg("ids").noconvert(),
               py::arg("vocabulary"));
    module.def("decode_masks", &decode_masks, py::arg("bytes").noconvert(), py::arg("rows"), py::arg("count"),
               py::arg("vocabulary"));
}
