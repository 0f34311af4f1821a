// A program as the copy kernel reads it: jobs and tiles of all chunks in two arrays.
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
    // Throws std::invalid_argument for what the kernel cannot do.
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

// What the kernel does with a chunk, done by this thread, with the blocks of a grid of `blocks` one after the other.
// Returns the message's digest, 0 where there is none. Throws as `Program::copies`, and std::logic_error for an access
// that is not aligned.
uint64_t emulate(const Program& program, const CopyTable& table, int64_t chunk, const std::vector<int64_t>& sources,
                 const std::vector<int64_t>& destinations, int blocks);

// How the kernel copies bytes: even tiles within one run, even tiles of several runs, and looking every unit up.
enum class Way : int { kRun, kRows, kUneven };
constexpr int kWays = 3;

struct Share {
    int64_t tiles;
    int64_t bytes;
};

// What of a chunk goes which way, by `Way` and `Cast`; of uneven tiles, which may have several casts, as Cast::kNone.
// Throws as `Program::check`.
std::array<std::array<Share, kCasts>, kWays> ways(const Program& program, const CopyTable& table, int64_t chunk,
                                                  const std::vector<int64_t>& sources,
                                                  const std::vector<int64_t>& destinations);

}  // namespace asyncmoe
