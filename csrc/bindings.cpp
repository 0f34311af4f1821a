#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "arrays.h"
#include "copy.h"
#include "cuda_bindings.h"
#include "delta_bindings.h"
#include "digest.h"
#include "element_digest.h"
#include "plan_bindings.h"
#include "program.h"
#include "scales_bindings.h"
#include "shm.h"

namespace py = pybind11;

namespace {

using asyncmoe::Int64Array;
using asyncmoe::numbers_of;
using asyncmoe::rows_of;
using Casts = std::optional<Int64Array>;

const int64_t* casts_of(const Casts& casts, int64_t rows) {
    if (!casts) return nullptr;
    const int64_t* data = rows_of(*casts, asyncmoe::kCastColumns, "casts");
    if (casts->shape(0) != rows)
        throw std::invalid_argument("casts: got " + std::to_string(casts->shape(0)) + " rows, expected " +
                                    std::to_string(rows) + ", one for each row of copies");
    return data;
}

std::vector<asyncmoe::BoxCopy> resolve(const Int64Array& rows, const Int64Array& sources,
                                       const Int64Array& destinations, const Casts& casts) {
    const int64_t* copies = rows_of(rows, asyncmoe::kColumns, "rows of copies");
    const auto from = numbers_of(sources, "sources"), to = numbers_of(destinations, "destinations");
    return asyncmoe::resolve(copies, casts_of(casts, rows.shape(0)), rows.shape(0), from.data(),
                             static_cast<int64_t>(from.size()), to.data(), static_cast<int64_t>(to.size()));
}

void copy(const Int64Array& rows, const Int64Array& sources, const Int64Array& destinations, int threads,
          const Casts& casts) {
    const auto copies = resolve(rows, sources, destinations, casts);
    py::gil_scoped_release released;
    asyncmoe::copy_on_cpu(copies, threads);
}

uint64_t digest(uintptr_t address, int64_t nbytes, int threads) {
    if (nbytes < 0) throw std::invalid_argument("nbytes: got " + std::to_string(nbytes) + ", expected at least 0");
    py::gil_scoped_release released;
    return asyncmoe::digest(reinterpret_cast<const std::byte*>(address), nbytes, threads);
}

py::array_t<uint64_t> element_sums(const Int64Array& boxes, const Int64Array& seeds, int threads) {
    const int64_t* rows = rows_of(boxes, asyncmoe::kElementColumns, "boxes of elements");
    const auto by_place = numbers_of(seeds, "seeds");
    std::vector<uint64_t> sums;
    {
        py::gil_scoped_release released;
        sums = asyncmoe::sums_of_elements(rows, boxes.shape(0), by_place, threads);
    }
    return py::array_t<uint64_t>(static_cast<py::ssize_t>(sums.size()), sums.data());
}

asyncmoe::Program make_program(const Int64Array& rows, const Int64Array& firsts, const std::string& wire,
                               const Casts& casts) {
    const int64_t* copies = rows_of(rows, asyncmoe::kColumns, "rows of copies");
    if (wire != "none" && wire != "source" && wire != "destination")
        throw std::invalid_argument("wire: got " + wire + ", expected none, source or destination");
    const auto side = wire == "none"     ? asyncmoe::Wire::kNone
                      : wire == "source" ? asyncmoe::Wire::kSource
                                         : asyncmoe::Wire::kDestination;
    return {copies, casts_of(casts, rows.shape(0)), rows.shape(0), numbers_of(firsts, "firsts"), side};
}

uint64_t run_program(const asyncmoe::Program& program, int64_t chunk, const Int64Array& sources,
                     const Int64Array& destinations, int threads) {
    const auto from = numbers_of(sources, "sources"), to = numbers_of(destinations, "destinations");
    py::gil_scoped_release released;
    return program.run(chunk, from, to, threads);
}

// Waits in slices, so that it notices a dead peer and Ctrl-C.
int wait_for_ring(const asyncmoe::ShmRing& ring, double timeout_s, int64_t needed) {
    constexpr int64_t kSlice = 50000;  // microseconds
    using Clock = std::chrono::steady_clock;
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                             std::chrono::duration<double>(std::clamp(timeout_s, 0.0, 1e9)));
    for (;;) {
        asyncmoe::Arrival arrival;
        const auto left = std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now()).count();
        {
            py::gil_scoped_release released;
            arrival = ring.wait(std::clamp<int64_t>(left, 1, kSlice), needed);
        }
        if (arrival != asyncmoe::Arrival::kNotYet || Clock::now() >= deadline) return static_cast<int>(arrival);
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
}

