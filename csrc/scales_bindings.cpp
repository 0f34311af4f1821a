#include "scales_bindings.h"

#include "arrays.h"
#include "scales.h"

namespace py = pybind11;

namespace asyncmoe {
namespace {

ScaleJobs jobs_of(const Int64Array& matrices) {
    const int64_t* rows = rows_of(matrices, kMatrixColumns, "matrices");
    return scale_jobs(rows, matrices.shape(0));
}

}  // namespace

void bind_scales(py::module_& module) {
    module.def(
        "scale_blocks",
        [](const Int64Array& matrices, bool power_of_two, int threads) {
            const ScaleJobs jobs = jobs_of(matrices);
            py::gil_scoped_release released;
            scale_blocks(jobs, power_of_two, threads);
        },
        py::arg("matrices").noconvert(), py::arg("power_of_two"), py::arg("threads") = 0,
        "Write the scales of the blocks of matrices on the CPU. Addresses are not checked.");
    module.def(
        "emulate_scale_blocks",
        [](const Int64Array& matrices, bool power_of_two) { emulate_scale_blocks(jobs_of(matrices), power_of_two); },
        py::arg("matrices").noconvert(), py::arg("power_of_two"),
        "Write the scales as the GPU's kernel would, in host memory. Slow.");
#ifdef ASYNCMOE_CUDA
    module.def(
        "scale_blocks_on_gpu",
        [](const Int64Array& matrices, bool power_of_two, int device, uintptr_t stream) {
            scale_blocks_on_gpu(jobs_of(matrices), power_of_two, device, stream);
        },
        py::arg("matrices").noconvert(), py::arg("power_of_two"), py::arg("device"), py::arg("stream"),
        "Write the scales on a GPU: enqueue the kernel on its stream. Addresses are not checked.");
#endif
}

}  // namespace asyncmoe
