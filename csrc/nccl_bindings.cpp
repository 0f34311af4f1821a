#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "cuda_bindings.h"
#include "nccl.h"

namespace py = pybind11;

namespace asyncmoe {
namespace {

using Messages = std::vector<std::tuple<int, uintptr_t, int64_t>>;

std::vector<NcclMessage> messages_of(const Messages& given) {
    std::vector<NcclMessage> messages;
    for (const auto& [peer, address, nbytes] : given) messages.push_back({peer, address, nbytes});
    return messages;
}

void exchange(NcclCommunicator& self, const Messages& sends, const Messages& receives, uintptr_t stream) {
    const auto out = messages_of(sends), in = messages_of(receives);
    py::gil_scoped_release released;
    self.exchange(out, in, stream);
}

}  // namespace

void bind_nccl(py::module_& module) {
    module.def("nccl_version", &nccl_version, py::arg("library"),
               "NCCL's version as its NCCL_VERSION_CODE, 22803 for 2.28.3.");
    module.def(
        "nccl_unique_id", [](const std::string& library) { return py::bytes(nccl_unique_id(library)); },
        py::arg("library"));
    py::class_<NcclCommunicator>(module, "NcclCommunicator", "A non-blocking communicator (csrc/nccl.h).")
        .def(py::init([](const std::string& library, int rank, int world, const py::bytes& unique_id) {
                 const std::string id(unique_id);
                 py::gil_scoped_release released;
                 return std::make_unique<NcclCommunicator>(library, rank, world, id);
             }),
             py::arg("library"), py::arg("rank"), py::arg("world"), py::arg("unique_id"))
        .def("exchange", &exchange, py::arg("sends"), py::arg("receives"), py::arg("stream"),
             "Enqueue (peer, address, bytes) as one group.")
        .def("state", &NcclCommunicator::state)
        .def("describe", &NcclCommunicator::describe, py::arg("code"))
        .def("abort", &NcclCommunicator::abort, py::call_guard<py::gil_scoped_release>())
        .def("destroy", &NcclCommunicator::destroy, py::call_guard<py::gil_scoped_release>());
}

}  // namespace asyncmoe
