// What one thread of the copy kernel does, as functions that run on the host too: how they address, cast and digest can
// be shown without a GPU.
//
// A chunk is a row of bytes: the message where there is one, else the boxes it writes, one after the other, each from a
// multiple of 16 on. It is cut into units of 16 bytes, whatever boxes they belong to, and a unit is one thread's.
// So a word of the message is in exactly one thread's hands, also where boxes meet in it.
#pragma once

#include <cstring>
#include <stdexcept>

#include "copy.h"
#include "digest.h"
#include "program.h"

namespace asyncmoe {

constexpr int64_t kUnit = 16;  // bytes: the widest access
constexpr int kThreads = 256;
constexpr int kUnitsPerThread = 4;
constexpr int64_t kTileUnits = int64_t{kThreads} * kUnitsPerThread;

// Division of 0 <= n < 2^31 by 1 <= divisor <= 2^31 without dividing (Granlund, Montgomery: Division by invariant
// integers using multiplication, 1994): with 2^(l-1) < d <= 2^l, n / d = n * ceil(2^(31+l) / d) >> (31 + l).
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
    Divider divider;  // by extent, where `small`
};

// A box: runs of `run` bytes as they are written, at every point of the loops over dims, outermost first.
struct Job {
    int64_t at;     // its first byte in the chunk
    int64_t bytes;  // that it writes
    int64_t run;
    int64_t source_offset;
    int64_t destination_offset;
    int32_t source;  // index of a base; negative: zeros
    int32_t destination;
    int32_t scales;  // index of a base, of a cast to float8
    int16_t count;   // of dims
    Cast cast;
    bool small;  // fewer than 2^31 bytes
    Divider run_divider;
    int64_t width;    // of a cast to float8: elements of a row of the source, and
    int64_t columns;  // blocks of it
    JobDim dims[kMaxDims];
};

// One chunk's part of the tables. Tile t begins in job tile_jobs[t] and ends at latest in tile_jobs[t + 1].
struct ChunkView {
    const Job* jobs;
    const int32_t* tile_jobs;
    const int64_t* sources;       // addresses; of the message's side not used
    const int64_t* destinations;  // addresses; of the message's side not used
    std::byte* message;
    int64_t bytes;
};

struct alignas(kUnit) Unit {
    uint64_t low;
    uint64_t high;
};

// Where a byte of a box is read and written, relative to the bases; and how many bytes go on from there in its run.
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

// The last job of first .. last that begins at or before a byte of the chunk.
ASYNCMOE_BOTH inline int job_at(const Job* jobs, int first, int last, int64_t byte) {
    while (first < last) {
        const int middle = first + (last - first + 1) / 2;
        if (jobs[middle].at <= byte)
            first = middle;
        else
            last = middle - 1;
    }
    return first;
}

// Memory as a GPU reads and writes it: aligned. The host says so where it is not.
template <typename T>
ASYNCMOE_BOTH inline T load_as(const std::byte* from) {
#ifdef __CUDA_ARCH__
    return *reinterpret_cast<const T*>(from);
#else
    if (reinterpret_cast<uintptr_t>(from) % sizeof(T)) throw std::logic_error("a load that is not aligned");
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
#endif
}

template <typename T>
ASYNCMOE_BOTH inline void store_as(std::byte* to, const T& value) {
#ifdef __CUDA_ARCH__
    *reinterpret_cast<T*>(to) = value;
#else
    if (reinterpret_cast<uintptr_t>(to) % sizeof(T)) throw std::logic_error("a store that is not aligned");
    std::memcpy(to, &value, sizeof value);
#endif
}

// One access of 16 bytes each: of a struct the compiler makes two of 8.
ASYNCMOE_BOTH inline Unit load_unit(const std::byte* from) {
#ifdef __CUDA_ARCH__
    __builtin_assume(__isGlobal(from));
    const ulonglong2 both = *reinterpret_cast<const ulonglong2*>(from);
    return {both.x, both.y};
#else
    return load_as<Unit>(from);
#endif
}

ASYNCMOE_BOTH inline void store_unit(std::byte* to, const Unit& unit) {
#ifdef __CUDA_ARCH__
    __builtin_assume(__isGlobal(to));
    *reinterpret_cast<ulonglong2*>(to) = make_ulonglong2(unit.low, unit.high);
#else
    store_as(to, unit);
#endif
}

