#include <memory>

#include "device_scope.h"
#include "scales.h"

namespace asyncmoe {
namespace {

constexpr int kLanes = 32;

// A thread block handles one block of a matrix at a time.
__global__ void __launch_bounds__(kScaleThreads)
    scale_kernel(const ScaleJob* jobs, int64_t count, int64_t blocks, bool power_of_two) {
    __shared__ uint32_t warps[kScaleThreads / kLanes];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes, warp = thread / kLanes;
    for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
        const ScaleJob& job = jobs[job_of_block(jobs, count, block)];
        const MatrixBlock place = block_of(job, block);
        uint32_t largest = largest_of_thread(job, place, thread);
        for (int step = kLanes / 2; step > 0; step /= 2)
            largest = max(largest, __shfl_down_sync(0xffffffffu, largest, step));
        if (lane == 0) warps[warp] = largest;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int w = 1; w < kScaleThreads / kLanes; ++w) largest = max(largest, warps[w]);
            job.scales[place.number] = scale_of(largest, power_of_two);
        }
        __syncthreads();
    }
}

}  // namespace

void scale_blocks_on_gpu(const ScaleJobs& jobs, bool power_of_two, int device, uintptr_t stream_address) {
    if (jobs.blocks == 0) return;
    constexpr int64_t kMostBlocks = 1 << 16;
    const DeviceScope scope(device);
    const auto stream = reinterpret_cast<cudaStream_t>(stream_address);
    const size_t bytes = jobs.jobs.size() * sizeof(ScaleJob);
    void* table = nullptr;
    check(cudaMallocAsync(&table, bytes, stream), "cudaMallocAsync of the scales' table");
    // The source is pageable memory, so the call returns only after reading it.
    check(cudaMemcpyAsync(table, jobs.jobs.data(), bytes, cudaMemcpyHostToDevice, stream),
          "uploading the scales' table");
    const auto grid = static_cast<unsigned>(jobs.blocks < kMostBlocks ? jobs.blocks : kMostBlocks);
    scale_kernel<<<grid, kScaleThreads, 0, stream>>>(static_cast<const ScaleJob*>(table),
                                                     static_cast<int64_t>(jobs.jobs.size()), jobs.blocks, power_of_two);
    check(cudaGetLastError(), "the kernel of scales");
    check(cudaFreeAsync(table, stream), "cudaFreeAsync of the scales' table");
}

}  // namespace asyncmoe
