#include "scales.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu.h"
#include "threads.h"

namespace asyncmoe {
namespace {

// Computes the scales of one row of blocks, reading the matrix's rows from front to back.
template <typename T, int kShift>
__attribute__((always_inline)) inline void scale_row_of_blocks(const ScaleJob& job, int64_t row_of_blocks,
                                                               bool power_of_two) {
    std::vector<uint32_t> largest(static_cast<size_t>(job.columns), 0);
    const int64_t first = row_of_blocks * kBlockSize, last = std::min(job.rows, first + kBlockSize);
    for (int64_t row = first; row < last; ++row) {
        const std::byte* line = job.matrix + row * job.width * job.item;
        for (int64_t block = 0; block < job.columns; ++block) {
            const int64_t begin = block * kBlockSize, end = std::min(job.width, begin + kBlockSize);
            uint32_t found = largest[static_cast<size_t>(block)];
            for (int64_t i = begin; i < end; ++i) {
                const uint32_t bits = static_cast<uint32_t>(load_bits<T>(line + i * int64_t{sizeof(T)})) << kShift;
                found = std::max(found, bits & 0x7fffffffu);
            }
            largest[static_cast<size_t>(block)] = found;
        }
    }
    for (int64_t block = 0; block < job.columns; ++block)
        job.scales[row_of_blocks * job.columns + block] = scale_of(largest[static_cast<size_t>(block)], power_of_two);
}

void scale_anywhere(const ScaleJob& job, int64_t row_of_blocks, bool power_of_two) {
    if (job.item == 4)
        scale_row_of_blocks<uint32_t, 0>(job, row_of_blocks, power_of_two);
    else
        scale_row_of_blocks<uint16_t, 16>(job, row_of_blocks, power_of_two);
}

#if defined(__x86_64__)
ASYNCMOE_AVX512 void scale_with_avx512(const ScaleJob& job, int64_t row_of_blocks, bool power_of_two) {
    if (job.item == 4)
        scale_row_of_blocks<uint32_t, 0>(job, row_of_blocks, power_of_two);
    else
        scale_row_of_blocks<uint16_t, 16>(job, row_of_blocks, power_of_two);
}
#endif

void scale(const ScaleJob& job, int64_t row_of_blocks, bool power_of_two) {
#if defined(__x86_64__)
    if (has_avx512()) return scale_with_avx512(job, row_of_blocks, power_of_two);
#endif
    scale_anywhere(job, row_of_blocks, power_of_two);
}

int64_t blocks_in(int64_t elements) { return (elements + kBlockSize - 1) / kBlockSize; }

}  // namespace

ScaleJobs scale_jobs(const int64_t* matrices, int64_t count) {
    ScaleJobs made{{}, 0, 0};
    for (int64_t i = 0; i < count; ++i) {
        const int64_t* m = matrices + i * kMatrixColumns;
        if ((m[kMatrixItem] != 2 && m[kMatrixItem] != 4) || m[kMatrixRows] < 0 || m[kMatrixWidth] < 0)
            throw std::invalid_argument("matrix " + std::to_string(i) + ": got " + std::to_string(m[kMatrixRows]) +
                                        " rows of " + std::to_string(m[kMatrixWidth]) + " elements of " +
                                        std::to_string(m[kMatrixItem]) +
                                        " bytes, expected sizes of at least 0 and elements of 2 or 4 bytes");
        ScaleJob job{reinterpret_cast<const std::byte*>(m[kMatrix]),
                     reinterpret_cast<float*>(m[kScalesThere]),
                     m[kMatrixRows],
                     m[kMatrixWidth],
                     blocks_in(m[kMatrixWidth]),
                     made.blocks,
                     static_cast<int32_t>(m[kMatrixItem])};
        if (job.rows == 0 || job.width == 0) continue;
        made.blocks += blocks_in(job.rows) * job.columns;
        made.bytes += job.rows * job.width * job.item;
        made.jobs.push_back(job);
    }
    return made;
}

void scale_blocks(const ScaleJobs& jobs, bool power_of_two, int threads) {
    std::vector<std::pair<const ScaleJob*, int64_t>> parts;
    for (const auto& job : jobs.jobs)
        for (int64_t row = 0; row < blocks_in(job.rows); ++row) parts.emplace_back(&job, row);
    run_on_threads(threads_for(threads, jobs.bytes), static_cast<int64_t>(parts.size()), [&](int64_t i) {
        const auto& [job, row] = parts[static_cast<size_t>(i)];
        scale(*job, row, power_of_two);
    });
}

void emulate_scale_blocks(const ScaleJobs& jobs, bool power_of_two) {
    const auto count = static_cast<int64_t>(jobs.jobs.size());
    for (int64_t block = 0; block < jobs.blocks; ++block) {
        const ScaleJob& job = jobs.jobs[static_cast<size_t>(job_of_block(jobs.jobs.data(), count, block))];
        const MatrixBlock place = block_of(job, block);
        uint32_t largest = 0;
        for (int thread = 0; thread < kScaleThreads; ++thread)
            largest = std::max(largest, largest_of_thread(job, place, thread));
        job.scales[place.number] = scale_of(largest, power_of_two);
    }
}

}  // namespace asyncmoe