// `width` is 1, 2, 4 or 8, and divides the address.
ASYNCMOE_BOTH inline uint64_t load_word(const std::byte* from, int width) {
    switch (width) {
        case 8:
            return load_as<uint64_t>(from);
        case 4:
            return load_as<uint32_t>(from);
        case 2:
            return load_as<uint16_t>(from);
        default:
            return load_as<uint8_t>(from);
    }
}

ASYNCMOE_BOTH inline void store_word(std::byte* to, int width, uint64_t word) {
    switch (width) {
        case 8:
            store_as(to, word);
            break;
        case 4:
            store_as(to, static_cast<uint32_t>(word));
            break;
        case 2:
            store_as(to, static_cast<uint16_t>(word));
            break;
        default:
            store_as(to, static_cast<uint8_t>(word));
    }
}

// The widest access at an address, for a part of a unit from `offset` on with `bytes` left.
ASYNCMOE_BOTH inline int width_at(const std::byte* address, int offset, int bytes) {
    const auto bits = reinterpret_cast<uintptr_t>(address) | static_cast<uintptr_t>(offset);
    int width = 8;
    while (bits % static_cast<uintptr_t>(width) != 0 || width > bytes) width /= 2;
    return width;
}

ASYNCMOE_BOTH inline void insert(Unit& unit, int offset, uint64_t word) {
    (offset < 8 ? unit.low : unit.high) |= word << 8 * (offset % 8);
}

ASYNCMOE_BOTH inline uint64_t extract(const Unit& unit, int offset) {
    return (offset < 8 ? unit.low : unit.high) >> 8 * (offset % 8);
}

// Bytes offset <= i < offset + bytes of a unit, from memory of any alignment; they are 0 before.
ASYNCMOE_BOTH inline void load_bytes(Unit& unit, int offset, int bytes, const std::byte* from) {
    while (bytes > 0) {
        const int width = width_at(from, offset, bytes);
        insert(unit, offset, load_word(from, width));
        offset += width, bytes -= width, from += width;
    }
}

ASYNCMOE_BOTH inline void store_bytes(const Unit& unit, int offset, int bytes, std::byte* to) {
    while (bytes > 0) {
        const int width = width_at(to, offset, bytes);
        store_word(to, width, extract(unit, offset));
        offset += width, bytes -= width, to += width;
    }
}

// The scale of the block that an element is in, `at` bytes from the base of its source.
ASYNCMOE_BOTH inline float scale_at(const Job& job, const int64_t* sources, int64_t at) {
    const int64_t element = at / source_bytes(job.cast), row = element / job.width, column = element - row * job.width;
    const auto* scales = reinterpret_cast<const std::byte*>(sources[job.scales]);
    const int64_t number = row / kBlockSize * job.columns + column / kBlockSize;
    return float_of(load_as<uint32_t>(scales + 4 * number));
}

// As load_bytes, of elements that are quantised, `at` bytes from the base of their source.
ASYNCMOE_BOTH inline void quantise_bytes(Unit& unit, int offset, int bytes, const Job& job, const int64_t* sources,
                                         int64_t at) {
    const auto* base = reinterpret_cast<const std::byte*>(sources[job.source]);
    const auto item = static_cast<int>(source_bytes(job.cast));
    for (int i = 0; i < bytes; ++i, at += item) {
        Unit element{0, 0};
        load_bytes(element, 0, item, base + at);
        const auto bits = static_cast<uint32_t>(element.low) << (item == 2 ? 16 : 0);
        insert(unit, offset + i, quantised(float_of(bits), scale_at(job, sources, at)));
    }
}

// As load_bytes, of elements that are rounded; `half`: the first byte is the second one of its element.
ASYNCMOE_BOTH inline void round_bytes(Unit& unit, int offset, int bytes, const std::byte* from, int half) {
    while (bytes > 0) {
        Unit element{0, 0};
        load_bytes(element, 0, 4, from);
        uint32_t rounded = bfloat_of(static_cast<uint32_t>(element.low)) >> 8 * half;
        const int count = bytes < 2 - half ? 1 : 2 - half;
        for (int i = 0; i < count; ++i, rounded >>= 8) insert(unit, offset + i, rounded & 0xffu);
        offset += count, bytes -= count, from += 4, half = 0;
    }
}

