// Scales of the blocks of matrices that travel as float8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cast.h"
#include "search.h"

namespace asyncmoe {

// Columns of a matrix, all int64.
enum MatrixColumn : int {
    kMatrix,      // address
    kMatrixItem,  // bytes of an element: 4, float32, or 2, bfloat16
    kMatrixRows,
    kMatrixWidth,  // elements of a row
    kScalesThere,  // address of float32[rows / 128, width / 128], rounded up, row-major
    kMatrixColumns,
};

// A matrix, and the number of blocks of all before it.
struct ScaleJob {
    const std::byte* matrix;
    float* scales;
    int64_t rows;
    int64_t width;
    int64_t columns;  // blocks of a row
    int64_t first;
    int32_t item;
};

struct ScaleJobs {
    std::vector<ScaleJob> jobs;
    int64_t blocks;
    int64_t bytes;  // of all matrices
};

// Throws std::invalid_argument for another number of columns, a size that is negative, or another item than 2 and 4.
ScaleJobs scale_jobs(const int64_t* matrices, int64_t count, int64_t columns);

// The last job that begins at or before a block.
ASYNCMOE_BOTH inline int64_t job_of_block(const ScaleJob* jobs, int64_t count, int64_t block) {
    return last_from<&ScaleJob::first>(jobs, int64_t{0}, count - 1, block);
}

// Bits of the largest magnitude among the elements of a row of a block that `lane` of `lanes` looks at. As integers
// they are in the order of the numbers, and a NaN is the largest.
ASYNCMOE_BOTH inline uint32_t largest_in_row(const ScaleJob& job, int64_t row, int64_t column, int64_t count, int lane,
                                             int lanes) {
    uint32_t largest = 0;
    for (int64_t i = lane; i < count; i += lanes) {
        const std::byte* at = job.matrix + (row * job.width + column + i) * job.item;
        uint32_t bits = 0;
        if (job.item == 4) {
            bits = load_bits<uint32_t>(at);
        } else {
            bits = static_cast<uint32_t>(load_bits<uint16_t>(at)) << 16;
        }
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

// A block of a matrix.
struct Tile {
    int64_t row;
    int64_t last_row;
    int64_t column;
    int64_t width;
    int64_t number;  // of its scale
};

ASYNCMOE_BOTH inline Tile tile_of(const ScaleJob& job, int64_t block) {
    const int64_t number = block - job.first;
    const int64_t row = number / job.columns * kBlockSize, column = number % job.columns * kBlockSize;
    return {row, row + kBlockSize < job.rows ? row + kBlockSize : job.rows, column,
            column + kBlockSize < job.width ? kBlockSize : job.width - column, number};
}

constexpr int kLanes = 32;
constexpr int kWarps = 8;

// What one thread of a GPU finds in a block: its warp takes every eighth row, and it every 32nd element of them.
ASYNCMOE_BOTH inline uint32_t largest_of_thread(const ScaleJob& job, const Tile& tile, int warp, int lane) {
    uint32_t largest = 0;
    for (int64_t row = tile.row + warp; row < tile.last_row; row += kWarps) {
        const uint32_t found = largest_in_row(job, row, tile.column, tile.width, lane, kLanes);
        largest = found > largest ? found : largest;
    }
    return largest;
}

// What the GPU's kernel does, done by this thread. Slow.
void emulate_scale_blocks(const ScaleJobs& jobs, bool power_of_two);

// Writes all scales, on up to `threads` threads (0: as many as the machine has, at most 4).
void scale_blocks(const ScaleJobs& jobs, bool power_of_two, int threads);

#ifdef ASYNCMOE_CUDA
// Enqueues the same on a GPU's stream; the matrices and scales lie there.
void scale_blocks_on_gpu(const ScaleJobs& jobs, bool power_of_two, int device, uintptr_t stream);
#endif

}  // namespace asyncmoe
