// Strided box copies, the building blocks of every plan.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cast.h"

namespace asyncmoe {

constexpr int kMaxDims = 4;

// Columns of a descriptor row, all int64. Offsets and strides are in bytes; a negative source index writes zeros.
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

// Columns of the cast of a descriptor row, all int64. A cast to float8 reads a matrix that begins at the base of the
// row's source.
enum CastColumn : int {
    kCast,    // a Cast
    kScales,  // to float8: index of the source with the scales of the matrix's blocks
    kWidth,   // to float8: elements in a row of the matrix
    kCastColumns,
};

struct Dim {
    int64_t extent;
    int64_t source_stride;
    int64_t destination_stride;
};

// `run` contiguous units at every point of the loops over `dims[0 .. count)`, outermost first. A unit is a byte or,
// with a cast, an element. A null source writes zeros.
struct BoxCopy {
    const std::byte* source;
    std::byte* destination;
    int64_t run;
    int count;
    Cast cast;
    Blocks blocks;  // for a cast to float8
    std::array<Dim, kMaxDims> dims;

    int64_t points() const {
        int64_t n = 1;
        for (int k = 0; k < count; ++k) n *= dims[k].extent;
        return n;
    }
    int64_t source_unit() const { return source_bytes(cast); }
    int64_t destination_unit() const { return destination_bytes(cast); }
    // Bytes written.
    int64_t bytes() const { return run * destination_unit() * points(); }
};

// A descriptor row in which dimensions that are contiguous on both sides are merged into longer runs. The addresses of
// `copy` are unset; `at` computes them.
struct Descriptor {
    int64_t source_index;  // negative: zeros
    int64_t destination_index;
    int64_t source_offset;
    int64_t destination_offset;
    int64_t scales_index;  // negative: none
    BoxCopy copy;

    BoxCopy at(const int64_t* sources, const int64_t* destinations) const;
};

// Reads rows and their casts (null: no casts). Empty boxes are kept, with a run or an extent of 0. Throws
// std::invalid_argument for an index that is too small, an unknown cast, a negative extent, offset or stride, an item
// size that is not positive (with a cast: not the cast's source size), or a cast to float8 without scales or width.
std::vector<Descriptor> read_rows(const int64_t* rows, const int64_t* casts, int64_t count);

// Throws std::invalid_argument if a descriptor names a base that does not exist.
void check_bases(const std::vector<Descriptor>& descriptors, int64_t sources, int64_t destinations);

// Returns the copies of rows at base addresses, without empty boxes. Throws as `read_rows` and `check_bases`.
std::vector<BoxCopy> resolve(const int64_t* rows, const int64_t* casts, int64_t count, const int64_t* sources,
                             int64_t source_count, const int64_t* destinations, int64_t destination_count);

// Splits a copy and appends its parts, which write at most about `bytes` each, in row-major order of the box: each part
// is contiguous wherever the whole box is.
void split(const BoxCopy& copy, int64_t bytes, std::vector<BoxCopy>& parts);

// Runs one copy on this thread.
void copy_one(const BoxCopy& copy);

// Runs all copies on up to `threads` threads (0: as many as the machine has, at most 4), including the caller's. No two
// copies may write the same byte, and none may read a byte that another writes.
void copy_on_cpu(const std::vector<BoxCopy>& copies, int threads);

}  // namespace asyncmoe
