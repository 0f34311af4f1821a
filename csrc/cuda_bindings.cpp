#include "cuda_bindings.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "arrays.h"
#include "copy_table.h"
#ifdef ASYNCMOE_CUDA
#include "device.h"
#include "device_program.h"
#include "patience.h"
#include "unlocked.h"
#endif

namespace py = pybind11;

namespace asyncmoe {
namespace {

std::vector<int64_t> sources_of(const Int64Array& array) { return numbers_of(array, "sources"); }

std::vector<int64_t> destinations_of(const Int64Array& array) { return numbers_of(array, "destinations"); }

uint64_t emulate_cuda(const Program& program, int64_t chunk, const Int64Array& sources, const Int64Array& destinations,
                      int blocks) {
    return emulate(program, CopyTable(program), chunk, sources_of(sources), destinations_of(destinations),
                   std::max(1, blocks));
}

constexpr std::array<const char*, kWays> kWayNames = {"run", "rows", "uneven"};

// Returns {(way, cast): (tiles, bytes)}, without empty entries.
py::dict ways_on_cuda(const Program& program, int64_t chunk, const Int64Array& sources,
                      const Int64Array& destinations) {
    const auto found = ways(program, CopyTable(program), chunk, sources_of(sources), destinations_of(destinations));
    py::dict named;
    for (size_t way = 0; way < kWays; ++way)
        for (size_t cast = 0; cast < kCasts; ++cast)
            if (const Share& share = found[way][cast]; share.tiles)
                named[py::make_tuple(kWayNames[way], cast)] = py::make_tuple(share.tiles, share.bytes);
    return named;
}

// Returns (source offset, destination offset, bytes left in the run) of a byte of a box.
py::tuple locate_on_cuda(const Program& program, int64_t job, int64_t position) {
    const Place place = locate(job_of(program.descriptors().at(static_cast<size_t>(job)), 0), position);
    return py::make_tuple(place.source, place.destination, place.left);
}

#ifdef ASYNCMOE_CUDA
bool wait_for_event(const DeviceEvent& event, double timeout_s) {
    return wait_until([&] { return event.done(); }, timeout_s);
}

void define_device(py::module_& module) {
    py::class_<DeviceStream>(module, "DeviceStream", "A stream that does not wait for the default one (csrc/device.h).")
        .def(py::init<int>(), py::arg("device"))
        .def_property_readonly("handle", &DeviceStream::handle);
    py::class_<DeviceEvent>(module, "DeviceEvent", "A point in a stream (csrc/device.h).")
        .def(py::init<int>(), py::arg("device"))
        .def("record", &DeviceEvent::record, py::arg("stream"))
        .def("done", &DeviceEvent::done)
        .def("hold", &DeviceEvent::hold, py::arg("stream"))
        .def("wait", &wait_for_event, py::arg("timeout_s"), "Whether the device passed the point before the timeout.");
    py::class_<DeviceMemory, Owner<DeviceMemory>>(module, "DeviceMemory", "Memory of a device (csrc/device.h).")
        .def(py::init<int, int64_t>(), py::arg("device"), py::arg("nbytes"), Unguarded())
        .def_static(
            "open",
            [](int device, int64_t nbytes, const py::bytes& handle) {
                const std::string text(handle);
                py::gil_scoped_release released;
                return Owner<DeviceMemory>(new DeviceMemory(device, nbytes, text));
            },
            py::arg("device"), py::arg("nbytes"), py::arg("handle"))
        .def_property_readonly("address", &DeviceMemory::address)
        .def_property_readonly("nbytes", &DeviceMemory::nbytes)
        .def("handle", [](const DeviceMemory& self) { return py::bytes(self.handle()); });
    py::class_<DeviceProgram, Owner<DeviceProgram>>(module, "DeviceProgram",
                                                    "A program on a GPU (csrc/device_program.h).")
        .def(py::init<const Program&, int>(), py::arg("program"), py::arg("device"), Unguarded(),
             py::keep_alive<1, 2>())
        .def(
            "run",
            [](DeviceProgram& self, int64_t chunk, const Int64Array& sources, const Int64Array& destinations,
               uint64_t seal, uintptr_t stream) {
                const auto from = sources_of(sources), to = destinations_of(destinations);
                py::gil_scoped_release released;
                self.run(chunk, from, to, seal, stream);
            },
            py::arg("chunk"), py::arg("sources").noconvert(), py::arg("destinations").noconvert(), py::arg("seal"),
            py::arg("stream"), "Enqueue a chunk as one kernel launch. Addresses are not checked.")
        .def("take_mismatch", &DeviceProgram::take_mismatch);
    module.def("swap_device", &swap_device, py::arg("device"));
    module.def("restore_device", &restore_device, py::arg("device"));
    module.def("device_memory", &device_memory, py::arg("device"), "(free, total) in bytes.");
    module.def("cuda_device_name", &cuda_device_name, py::arg("device"));
    module.def("copy_plainly", &copy_plainly, py::arg("device"), py::arg("destination"), py::arg("source"),
               py::arg("nbytes"), py::arg("stream"), Unguarded(),
               "Enqueue a cudaMemcpyAsync within a device, or between the host and it.");
}
#endif

}  // namespace

void bind_cuda(py::module_& module) {
    module.def("emulate_cuda", &emulate_cuda, py::arg("program"), py::arg("chunk"), py::arg("sources").noconvert(),
               py::arg("destinations").noconvert(), py::arg("blocks") = 1,
               "Run a chunk as the copy kernel would, in host memory, and return its message's digest. Slow.");
    module.def("ways_on_cuda", &ways_on_cuda, py::arg("program"), py::arg("chunk"), py::arg("sources").noconvert(),
               py::arg("destinations").noconvert(),
               "How the copy kernel copies a chunk: {(\"run\", \"rows\" or \"uneven\", cast): (tiles, bytes)}.");
    module.def(
        "locate_on_cuda", &locate_on_cuda, py::arg("program"), py::arg("job"), py::arg("position"),
        "Where the copy kernel finds a byte of a box: (source offset, destination offset, bytes left in its run).");
#ifdef ASYNCMOE_CUDA
    module.attr("CUDA") = true;
    module.attr("ARCHITECTURES") = ASYNCMOE_ARCHS;
    module.def("cuda_device_count", &cuda_device_count);
    define_device(module);
#else
    module.attr("CUDA") = false;
    module.attr("ARCHITECTURES") = "";
    module.def("cuda_device_count", [] { return 0; });
#endif
}

}  // namespace asyncmoe
