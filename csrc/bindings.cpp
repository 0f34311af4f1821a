#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "copy.h"
#include "dlpack.h"
#include "plan_bindings.h"

namespace py = pybind11;

namespace {

using Int64Array = py::array_t<int64_t, py::array::c_style>;

std::vector<asyncmoe::BoxCopy> resolve(const Int64Array& rows, const Int64Array& sources,
                                       const Int64Array& destinations) {
    if (rows.ndim() != 2 || rows.shape(1) != asyncmoe::kColumns || sources.ndim() != 1 || destinations.ndim() != 1)
        throw std::invalid_argument("expected rows int64[n, " + std::to_string(asyncmoe::kColumns) +
                                    "] and addresses int64[m], int64[k]");
    return asyncmoe::resolve(rows.data(), rows.shape(0), sources.data(), sources.shape(0), destinations.data(),
                             destinations.shape(0));
}

void copy(const Int64Array& rows, const Int64Array& sources, const Int64Array& destinations, int threads) {
    const auto copies = resolve(rows, sources, destinations);
    py::gil_scoped_release released;
    asyncmoe::copy_on_cpu(copies, threads);
}

uint64_t digest(uintptr_t address, int64_t nbytes, int threads) {
    if (nbytes < 0) throw std::invalid_argument("nbytes is negative");
    py::gil_scoped_release released;
    return asyncmoe::digest(reinterpret_cast<const std::byte*>(address), nbytes, threads);
}

bool is_row_major(const asyncmoe::dlpack::Tensor& tensor) {
    if (!tensor.strides) return true;
    int64_t step = 1;
    for (int k = tensor.ndim - 1; k >= 0; --k) {
        if (tensor.shape[k] == 0) return true;
        if (tensor.shape[k] != 1 && tensor.strides[k] != step) return false;
        step *= tensor.shape[k];
    }
    return true;
}

// (address, elements, device type, device id, type code, bits of an element, row-major)
py::tuple inspect(const py::capsule& capsule) {
    if (!capsule.name() || std::string(capsule.name()) != "dltensor")
        throw std::invalid_argument("not an unused DLPack capsule");
    const auto& tensor = capsule.get_pointer<asyncmoe::dlpack::ManagedTensor>()->tensor;
    int64_t elements = 1;
    for (int k = 0; k < tensor.ndim; ++k) elements *= tensor.shape[k];
    const auto address = reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset;
    return py::make_tuple(address, elements, tensor.device.type, tensor.device.id, tensor.dtype.code,
                          tensor.dtype.bits * tensor.dtype.lanes, is_row_major(tensor));
}

}  // namespace

PYBIND11_MODULE(_C, module) {
    module.doc() = "Compiled half of asyncmoe.reshard: strided copies and digests over raw addresses.";
    module.attr("COLUMNS") = static_cast<int>(asyncmoe::kColumns);
    module.attr("MAX_DIMS") = asyncmoe::kMaxDims;
    asyncmoe::bind_plan(module);
    module.def("copy", &copy, py::arg("rows").noconvert(), py::arg("sources").noconvert(),
               py::arg("destinations").noconvert(), py::arg("threads") = 0,
               "Run box copies on the CPU. Addresses are not checked.");
    module.def("digest", &digest, py::arg("address"), py::arg("nbytes"), py::arg("threads") = 0,
               "64-bit digest of a buffer (csrc/copy.h says how it is defined).");
    module.def("inspect", &inspect, py::arg("capsule"),
               "(address, elements, device type, device id, type code, bits, row-major) of a DLPack capsule.");
#ifdef ASYNCMOE_CUDA
    module.attr("CUDA") = true;
    module.def("cuda_device_count", &asyncmoe::cuda_device_count);
    module.def(
        "copy_cuda",
        [](const Int64Array& rows, const Int64Array& sources, const Int64Array& destinations, int device,
           uintptr_t stream) {
            const auto copies = resolve(rows, sources, destinations);
            py::gil_scoped_release released;
            asyncmoe::copy_on_cuda(copies, device, stream);
        },
        py::arg("rows").noconvert(), py::arg("sources").noconvert(), py::arg("destinations").noconvert(),
        py::arg("device"), py::arg("stream"),
        "The same as one kernel launch on a stream of a device; does not wait for it.");
#else
    module.attr("CUDA") = false;
    module.def("cuda_device_count", [] { return 0; });
#endif
}
