#include <algorithm>

#include "device_array.h"
#include "device_delta.h"

namespace asyncmoe {
namespace {

// Adds a thread block's results to the totals. Only the block's first thread calls it.
__device__ void add(DeltaFound* found, const DeltaFound& more) {
    const auto one = [](uint64_t* to, uint64_t value) {
        if (value) atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
    };
    one(&found->sum, more.sum);
    one(&found->changed, more.changed);
    one(&found->faults, more.faults);
}

__global__ void __launch_bounds__(kTeam)
    survey_kernel(DeltaView view, const std::byte* now, std::byte* payload, DeltaFound* found) {
    __shared__ CompareScratch scratch;
    DeltaFound mine{};
    for (int64_t i = blockIdx.x; i < view.count; i += gridDim.x)
        add_found(mine, survey(view, i, now, payload, scratch));
    if (threadIdx.x == 0) add(found, mine);
}

// One thread block.
__global__ void __launch_bounds__(kTeam)
    place_kernel(DeltaView view, const std::byte* payload, int64_t* bodies, DeltaFound* found) {
    __shared__ OfTeam<uint64_t> sums;
    const uint64_t nbytes = place_bodies(view, payload, bodies, sums);
    if (threadIdx.x == 0) found->nbytes = nbytes;
}

__global__ void __launch_bounds__(kTeam)
    code_kernel(DeltaView view, const std::byte* now, std::byte* payload, const int64_t* bodies) {
    __shared__ CompareScratch scratch;
    for (int64_t i = blockIdx.x; i < view.count; i += gridDim.x) code_block(view, i, now, payload, bodies[i], scratch);
}

// Applies nothing unless the bodies, as `place_kernel` found them, end where the payload ends.
__global__ void __launch_bounds__(kTeam) apply_kernel(DeltaView view, const std::byte* payload, int64_t nbytes,
                                                      const int64_t* bodies, bool write, DeltaFound* found) {
    __shared__ ApplyScratch scratch;
    DeltaFound mine{};
    const bool fits = found->nbytes == static_cast<uint64_t>(nbytes);
    mine.faults = fits ? 0 : 1;
    for (int64_t i = blockIdx.x; fits && i < view.count; i += gridDim.x)
        add_found(mine, apply_coded(view, view.blocks[i], entry_of(payload, i), payload + bodies[i], write, scratch));
    if (threadIdx.x == 0) add(found, mine);
}

__global__ void __launch_bounds__(kTeam) read_kernel(DeltaView view, DeltaFound* found) {
    __shared__ OfTeam<uint64_t> sums;
    DeltaFound mine{};
    for (int64_t i = blockIdx.x; i < view.count; i += gridDim.x) mine.sum += read_block(view, view.blocks[i], sums);
    if (threadIdx.x == 0) add(found, mine);
}

unsigned grid_of(const DeltaView& view) {
    constexpr int64_t kMostBlocks = 1 << 16;
    return static_cast<unsigned>(std::clamp(view.count, int64_t{1}, kMostBlocks));
}

cudaStream_t stream_of(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

std::byte* bytes_at(uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

struct DeviceDelta::Memory {
    explicit Memory(const DeltaTable& table)
        : rows(table.rows()),
          blocks(table.blocks()),
          bases(static_cast<size_t>(table.bases())),
          bodies(static_cast<size_t>(table.most_blocks())),
          found(size_t{1}) {
        check(cudaHostAlloc(&seen, sizeof(DeltaFound), cudaHostAllocPortable), "cudaHostAlloc");
        *static_cast<DeltaFound*>(seen) = {};
    }
    ~Memory() { cudaFreeHost(seen); }

    DeviceArray<DeltaRow> rows;
    DeviceArray<DeltaBlock> blocks;
    DeviceArray<int64_t> bases, bodies;
    DeviceArray<DeltaFound> found;
    void* seen = nullptr;  // a copy in host memory
};

DeviceDelta::DeviceDelta(const DeltaTable& table, int device) : table_(table), device_(device) {
    const DeviceScope scope(device);
    memory_ = new Memory(table);
}

DeviceDelta::~DeviceDelta() {
    const DestructorScope scope(device_);
    delete memory_;  // cudaFree waits for kernels that still use the memory
}

DeltaView DeviceDelta::view(int64_t chunk, const std::vector<int64_t>& bases, uintptr_t message, uintptr_t stream) {
    DeltaView found = table_.view(chunk, bases, bytes_at(message));
    if (!message) upload(memory_->bases, bases_, bases, table_.bases(), stream_of(stream));
    found.blocks = memory_->blocks.get() + (found.blocks - table_.blocks().data());
    found.rows = memory_->rows.get(), found.bases = memory_->bases.get();
    return found;
}

void DeviceDelta::begin(uintptr_t stream) {
    forget_errors();
    check(cudaMemsetAsync(memory_->found.get(), 0, sizeof(DeltaFound), stream_of(stream)), "cudaMemsetAsync");
}

void DeviceDelta::end(uintptr_t stream) {
    check(cudaGetLastError(), "the kernels of deltas");
    check(cudaMemcpyAsync(memory_->seen, memory_->found.get(), sizeof(DeltaFound), cudaMemcpyDeviceToHost,
                          stream_of(stream)),
          "cudaMemcpyAsync");
}

void DeviceDelta::encode(int64_t chunk, uintptr_t now, uintptr_t base, uintptr_t payload, uintptr_t stream) {
    const DeviceScope scope(device_);
    const DeltaView where = view(chunk, {}, base, stream);
    auto *coded = bytes_at(payload), *fresh = bytes_at(now);
    begin(stream);
    survey_kernel<<<grid_of(where), kTeam, 0, stream_of(stream)>>>(where, fresh, coded, memory_->found.get());
    place_kernel<<<1, kTeam, 0, stream_of(stream)>>>(where, coded, memory_->bodies.get(), memory_->found.get());
    code_kernel<<<grid_of(where), kTeam, 0, stream_of(stream)>>>(where, fresh, coded, memory_->bodies.get());
    end(stream);
}

void DeviceDelta::apply(int64_t chunk, uintptr_t payload, int64_t nbytes, const std::vector<int64_t>& bases, bool write,
                        uintptr_t stream) {
    const DeviceScope scope(device_);
    const DeltaView where = view(chunk, bases, 0, stream);
    if (nbytes < kEntry * where.count) checked({0, 0, 0, 1});
    begin(stream);
    place_kernel<<<1, kTeam, 0, stream_of(stream)>>>(where, bytes_at(payload), memory_->bodies.get(),
                                                     memory_->found.get());
    apply_kernel<<<grid_of(where), kTeam, 0, stream_of(stream)>>>(where, bytes_at(payload), nbytes,
                                                                  memory_->bodies.get(), write, memory_->found.get());
    end(stream);
}

void DeviceDelta::read(int64_t chunk, const std::vector<int64_t>& bases, uintptr_t message, uintptr_t stream) {
    const DeviceScope scope(device_);
    const DeltaView where = view(chunk, bases, message, stream);
    begin(stream);
    read_kernel<<<grid_of(where), kTeam, 0, stream_of(stream)>>>(where, memory_->found.get());
    end(stream);
}

DeltaFound DeviceDelta::take() const { return checked(*static_cast<const DeltaFound*>(memory_->seen)); }

}  // namespace asyncmoe
