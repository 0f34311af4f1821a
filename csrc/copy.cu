#include <algorithm>

#include "device_array.h"
#include "device_program.h"

namespace asyncmoe {
namespace {

constexpr int kWarp = 32;
constexpr int kBlocksAtATime = 3;  // per multiprocessor: with four, sm_90 runs out of registers and spills

// Progress of the chunk being copied; all zero between two launches.
struct Progress {
    unsigned long long sum;
    unsigned int blocks;
};

struct Trailer {
    uint64_t seal;
    Progress* progress;
    volatile int64_t* mismatch;  // in host memory: 0, or 1 plus the first chunk whose digest differed
    int64_t chunk;
};

// The sum over all threads of a block; valid in its first thread.
__device__ uint64_t sum_of_block(uint64_t sum) {
    __shared__ uint64_t warps[kThreads / kWarp];
    for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = sum;
    __syncthreads();
    uint64_t total = 0;
    for (int warp = 0; warp < kThreads / kWarp; ++warp) total += warps[warp];
    return total;
}

// Adds a block's terms; the last block to arrive has the total and writes or compares the trailer.
template <Wire kWire>
__device__ void add_to_digest(const ChunkView& chunk, const Trailer& trailer, uint64_t sum) {
    Progress* progress = trailer.progress;
    atomicAdd(&progress->sum, static_cast<unsigned long long>(sum));
    __threadfence();
    if (atomicAdd(&progress->blocks, 1u) + 1 != gridDim.x) return;
    __threadfence();
    const uint64_t terms = atomicExch(&progress->sum, 0ull);
    progress->blocks = 0;
    const uint64_t sealed = mix(terms + static_cast<uint64_t>(chunk.bytes)) ^ trailer.seal;
    std::byte* place = chunk.message + (chunk.bytes + 7) / 8 * 8;
    if (kWire == Wire::kDestination) {
        store_bytes(Unit{sealed, 0}, 0, 8, place);
        return;
    }
    Unit found{0, 0};
    load_bytes(found, 0, 8, place);
    if (found.low != sealed && *trailer.mismatch == 0) *trailer.mismatch = trailer.chunk + 1;
}

template <Wire kWire>
__global__ void __launch_bounds__(kThreads, kBlocksAtATime)
    copy_kernel(ChunkView chunk, int64_t tiles, Trailer trailer) {
    uint64_t sum = 0;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x)
        sum += copy_tile<kWire>(chunk, chunk.tiles[tile], static_cast<int>(threadIdx.x));
    if (kWire == Wire::kNone) return;
    sum = sum_of_block(sum);
    if (threadIdx.x == 0) add_to_digest<kWire>(chunk, trailer, sum);
}

using Kernel = void (*)(ChunkView, int64_t, Trailer);

Kernel kernel_for(Wire wire) {
    switch (wire) {
        case Wire::kSource:
            return copy_kernel<Wire::kSource>;
        case Wire::kDestination:
            return copy_kernel<Wire::kDestination>;
        default:
            return copy_kernel<Wire::kNone>;
    }
}

// The number of blocks the device can run at a time.
int64_t blocks_that_fit(Kernel kernel, int device) {
    int multiprocessors = 0, blocks = 0;
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, 0), "the copy kernel");
    return int64_t{multiprocessors} * std::max(1, blocks);
}

}  // namespace

struct DeviceProgram::Memory {
    Memory(const CopyTable& table, const Program& program)
        : jobs(table.jobs),
          tiles(table.tiles),
          sources(static_cast<size_t>(program.sources())),
          destinations(static_cast<size_t>(program.destinations())),
          progress(std::vector<Progress>(1)) {
        check(cudaHostAlloc(&mismatch, sizeof(int64_t), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
        *static_cast<volatile int64_t*>(mismatch) = 0;
        check(cudaHostGetDevicePointer(&mismatch_there, mismatch, 0), "cudaHostGetDevicePointer");
    }
    ~Memory() { cudaFreeHost(mismatch); }

    DeviceArray<Job> jobs;
    DeviceArray<Tile> tiles;
    DeviceArray<int64_t> sources, destinations;
    DeviceArray<Progress> progress;
    void* mismatch = nullptr;
    void* mismatch_there = nullptr;
};

DeviceProgram::DeviceProgram(const Program& program, int device)
    : program_(program), wire_(program.wire()), device_(device) {
    const CopyTable table(program);
    const DeviceScope scope(device);
    most_blocks_ = blocks_that_fit(kernel_for(wire_), device);
    chunks_ = table.chunks;
    memory_ = new Memory(table, program);
}

DeviceProgram::~DeviceProgram() {
    const DestructorScope scope(device_);
    delete memory_;  // cudaFree waits for kernels that still use the memory
}

void DeviceProgram::run(int64_t number, const std::vector<int64_t>& sources, const std::vector<int64_t>& destinations,
                        uint64_t seal, uintptr_t stream_address) {
    program_.check(number, sources, destinations);
    const auto& chunk = chunks_[static_cast<size_t>(number)];
    if (chunk.bytes == 0) return;
    const DeviceScope scope(device_);
    const auto stream = reinterpret_cast<cudaStream_t>(stream_address);
    if (wire_ != Wire::kSource) upload(memory_->sources, sources_, sources, program_.sources(), stream);
    if (wire_ != Wire::kDestination)
        upload(memory_->destinations, destinations_, destinations, program_.destinations(), stream);
    const int64_t message = wire_ == Wire::kSource ? sources[0] : wire_ == Wire::kDestination ? destinations[0] : 0;
    const ChunkView view{
        memory_->jobs.get() + chunk.first_job, memory_->tiles.get() + chunk.first_tile, memory_->sources.get(),
        memory_->destinations.get(),           reinterpret_cast<std::byte*>(message),   chunk.bytes};
    const Trailer trailer{seal, memory_->progress.get(), static_cast<volatile int64_t*>(memory_->mismatch_there),
                          number};
    const auto blocks = static_cast<unsigned>(std::min(chunk.tiles, most_blocks_));
    forget_errors();
    kernel_for(wire_)<<<blocks, kThreads, 0, stream>>>(view, chunk.tiles, trailer);
    check(cudaGetLastError(), "the copy kernel");
}

int64_t DeviceProgram::take_mismatch() {
    auto* mismatch = static_cast<volatile int64_t*>(memory_->mismatch);
    const int64_t chunk = *mismatch - 1;
    *mismatch = 0;
    return chunk;
}

}  // namespace asyncmoe
