// Arrays on a device, for .cu files.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "device_scope.h"

namespace asyncmoe {

// Copies from pageable memory to the current device and waits. Avoids cudaMemcpy: it returns before the last part of
// such a copy has arrived, so kernels on other streams could run too early, and on the default stream it would wait for
// a model's step enqueued there.
inline void copy_now(void* there, const void* here, size_t nbytes) {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    cudaError_t status = cudaMemcpyAsync(there, here, nbytes, cudaMemcpyHostToDevice, stream);
    if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
    check(status, "uploading a kernel's tables");
}

// An array on the current device; null if it is empty.
template <typename T>
class DeviceArray {
  public:
    explicit DeviceArray(size_t count) {
        if (count) check(cudaMalloc(&start_, count * sizeof(T)), "cudaMalloc of a kernel's tables");
    }
    explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
        if (!values.empty()) copy_now(start_, values.data(), values.size() * sizeof(T));
    }
    ~DeviceArray() { cudaFree(start_); }
    DeviceArray(const DeviceArray&) = delete;
    DeviceArray& operator=(const DeviceArray&) = delete;
    T* get() const { return static_cast<T*>(start_); }

  private:
    void* start_ = nullptr;
};

// Uploads `count` base addresses unless `known` says that they are there.
inline void upload(const DeviceArray<int64_t>& there, std::vector<int64_t>& known, const std::vector<int64_t>& wanted,
                   int64_t count, cudaStream_t stream) {
    const auto n = static_cast<size_t>(count);
    if (n == 0 || (known.size() == n && std::equal(known.begin(), known.end(), wanted.begin()))) return;
    known.assign(wanted.begin(), wanted.begin() + count);
    // The source is pageable memory, so the call returns only after reading it.
    const cudaError_t status =
        cudaMemcpyAsync(there.get(), known.data(), n * sizeof(int64_t), cudaMemcpyHostToDevice, stream);
    if (status != cudaSuccess) known.clear();
    check(status, "uploading base addresses");
}

}  // namespace asyncmoe