ASYNCMOE_BOTH inline uint64_t two_bfloats(uint64_t floats) {
    return bfloat_of(static_cast<uint32_t>(floats)) | bfloat_of(static_cast<uint32_t>(floats >> 32)) << 16;
}

// Two float32 to float8.
ASYNCMOE_BOTH inline uint64_t two_float8(uint64_t floats, float scale) {
    return quantised(float_of(static_cast<uint32_t>(floats)), scale) |
           quantised(float_of(static_cast<uint32_t>(floats >> 32)), scale) << 8;
}

// Four bfloat16 to float8.
ASYNCMOE_BOTH inline uint64_t four_float8(uint64_t bfloats, float scale) {
    uint64_t made = 0;
    for (int i = 0; i < 4; ++i) {
        const auto bits = static_cast<uint32_t>(bfloats >> 16 * i) << 16;
        made |= uint64_t{quantised(float_of(bits), scale)} << 8 * i;
    }
    return made;
}

// 16 elements of one block.
ASYNCMOE_BOTH inline Unit load_unit_quantised(const std::byte* from, Cast cast, float scale) {
    Unit made{0, 0};
    if (cast == Cast::kBfloatToFloat8) {
        const Unit first = load_unit(from), second = load_unit(from + kUnit);
        made.low = four_float8(first.low, scale) | four_float8(first.high, scale) << 32;
        made.high = four_float8(second.low, scale) | four_float8(second.high, scale) << 32;
        return made;
    }
    for (int i = 0; i < 4; ++i) {
        const Unit four = load_unit(from + i * kUnit);
        const uint64_t word = two_float8(four.low, scale) | two_float8(four.high, scale) << 16;
        (i < 2 ? made.low : made.high) |= word << 32 * (i % 2);
    }
    return made;
}

ASYNCMOE_BOTH inline Unit load_unit_rounded(const std::byte* from) {
    const Unit first = load_unit(from), second = load_unit(from + kUnit);
    return {two_bfloats(first.low) | two_bfloats(first.high) << 32, two_bfloats(second.low) | two_bfloats(second.high)
                                                                                                  << 32};
}

// The digest's terms of the words of a unit; `bytes` of it are there, the others are 0.
ASYNCMOE_BOTH inline uint64_t terms_of_unit(const Unit& unit, int64_t number, int64_t bytes) {
    return term_of(unit.low, 2 * number) + (bytes > 8 ? term_of(unit.high, 2 * number + 1) : 0);
}

// A unit that is one aligned access on both sides; destination is null for any other.
struct Straight {
    const std::byte* source;  // null: zeros
    std::byte* destination;
    Cast cast;
    float scale;
};

ASYNCMOE_BOTH inline Unit load_straight(const Straight& found) {
    if (!found.source) return Unit{0, 0};
    if (found.cast == Cast::kNone) return load_unit(found.source);
    if (found.cast == Cast::kFloatToBfloat) return load_unit_rounded(found.source);
    return load_unit_quantised(found.source, found.cast, found.scale);
}

template <Wire kWire>
ASYNCMOE_BOTH inline Straight straight(const ChunkView& chunk, int64_t unit, int first, int last) {
    const int64_t at = unit * kUnit;
    const Job& job = chunk.jobs[job_at(chunk.jobs, first, last, at)];
    const int64_t position = at - job.at;
    if (position + kUnit > job.bytes) return {nullptr, nullptr, Cast::kNone, 1.0f};
    const Place place = locate(job, position);
    Straight found{chunk.message + at, chunk.message + at, Cast::kNone, 1.0f};
    if (kWire != Wire::kSource) {
        const bool zeros = job.source < 0;
        found.source = zeros ? nullptr : reinterpret_cast<const std::byte*>(chunk.sources[job.source]) + place.source;
        if (!zeros) found.cast = job.cast;
    }
    if (kWire != Wire::kDestination)
        found.destination = reinterpret_cast<std::byte*>(chunk.destinations[job.destination]) + place.destination;
    const bool halves = found.cast == Cast::kFloatToBfloat && position % 2 != 0;
    const auto bits = reinterpret_cast<uintptr_t>(found.source) | reinterpret_cast<uintptr_t>(found.destination);
    if (place.left < kUnit || bits % kUnit != 0 || halves) found.destination = nullptr;
    if (found.destination && to_float8(found.cast)) {
        // All 16 are in one block where rows are multiples of 16 and the first of them is one.
        const int64_t element = place.source / source_bytes(job.cast);
        if (element % kUnit != 0 || job.width % kUnit != 0)
            found.destination = nullptr;
        else
            found.scale = scale_at(job, chunk.sources, place.source);
    }
    return found;
}

