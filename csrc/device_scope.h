// Errors and the current device, for .cu files.
#pragma once

#include <cuda_runtime.h>

#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace asyncmoe {

// A device is out of memory; Python gets a MemoryError.
class OutOfMemory : public std::bad_alloc {
  public:
    explicit OutOfMemory(std::string what) : what_(std::move(what)) {}
    const char* what() const noexcept override { return what_.c_str(); }

  private:
    std::string what_;
};

inline void check(cudaError_t status, const std::string& what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // so that the next call does not report this error again
    const std::string text = what + ": " + cudaGetErrorString(status);
    if (status == cudaErrorMemoryAllocation) throw OutOfMemory(text);
    throw std::runtime_error(text);
}

// Drops an error of an earlier call on this thread that nobody checked, for example in a destructor, so that it is not
// attributed to the next launch.
inline void forget_errors() { cudaGetLastError(); }

// Whether this process already uses a device, that is, whether its primary context is active. Creates no context. False
// if the driver cannot be asked.
bool has_context(int device);

// Makes a device current for a scope. At the end it restores the previous device, unless this process has no context
// there: since CUDA 12 cudaSetDevice creates one, about 500 MB on a GPU that the process was not given. A thread that
// had not chosen a device (CUDA then reports device 0) therefore keeps the scope's device.
class DeviceScope {
  public:
    explicit DeviceScope(int device) { check(enter(device), "cudaSetDevice " + std::to_string(device)); }
    ~DeviceScope() {
        if (changed_ && has_context(before_)) cudaSetDevice(before_);
    }
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

  protected:
    DeviceScope() = default;
    cudaError_t enter(int device) {
        const cudaError_t status = cudaGetDevice(&before_);
        if (status != cudaSuccess || before_ == device) return status;
        changed_ = true;
        return cudaSetDevice(device);
    }

  private:
    int before_ = 0;
    bool changed_ = false;
};

// A DeviceScope that never throws, for destructors.
class DestructorScope : public DeviceScope {
  public:
    explicit DestructorScope(int device) { enter(device); }
};

}  // namespace asyncmoe
