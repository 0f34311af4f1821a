// A stand-in of the CUDA runtime in host memory, with two devices, for the host code of csrc/device.cu.
//
// As in CUDA 12 and later the current device is a thread's own and 0 in a new one, cudaSetDevice creates the device's
// primary context, and so does every other call that needs one; an event and the stream it is recorded in must be of
// one device (CUDA runtime API, "Device Management" and "Event Management"). What was enqueued is done at once.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#define CUDART_VERSION 13000

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidDevice = 101,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600
};
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0, cudaDriverEntryPointSymbolNotFound = 1 };
constexpr unsigned long long cudaEnableDefault = 0;
constexpr unsigned int cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaIpcMemLazyEnablePeerAccess = 1;
struct cudaDeviceProp {
    char name[256];
};
struct cudaIpcMemHandle_t {
    char reserved[64];
};
struct FakeObject {
    int device;
};
using cudaStream_t = FakeObject*;
using cudaEvent_t = FakeObject*;

namespace fake {

constexpr int kDevices = 2;
struct Machine {
    std::mutex mutex;
    bool context[kDevices] = {};
    size_t free[kDevices] = {};
    std::map<void*, std::pair<int, size_t>> memory;
};
inline Machine& machine() {
    static Machine it;
    return it;
}
inline thread_local int current = 0;
inline void use() { machine().context[current] = true; }
constexpr size_t kTotal = size_t{1} << 30;

}  // namespace fake

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : "another error";
}
inline cudaError_t cudaGetDeviceCount(int* count) {
    *count = fake::kDevices;
    return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
    *device = fake::current;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= fake::kDevices) return cudaErrorInvalidDevice;
    fake::current = device;
    fake::use();
    return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    std::strcpy(properties->name, "a stand-in");
    return cudaSuccess;
}
inline cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    fake::use();
    *free = fake::machine().free[fake::current];
    *total = fake::kTotal;
    return cudaSuccess;
}
inline cudaError_t cudaMalloc(void** start, size_t nbytes) {
    fake::use();
    auto& machine = fake::machine();
    const std::lock_guard<std::mutex> hold(machine.mutex);
    if (nbytes > machine.free[fake::current]) return cudaErrorMemoryAllocation;
    machine.free[fake::current] -= nbytes;
    *start = std::aligned_alloc(256, (nbytes + 511) / 256 * 256);
    machine.memory[*start] = {fake::current, nbytes};
    return cudaSuccess;
}
inline cudaError_t cudaFree(void* start) {
    fake::use();
    auto& machine = fake::machine();
    const std::lock_guard<std::mutex> hold(machine.mutex);
    const auto found = machine.memory.find(start);
    if (found == machine.memory.end()) return cudaErrorInvalidValue;
    machine.free[found->second.first] += found->second.second;
    machine.memory.erase(found);
    std::free(start);
    return cudaSuccess;
}
constexpr unsigned int cudaHostAllocPortable = 1;
inline cudaError_t cudaHostAlloc(void** start, size_t nbytes, unsigned int) {
    fake::use();
    *start = std::aligned_alloc(256, (nbytes + 511) / 256 * 256);
    return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* start) {
    fake::use();
    std::free(start);
    return cudaSuccess;
}
inline cudaError_t create(FakeObject** made) {
    fake::use();
    *made = new FakeObject{fake::current};
    return cudaSuccess;
}
inline cudaError_t destroy(FakeObject* made) {
    fake::use();
    delete made;
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) { return create(stream); }
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) { return destroy(stream); }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) { return create(event); }
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { return destroy(event); }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    fake::use();
    return event->device == (stream ? stream->device : fake::current) ? cudaSuccess : cudaErrorInvalidResourceHandle;
}
inline cudaError_t cudaEventQuery(cudaEvent_t) {
    fake::use();
    return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned int) {
    fake::use();
    return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind, cudaStream_t) {
    fake::use();
    std::memcpy(to, from, nbytes);
    return cudaSuccess;
}
// A handle is an address: both ends are in one process.
inline cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* start) {
    fake::use();
    std::memcpy(handle, &start, sizeof start);
    return cudaSuccess;
}
inline cudaError_t cudaIpcOpenMemHandle(void** start, cudaIpcMemHandle_t handle, unsigned int) {
    fake::use();
    std::memcpy(start, &handle, sizeof *start);
    return cudaSuccess;
}
inline cudaError_t cudaIpcCloseMemHandle(void*) {
    fake::use();
    return cudaSuccess;
}
inline int primary_state(int device, unsigned int* flags, int* active) {
    *flags = 0;
    *active = fake::machine().context[device];
    return 0;
}
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned int, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
    const bool known = std::strcmp(name, "cuDevicePrimaryCtxGetState") == 0;
    *found = known ? reinterpret_cast<void*>(&primary_state) : nullptr;
    *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
