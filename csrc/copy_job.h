// The boxes of a chunk in the form the copy kernel reads: the source and destination of each byte.
#pragma once

#include "copy.h"
#include "search.h"

namespace asyncmoe {

// Division of 0 <= n < 2^31 by 1 <= d <= 2^31 as a multiplication (Granlund, Montgomery: Division by invariant integers
// using multiplication, 1994): with 2^(l-1) < d <= 2^l, n / d = n * ceil(2^(31+l) / d) >> (31 + l).
struct Divider {
    uint32_t multiplier;
    uint32_t shift;
};

inline Divider divider_of(int64_t divisor) {
    uint32_t shift = 31;
    while (int64_t{1} << (shift - 31) < divisor) ++shift;
    const auto d = static_cast<uint64_t>(divisor);
    return {static_cast<uint32_t>(((uint64_t{1} << shift) + d - 1) / d), shift};
}

struct JobDim {
    int64_t extent;
    int64_t source_stride;
    int64_t destination_stride;
    Divider divider;  // divides by extent; set only if `small`
};

// Division by the number of units in a run as one multiplication: n / units = n * multiplier >> 32. With multiplier =
// ceil(2^32 / units) the error n * (multiplier * units - 2^32) stays below 2^32 if n < 2^16 and units <= 2^15.
constexpr int64_t kMostRunUnits = int64_t{1} << 15;

// How even tiles continue from one run of a box to the next.
struct Rows {
    uint32_t multiplier;  // 0: even tiles do not extend across runs
    uint32_t source_gap;  // bytes from the end of a run to the beginning of the next
    uint32_t destination_gap;
    bool even;  // each unit is one aligned access on both sides, provided that the bases are multiples of 16
};

// A box: runs of `run` written bytes at every point of the loops over dims, outermost first.
struct Job {
    int64_t at;     // offset of its first byte in the chunk
    int64_t bytes;  // bytes written
    int64_t run;
    int64_t source_offset;
    int64_t destination_offset;
    int32_t source;  // index of a base; negative: zeros
    int32_t destination;
    int32_t scales;  // for a cast to float8: index of a base
    int16_t count;   // number of dims
    Cast cast;
    bool small;  // fewer than 2^31 bytes
    Divider run_divider;
    int64_t width;    // for a cast to float8: elements in a row of the source matrix
    int64_t columns;  // for a cast to float8: blocks in a row of the source matrix
    Divider width_divider;
    Rows rows;
    JobDim dims[kMaxDims];
};

// The units of a chunk that one thread block copies at a time. An even tile belongs to one box, and its addresses
// follow from its first unit's and `Job::rows`; in an uneven tile each unit is located separately.
struct Tile {
    int64_t unit;         // number of its first unit in the chunk
    int64_t source;       // even tiles: where the first unit is read, in bytes from the base
    int64_t destination;  // even tiles: where the first unit is written, in bytes from the base
    int32_t job;          // job of its first byte
    int32_t last;         // job of its last byte
    int32_t column;       // units from the beginning of its run to its first unit; kUneven: an uneven tile
    int32_t units;
};
constexpr int32_t kUneven = -1;

// One chunk's part of the tables.
struct ChunkView {
    const Job* jobs;
    const Tile* tiles;
    const int64_t* sources;       // addresses; unused if the message is the source
    const int64_t* destinations;  // addresses; unused if the message is the destination
    std::byte* message;
    int64_t bytes;
};

// The offsets from the bases at which a byte of a box is read and written, and the bytes left in its run.
struct Place {
    int64_t source;
    int64_t destination;
    int64_t left;
};

ASYNCMOE_BOTH inline uint32_t divide(uint32_t n, const Divider& by, int64_t) {
    return static_cast<uint32_t>(uint64_t{n} * by.multiplier >> by.shift);
}

ASYNCMOE_BOTH inline uint64_t divide(uint64_t n, const Divider&, int64_t divisor) {
    return n / static_cast<uint64_t>(divisor);
}

template <typename Index>
ASYNCMOE_BOTH inline Place locate_as(const Job& job, int64_t position) {
    Index rest = divide(static_cast<Index>(position), job.run_divider, job.run);
    const int64_t inner = position - static_cast<int64_t>(rest) * job.run;
    Place place{job.source_offset + inner / destination_bytes(job.cast) * source_bytes(job.cast),
                job.destination_offset + inner, job.run - inner};
    for (int k = job.count - 1; k >= 0; --k) {
        const JobDim& dim = job.dims[k];
        const Index above = k > 0 ? divide(rest, dim.divider, dim.extent) : Index{0};
        const int64_t i = static_cast<int64_t>(rest) - static_cast<int64_t>(above) * dim.extent;
        place.source += i * dim.source_stride;
        place.destination += i * dim.destination_stride;
        rest = above;
    }
    return place;
}

ASYNCMOE_BOTH inline Place locate(const Job& job, int64_t position) {
    return job.small ? locate_as<uint32_t>(job, position) : locate_as<uint64_t>(job, position);
}

// The last job of first .. last that begins at or before a byte offset of the chunk.
ASYNCMOE_BOTH inline int job_at(const Job* jobs, int first, int last, int64_t byte) {
    return last_from<&Job::at>(jobs, first, last, byte);
}

}  // namespace asyncmoe
