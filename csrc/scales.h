// Scales of the blocks of matrices that are sent as float8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cast.h"
#include "search.h"
#include "unit.h"

namespace asyncmoe {

// Columns of a matrix, all int64.
enum MatrixColumn : int {
    kMatrix,      // address
    kMatrixItem,  // bytes of an element: 4 (float32) or 2 (bfloat16)
    kMatrixRows,
    kMatrixWidth,  // elements of a row
    kScalesThere,  // address of the scales, float32[ceil(rows / 128), ceil(width / 128)], row-major
    kMatrixColumns,
};

// A matrix; `first` is the number of blocks of all matrices before it.
struct ScaleJob {
    const std::byte* matrix;
    float* scales;
    int64_t rows;
    int64_t width;
    int64_t columns;  // blocks in a row
    int64_t first;
    int32_t item;
};

struct ScaleJobs {
    std::vector<ScaleJob> jobs;
    int64_t blocks;
    int64_t bytes;  // size of all matrices
};

// Reads rows of kMatrixColumns. Throws std::invalid_argument for a negative size, or an item size that is not 2 or 4.
ScaleJobs scale_jobs(const int64_t* matrices, int64_t count);

// The last job that begins at or before a block.
ASYNCMOE_BOTH inline int64_t job_of_block(const ScaleJob* jobs, int64_t count, int64_t block) {
    return last_from<&ScaleJob::first>(jobs, int64_t{0}, count - 1, block);
}

// The bits of the larger of two magnitudes. As integers, bits are ordered like the numbers, with NaNs the largest.
ASYNCMOE_BOTH inline uint32_t larger(uint32_t magnitude, uint32_t bits) {
    bits &= 0x7fffffffu;
    return bits > magnitude ? bits : magnitude;
}

// The largest magnitude in 4 bytes of a matrix: a float32, or two bfloat16.
ASYNCMOE_BOTH inline uint32_t largest_in_word(uint32_t largest, uint32_t word, int item) {
    largest = larger(largest, item == 4 ? word : word & 0xffff0000u);
    return item == 4 ? largest : larger(largest, word << 16);
}

ASYNCMOE_BOTH inline uint32_t largest_in_unit(uint32_t largest, const Unit& unit, int item) {
    largest = largest_in_word(largest, static_cast<uint32_t>(unit.low), item);
    largest = largest_in_word(largest, static_cast<uint32_t>(unit.low >> 32), item);
    largest = largest_in_word(largest, static_cast<uint32_t>(unit.high), item);
    return largest_in_word(largest, static_cast<uint32_t>(unit.high >> 32), item);
}

// A block of a matrix.
struct MatrixBlock {
    int64_t row;
    int64_t last_row;
    int64_t column;
    int64_t width;
    int64_t number;  // index of its scale
};

ASYNCMOE_BOTH inline MatrixBlock block_of(const ScaleJob& job, int64_t block) {
    const int64_t number = block - job.first;
    const int64_t row = number / job.columns * kBlockSize, column = number % job.columns * kBlockSize;
    return {row, row + kBlockSize < job.rows ? row + kBlockSize : job.rows, column,
            column + kBlockSize < job.width ? kBlockSize : job.width - column, number};
}

constexpr int kScaleThreads = 256;

// Whether the rows of a block consist of whole, aligned units.
ASYNCMOE_BOTH inline bool rows_are_units(const ScaleJob& job) {
    return (reinterpret_cast<uintptr_t>(job.matrix) | static_cast<uintptr_t>(job.width * job.item)) % kUnit == 0;
}

// The largest magnitude one GPU thread finds in a block. Adjacent threads read adjacent units or, if rows do not
// consist of units, adjacent elements.
template <bool kUnits>
ASYNCMOE_BOTH inline uint32_t largest_of_thread(const ScaleJob& job, const MatrixBlock& block, int thread) {
    const int step = kUnits ? static_cast<int>(kUnit) : job.item, item = job.item;
    const int wide = static_cast<int>(kBlockSize) * item / step;  // a power of two
    const int64_t last = block.width * item, at = thread % wide * step;
    const std::byte* row = job.matrix + ((block.row + thread / wide) * job.width + block.column) * item + at;
    const int64_t rows_at_a_time = kScaleThreads / wide, pitch = rows_at_a_time * job.width * item;
    uint32_t largest = 0;
    if (at >= last) return largest;
#ifdef __CUDA_ARCH__
#pragma unroll 4
#endif
    for (int64_t i = block.row + thread / wide; i < block.last_row; i += rows_at_a_time, row += pitch) {
        if (kUnits)
            largest = largest_in_unit(largest, load_unit(row), item);
        else
            largest = larger(largest, static_cast<uint32_t>(load_word(row, item)) << (item == 4 ? 0 : 16));
    }
    return largest;
}

ASYNCMOE_BOTH inline uint32_t largest_of_thread(const ScaleJob& job, const MatrixBlock& block, int thread) {
    return rows_are_units(job) ? largest_of_thread<true>(job, block, thread)
                               : largest_of_thread<false>(job, block, thread);
}

// Emulates the GPU kernel on this thread. Slow.
void emulate_scale_blocks(const ScaleJobs& jobs, bool power_of_two);

// Writes all scales, on up to `threads` threads (0: as many as the machine has, at most 4).
void scale_blocks(const ScaleJobs& jobs, bool power_of_two, int threads);

#ifdef ASYNCMOE_CUDA
// Enqueues the same computation on a GPU's stream; the matrices and scales are in the GPU's memory.
void scale_blocks_on_gpu(const ScaleJobs& jobs, bool power_of_two, int device, uintptr_t stream);
#endif

}  // namespace asyncmoe
