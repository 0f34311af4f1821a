// For .cu files: errors, and the current device.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace asyncmoe {

inline void check(cudaError_t status, const std::string& what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // so that the next call does not report this error again
    throw std::runtime_error(what + ": " + cudaGetErrorString(status));
}

// Makes a device current, and the one before it again at the end of the scope.
class DeviceScope {
  public:
    explicit DeviceScope(int device) {
        check(cudaGetDevice(&before_), "cudaGetDevice");
        check(cudaSetDevice(device), "cudaSetDevice " + std::to_string(device));
    }
    ~DeviceScope() { cudaSetDevice(before_); }
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

  private:
    int before_ = 0;
};

}  // namespace asyncmoe
