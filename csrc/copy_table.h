// A program in the form the copy kernel reads: the jobs and tiles of all chunks in two arrays.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "copy_unit.h"
#include "program.h"

namespace asyncmoe {

// `at`: the box's first byte in its chunk.
Job job_of(const Descriptor& descriptor, int64_t at);

struct CopyTable {
    // Throws std::invalid_argument for copies the kernel does not support.
    explicit CopyTable(const Program& program);

    struct Chunk {
        int64_t first_job;
        int64_t first_tile;
        int64_t tiles;
        int64_t bytes;
    };

    Wire wire;
    std::vector<Job> jobs;
    std::vector<Tile> tiles;
    std::vector<Chunk> chunks;
};

// Emulates the kernel for a chunk on this thread, running the blocks of a grid of `blocks` one after another. Returns
// the message's digest, or 0 if there is no message. Throws as `Program::copies`, and std::logic_error for an unaligned
// access.
uint64_t emulate(const Program& program, const CopyTable& table, int64_t chunk, const std::vector<int64_t>& sources,
                 const std::vector<int64_t>& destinations, int blocks);

// How the kernel copies bytes: even tiles within one run, even tiles across several runs, or uneven tiles.
enum class Way : int { kRun, kRows, kUneven };
constexpr int kWays = 3;

struct Share {
    int64_t tiles;
    int64_t bytes;
};

// The tiles and bytes of a chunk by `Way` and `Cast`; uneven tiles, which may have several casts, count as Cast::kNone.
// Throws as `Program::check`.
std::array<std::array<Share, kCasts>, kWays> ways(const Program& program, const CopyTable& table, int64_t chunk,
                                                  const std::vector<int64_t>& sources,
                                                  const std::vector<int64_t>& destinations);

}  // namespace asyncmoe
