// Strided box copies: what a plan comes down to.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace asyncmoe {

constexpr int kMaxDims = 4;

// Columns of a descriptor row, all int64. Offsets and strides are in bytes; a negative source index means "write
// zeros".
enum Column : int {
    kSource,
    kSourceOffset,
    kDestination,
    kDestinationOffset,
    kItem,
    kExtents,
    kSourceStrides = kExtents + kMaxDims,
    kDestinationStrides = kSourceStrides + kMaxDims,
    kColumns = kDestinationStrides + kMaxDims,
};

struct Dim {
    int64_t extent;
    int64_t source_stride;
    int64_t destination_stride;
};

// `run` contiguous bytes at every point of the loops over `dims[0 .. count)`, outermost first. Source null: zeros.
struct BoxCopy {
    const std::byte* source;
    std::byte* destination;
    int64_t run;
    int count;
    std::array<Dim, kMaxDims> dims;

    int64_t points() const {
        int64_t n = 1;
        for (int k = 0; k < count; ++k) n *= dims[k].extent;
        return n;
    }
    int64_t bytes() const { return run * points(); }
};

// Resolves rows against base addresses and joins dimensions that are contiguous on both sides into longer runs. Empty
// boxes are left out. Throws std::invalid_argument for an index without a base, a negative extent or an item size
// below 1.
std::vector<BoxCopy> resolve(const int64_t* rows, int64_t count, const int64_t* sources, int64_t source_count,
                             const int64_t* destinations, int64_t destination_count);

// Runs all copies on up to `threads` threads (0: as many as the machine has, at most 4), the caller's among them. No
// two copies may write the same byte, and none may read what another writes.
void copy_on_cpu(const std::vector<BoxCopy>& copies, int threads);

// 64-bit digest of a buffer: with w[i] its little-endian 64-bit words (the last one filled up with zero bytes),
//   mix(n + sum_i mix(w[i] + (i + 1) * 0x9e3779b97f4a7c15)) modulo 2^64, n its length in bytes,
// where mix is the finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
// The sum does not depend on the order of its terms, so parts may be digested apart, by many threads or on a GPU. Not
// cryptographic.
uint64_t digest(const std::byte* data, int64_t nbytes, int threads);

#ifdef ASYNCMOE_CUDA
// The same as one kernel launch on a stream (a cudaStream_t as an integer) of the current device; returns without
// waiting. Throws std::runtime_error with CUDA's message.
void copy_on_cuda(const std::vector<BoxCopy>& copies, int device, uintptr_t stream);

// Number of CUDA devices; 0 without a driver.
int cuda_device_count();
#endif

}  // namespace asyncmoe