py::array_t<uint8_t> slot_of_ring(const py::object& self, int64_t index) {
    const auto& ring = self.cast<const asyncmoe::ShmRing&>();
    return {{ring.slot_bytes()}, {1}, reinterpret_cast<uint8_t*>(ring.slot(index)), self};
}

void define_ring(const py::module_& module) {
    using asyncmoe::ShmRing;
    py::class_<ShmRing>(module, "ShmRing", "Message slots in shared memory between two processes (csrc/shm.h).")
        .def_static("create", &ShmRing::create, py::arg("name"), py::arg("slots"), py::arg("slot_bytes"),
                    py::call_guard<py::gil_scoped_release>(), py::return_value_policy::take_ownership)
        .def_static("attach", &ShmRing::attach, py::arg("name"), py::arg("slots"), py::arg("slot_bytes"),
                    py::call_guard<py::gil_scoped_release>(), py::return_value_policy::take_ownership)
        .def("slot", &slot_of_ring, py::arg("index"))
        .def("wait", &wait_for_ring, py::arg("timeout_s"), py::arg("needed") = 1,
             "0: ready, 1: timeout, 2: the other end is gone.")
        .def("advance", &ShmRing::advance);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
    module.doc() = "Compiled half of asyncmoe.reshard: strided copies and digests over raw addresses.";
    module.attr("COLUMNS") = static_cast<int>(asyncmoe::kColumns);
    module.attr("MAX_DIMS") = asyncmoe::kMaxDims;
    module.attr("SOURCES") = ASYNCMOE_SOURCES;
    module.attr("CAST_COLUMNS") = static_cast<int>(asyncmoe::kCastColumns);
    asyncmoe::bind_plan(module);
    asyncmoe::bind_scales(module);
    module.def("copy", &copy, py::arg("rows").noconvert(), py::arg("sources").noconvert(),
               py::arg("destinations").noconvert(), py::arg("threads") = 0, py::arg("casts") = py::none(),
               "Run box copies on the CPU. Addresses are not checked.");
    py::class_<asyncmoe::Program>(module, "Program", "Copies prepared once, cut into chunks (csrc/program.h).")
        .def(py::init(&make_program), py::arg("rows").noconvert(), py::arg("firsts").noconvert(), py::arg("wire"),
             py::arg("casts") = py::none())
        .def_property_readonly("chunks", &asyncmoe::Program::chunks)
        .def("bytes", &asyncmoe::Program::bytes, py::arg("chunk"))
        .def("run", &run_program, py::arg("chunk"), py::arg("sources").noconvert(), py::arg("destinations").noconvert(),
             py::arg("threads") = 0,
             "Run a chunk on the CPU and return its message's digest. Addresses are not checked.");
    asyncmoe::bind_delta(module);
    define_ring(module);
    module.def("digest", &digest, py::arg("address"), py::arg("nbytes"), py::arg("threads") = 0,
               "64-bit digest of a buffer, as defined in csrc/digest.h.");
    module.def("element_sums", &element_sums, py::arg("boxes").noconvert(), py::arg("seeds").noconvert(),
               py::arg("threads") = 0,
               "The canonical digest of boxes by place (csrc/element_digest.h). Addresses are not checked.");
    asyncmoe::bind_cuda(module);
    asyncmoe::bind_nccl(module);
}