// Any unit: bytes are gathered and scattered run by run. Returns the digest's terms.
template <Wire kWire>
ASYNCMOE_BOTH uint64_t copy_in_pieces(const ChunkView& chunk, int64_t unit, int first, int last) {
    const int64_t begin = unit * kUnit, end = begin + kUnit < chunk.bytes ? begin + kUnit : chunk.bytes;
    Unit value{0, 0};
    if (kWire == Wire::kSource) load_bytes(value, 0, static_cast<int>(end - begin), chunk.message + begin);
    int number = job_at(chunk.jobs, first, last, begin);
    for (int64_t at = begin; at < end;) {
        while (number < last && chunk.jobs[number + 1].at <= at) ++number;
        const Job& job = chunk.jobs[number];
        const int64_t position = at - job.at;
        if (position >= job.bytes) break;  // between two boxes that are no message
        const Place place = locate(job, position);
        const int offset = static_cast<int>(at - begin);
        const int bytes = static_cast<int>(place.left < end - at ? place.left : end - at);
        if (kWire != Wire::kSource && job.source >= 0) {
            const auto* from = reinterpret_cast<const std::byte*>(chunk.sources[job.source]) + place.source;
            if (to_float8(job.cast))
                quantise_bytes(value, offset, bytes, job, chunk.sources, place.source);
            else if (job.cast == Cast::kFloatToBfloat)
                round_bytes(value, offset, bytes, from, static_cast<int>(position % 2));
            else
                load_bytes(value, offset, bytes, from);
        }
        if (kWire != Wire::kDestination)
            store_bytes(value, offset, bytes,
                        reinterpret_cast<std::byte*>(chunk.destinations[job.destination]) + place.destination);
        at += bytes;
    }
    if (kWire == Wire::kDestination) store_bytes(value, 0, static_cast<int>(end - begin), chunk.message + begin);
    return kWire == Wire::kNone ? 0 : terms_of_unit(value, unit, end - begin);
}

// One thread's units of a tile. Returns the digest's terms of their words; 0 where there is no message.
template <Wire kWire>
ASYNCMOE_BOTH inline uint64_t copy_tile(const ChunkView& chunk, int64_t tile, int thread) {
    const int first = chunk.tile_jobs[tile], last = chunk.tile_jobs[tile + 1];
    const int64_t begin = tile * kTileUnits + thread;
    Unit values[kUnitsPerThread] = {};
    std::byte* to[kUnitsPerThread];
    unsigned uneven = 0;
    uint64_t sum = 0;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int j = 0; j < kUnitsPerThread; ++j) {  // all loads are issued before the first is waited for
        const int64_t unit = begin + int64_t{j} * kThreads;
        to[j] = nullptr;
        if (unit * kUnit >= chunk.bytes) continue;
        const Straight found = straight<kWire>(chunk, unit, first, last);
        to[j] = found.destination;
        if (!found.destination)
            uneven |= 1u << j;
        else
            values[j] = load_straight(found);
    }
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int j = 0; j < kUnitsPerThread; ++j) {
        if (!to[j]) continue;
        if (kWire != Wire::kNone) sum += terms_of_unit(values[j], begin + int64_t{j} * kThreads, kUnit);
        store_unit(to[j], values[j]);
    }
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
    for (int j = 0; j < kUnitsPerThread; ++j)
        if (uneven >> j & 1u) sum += copy_in_pieces<kWire>(chunk, begin + int64_t{j} * kThreads, first, last);
    return sum;
}

}  // namespace asyncmoe
