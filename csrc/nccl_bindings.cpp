#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "cuda_bindings.h"
#include "nccl.h"
#include "patience.h"
#include "unlocked.h"

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

int wait(const NcclCommunicator& self, double timeout_s) {
    int state = kNcclInProgress;
    wait_until([&] { return (state = self.state()) != kNcclInProgress; }, timeout_s);
    return state;
}

}  // namespace

void bind_nccl(py::module_& module) {
    module.def(
        "nccl_origin",
        [](const std::string& library) {
            const NcclOrigin origin = nccl_origin(library);
            return py::make_tuple(origin.version, origin.path);
        },
        py::arg("library"), "NCCL's version as its NCCL_VERSION_CODE, 22803 for 2.28.3, and the file it came from.");
    module.def(
        "nccl_unique_id", [](const std::string& library) { return py::bytes(nccl_unique_id(library)); },
        py::arg("library"));
    py::class_<NcclCommunicator, Owner<NcclCommunicator>>(module, "NcclCommunicator",
                                                          "A non-blocking communicator (csrc/nccl.h).")
        .def(py::init([](const std::string& library, int rank, int world, const py::bytes& unique_id, int max_ctas) {
                 const std::string id(unique_id);
                 py::gil_scoped_release released;
                 return Owner<NcclCommunicator>(new NcclCommunicator(library, rank, world, id, max_ctas));
             }),
             py::arg("library"), py::arg("rank"), py::arg("world"), py::arg("unique_id"), py::arg("max_ctas") = 0)
        .def("exchange", &exchange, py::arg("sends"), py::arg("receives"), py::arg("stream"),
             "Enqueue (peer, address, bytes) as one group.")
        .def("state", &NcclCommunicator::state, Unguarded())
        .def("wait", &wait, py::arg("timeout_s"),
             "The state once it is no longer in progress, or in progress after the timeout.")
        .def("describe", &NcclCommunicator::describe, py::arg("code"))
        .def("abort", &NcclCommunicator::abort, Unguarded())
        .def("destroy", &NcclCommunicator::destroy, Unguarded());
}

}  // namespace asyncmoe
