#include <cstring>

#include "device.h"
#include "device_scope.h"

namespace asyncmoe {
namespace {

cudaStream_t stream_of(uintptr_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

cudaEvent_t event_of(void* event) { return static_cast<cudaEvent_t>(event); }

// The driver's cuDevicePrimaryCtxGetState (cuda.h): CUresult (CUdevice, unsigned int* flags, int* active).
using PrimaryContextState = int (*)(int, unsigned int*, int*);

PrimaryContextState primary_context_state() {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    constexpr unsigned int kSince = 7000;  // CUDA 7.0
#if CUDART_VERSION >= 12050
    const auto status =
        cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &found, kSince, cudaEnableDefault, &result);
#else
    const auto status = cudaGetDriverEntryPoint("cuDevicePrimaryCtxGetState", &found, cudaEnableDefault, &result);
    static_cast<void>(kSince);
#endif
    if (status == cudaSuccess && result == cudaDriverEntryPointSuccess)
        return reinterpret_cast<PrimaryContextState>(found);
    cudaGetLastError();
    return nullptr;
}

}  // namespace

bool has_context(int device) {
    static const PrimaryContextState state = primary_context_state();
    unsigned int flags = 0;
    int active = 0;
    return state != nullptr && state(device, &flags, &active) == 0 && active != 0;
}

int cuda_device_count() {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    cudaGetLastError();
    return 0;
}

int swap_device(int device) {
    int before = 0;
    check(cudaGetDevice(&before), "cudaGetDevice");
    check(cudaSetDevice(device), "cudaSetDevice " + std::to_string(device));
    return before;
}

void restore_device(int device) {
    if (has_context(device)) check(cudaSetDevice(device), "cudaSetDevice " + std::to_string(device));
}

std::pair<int64_t, int64_t> device_memory(int device) {
    const DeviceScope scope(device);
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return {static_cast<int64_t>(free), static_cast<int64_t>(total)};
}

std::string cuda_device_name(int device) {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    return properties.name;
}

DeviceStream::DeviceStream(int device) : device_(device) {
    const DeviceScope scope(device);
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    handle_ = reinterpret_cast<uintptr_t>(stream);
}

DeviceStream::~DeviceStream() {
    const DestructorScope scope(device_);
    cudaStreamDestroy(stream_of(handle_));
}

DeviceEvent::DeviceEvent(int device) : device_(device) {
    const DeviceScope scope(device);
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    event_ = event;
}

DeviceEvent::~DeviceEvent() {
    const DestructorScope scope(device_);
    cudaEventDestroy(event_of(event_));
}

void DeviceEvent::record(uintptr_t stream) {
    const DeviceScope scope(device_);
    check(cudaEventRecord(event_of(event_), stream_of(stream)), "cudaEventRecord");
}

bool DeviceEvent::done() const {
    const DeviceScope scope(device_);
    const cudaError_t status = cudaEventQuery(event_of(event_));
    if (status == cudaErrorNotReady) {
        cudaGetLastError();
        return false;
    }
    check(status, "work enqueued on the GPU");
    return true;
}

void DeviceEvent::hold(uintptr_t stream) const {
    const DeviceScope scope(device_);
    check(cudaStreamWaitEvent(stream_of(stream), event_of(event_), 0), "cudaStreamWaitEvent");
}

DeviceMemory::DeviceMemory(int device, int64_t nbytes) : device_(device), nbytes_(nbytes), foreign_(false) {
    const DeviceScope scope(device);
    check(cudaMalloc(&start_, static_cast<size_t>(nbytes)), "cudaMalloc of " + std::to_string(nbytes) + " bytes");
}

DeviceMemory::DeviceMemory(int device, int64_t nbytes, const std::string& handle)
    : device_(device), nbytes_(nbytes), foreign_(true) {
    static_assert(sizeof(cudaIpcMemHandle_t) == kHandleBytes, "the size of a handle");
    if (handle.size() != kHandleBytes)
        throw std::invalid_argument("handle of device memory: got " + std::to_string(handle.size()) +
                                    " bytes, expected " + std::to_string(kHandleBytes));
    const DeviceScope scope(device);
    cudaIpcMemHandle_t copy;
    std::memcpy(&copy, handle.data(), sizeof copy);
    check(cudaIpcOpenMemHandle(&start_, copy, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
}

DeviceMemory::~DeviceMemory() {
    const DestructorScope scope(device_);
    if (foreign_)
        cudaIpcCloseMemHandle(start_);
    else
        cudaFree(start_);
}

std::string DeviceMemory::handle() const {
    const DeviceScope scope(device_);
    cudaIpcMemHandle_t handle;
    check(cudaIpcGetMemHandle(&handle, start_), "cudaIpcGetMemHandle");
    return {reinterpret_cast<const char*>(&handle), sizeof handle};
}

void copy_plainly(int device, uintptr_t destination, uintptr_t source, int64_t nbytes, uintptr_t stream) {
    const DeviceScope scope(device);
    check(cudaMemcpyAsync(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source),
                          static_cast<size_t>(nbytes), cudaMemcpyDefault, stream_of(stream)),
          "cudaMemcpyAsync");
}

}  // namespace asyncmoe
