// The part of DLPack's C interface (github.com/dmlc/dlpack, version 0.8, unversioned capsules) needed to read a tensor.
#pragma once

#include <cstdint>

namespace asyncmoe::dlpack {

constexpr int kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13;

struct Device {
    int32_t type;
    int32_t id;
};

struct DataType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

struct Tensor {
    void* data;
    Device device;
    int32_t ndim;
    DataType dtype;
    int64_t* shape;
    int64_t* strides;  // in elements; null: row-major
    uint64_t byte_offset;
};

struct ManagedTensor {
    Tensor tensor;
    void* context;
    void (*deleter)(ManagedTensor*);
};

}  // namespace asyncmoe::dlpack
