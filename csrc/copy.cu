#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "copy.h"

namespace asyncmoe {
namespace {

constexpr int kThreads = 256;
constexpr int kUnitsPerThread = 8;
constexpr int64_t kTile = int64_t{kThreads} * kUnitsPerThread;
constexpr int kBlocksPerMultiprocessor = 8;

// A BoxCopy whose run is cut into units of 1 << shift bytes, the widest access that every address in it allows. The run
// is the innermost of `count` loops; tiles of all copies are numbered one after the other.
struct Job {
    const std::byte* source;
    std::byte* destination;
    int64_t first_tile;
    int64_t units;
    int shift;
    int count;
    Dim dims[kMaxDims + 1];
};

void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

int widest_shift(const BoxCopy& copy) {
    auto bits = static_cast<uint64_t>(copy.run) | reinterpret_cast<uintptr_t>(copy.destination) |
                reinterpret_cast<uintptr_t>(copy.source);
    for (int k = 0; k < copy.count; ++k)
        bits |= static_cast<uint64_t>(copy.dims[k].destination_stride) |
                static_cast<uint64_t>(copy.source ? copy.dims[k].source_stride : 0);
    int shift = 4;
    while (bits & ((uint64_t{1} << shift) - 1)) --shift;
    return shift;
}

Job job_of(const BoxCopy& copy, int64_t first_tile) {
    Job job{copy.source, copy.destination, first_tile, 0, widest_shift(copy), copy.count + 1, {}};
    const int64_t unit = int64_t{1} << job.shift;
    for (int k = 0; k < copy.count; ++k) job.dims[k] = copy.dims[k];
    job.dims[copy.count] = {copy.run / unit, unit, unit};
    job.units = copy.points() * (copy.run / unit);
    return job;
}

// Byte offsets of a unit on both sides. Index is uint32_t where the unit numbers allow it: 64-bit division is slow on a
// GPU.
template <typename Index>
__device__ void locate(const Job& job, int64_t unit, int64_t& source, int64_t& destination) {
    Index rest = static_cast<Index>(unit);
    source = destination = 0;
    for (int k = job.count - 1; k > 0; --k) {
        const Index extent = static_cast<Index>(job.dims[k].extent);
        const Index above = rest / extent;
        const auto i = static_cast<int64_t>(rest - above * extent);
        source += i * job.dims[k].source_stride;
        destination += i * job.dims[k].destination_stride;
        rest = above;
    }
    source += static_cast<int64_t>(rest) * job.dims[0].source_stride;
    destination += static_cast<int64_t>(rest) * job.dims[0].destination_stride;
}

template <typename Unit>
__device__ void copy_tile(const Job& job, int64_t tile) {
    const int64_t begin = (tile - job.first_tile) * kTile + threadIdx.x;
    Unit values[kUnitsPerThread];
    int64_t places[kUnitsPerThread];
#pragma unroll
    for (int j = 0; j < kUnitsPerThread; ++j) {  // all loads are issued before the first store waits for one
        const int64_t unit = begin + int64_t{j} * kThreads;
        if (unit >= job.units) break;
        int64_t source;
        if (job.units >> 32 == 0)
            locate<uint32_t>(job, unit, source, places[j]);
        else
            locate<uint64_t>(job, unit, source, places[j]);
        values[j] = job.source ? *reinterpret_cast<const Unit*>(job.source + source) : Unit{};
    }
#pragma unroll
    for (int j = 0; j < kUnitsPerThread; ++j) {
        if (begin + int64_t{j} * kThreads >= job.units) break;
        *reinterpret_cast<Unit*>(job.destination + places[j]) = values[j];
    }
}

__device__ int job_with_tile(const Job* jobs, int count, int64_t tile) {
    int low = 0, high = count - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (jobs[middle].first_tile <= tile)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const Job* jobs, int count, int64_t tiles) {
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Job job = jobs[job_with_tile(jobs, count, tile)];
        switch (job.shift) {
            case 4:
                copy_tile<uint4>(job, tile);
                break;
            case 3:
                copy_tile<uint64_t>(job, tile);
                break;
            case 2:
                copy_tile<uint32_t>(job, tile);
                break;
            case 1:
                copy_tile<uint16_t>(job, tile);
                break;
            default:
                copy_tile<uint8_t>(job, tile);
        }
    }
}

// Makes a device current, and the one before it again at the end of the scope.
class DeviceScope {
  public:
    explicit DeviceScope(int device) {
        check(cudaGetDevice(&before_), "cudaGetDevice");
        check(cudaSetDevice(device), "cudaSetDevice");
    }
    ~DeviceScope() { cudaSetDevice(before_); }
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

  private:
    int before_ = 0;
};

int blocks_that_fill(int device) {
    int multiprocessors = 0;
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    return multiprocessors * kBlocksPerMultiprocessor;
}

}  // namespace

void copy_on_cuda(const std::vector<BoxCopy>& copies, int device, uintptr_t stream_address) {
    if (copies.empty()) return;
    const DeviceScope scope(device);
    const auto stream = reinterpret_cast<cudaStream_t>(stream_address);
    std::vector<Job> jobs;
    jobs.reserve(copies.size());
    int64_t tiles = 0;
    for (const auto& copy : copies) {
        if (copy.cast != Cast::kNone) throw std::invalid_argument("no cast on a GPU");
        jobs.push_back(job_of(copy, tiles));
        tiles += (jobs.back().units + kTile - 1) / kTile;
    }
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles, blocks_that_fill(device)));
    const size_t bytes = jobs.size() * sizeof(Job);
    void* table = nullptr;
    check(cudaMallocAsync(&table, bytes, stream), "cudaMallocAsync");
    // The table is in pageable memory, so this returns only after it has been read.
    cudaError_t status = cudaMemcpyAsync(table, jobs.data(), bytes, cudaMemcpyHostToDevice, stream);
    if (status == cudaSuccess) {
        copy_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<const Job*>(table), static_cast<int>(jobs.size()),
                                                     tiles);
        status = cudaGetLastError();
    }
    const cudaError_t freed = cudaFreeAsync(table, stream);
    check(status, "copy kernel");
    check(freed, "cudaFreeAsync");
}

int cuda_device_count() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace asyncmoe
