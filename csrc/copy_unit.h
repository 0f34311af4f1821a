// The work of one thread of the copy kernel, as functions that also run on the host, so that addressing, casts and
// digests can be tested without a GPU.
//
// A chunk is a sequence of bytes: its message or, without a message, the boxes it writes, one after another, each from
// a multiple of 16. It is cut into units of 16 bytes regardless of the boxes, and one thread copies each unit. So
// exactly one thread handles each word of the message, even if several boxes share the word. A thread block takes a
// tile of units at a time: an even tile (copy_even.h), or an uneven tile, whose units are located one by one here.
#pragma once

#include "copy_even.h"

namespace asyncmoe {

constexpr int64_t kUnevenUnits = 4 * kThreads;

// The scale of the block of an element `at` bytes from the base of its source.
ASYNCMOE_BOTH inline float scale_at(const Job& job, const int64_t* sources, int64_t at) {
    const int64_t element = at / source_bytes(job.cast), row = element / job.width, column = element - row * job.width;
    const auto* scales = reinterpret_cast<const std::byte*>(sources[job.scales]);
    const int64_t number = row / kBlockSize * job.columns + column / kBlockSize;
    return float_of(load_as<uint32_t>(scales + 4 * number));
}

// As load_bytes, but quantises elements that begin `at` bytes from the base of their source.
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

// A unit that is copied by one aligned access on each side; destination is null if that is impossible.
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
        // All 16 elements are in one block if the row width and the first element's index are multiples of 16.
        const int64_t element = place.source / source_bytes(job.cast);
        if (element % kUnit != 0 || job.width % kUnit != 0)
            found.destination = nullptr;
        else
            found.scale = scale_at(job, chunk.sources, place.source);
    }
    return found;
}

// Copies a unit whose bytes are gathered and scattered run by run. Returns its terms of the digest.
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
        if (position >= job.bytes) break;  // the gap between two boxes, if there is no message
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

// Copies any unit. Returns its terms of the digest.
template <Wire kWire>
ASYNCMOE_BOTH inline uint64_t copy_unit(const ChunkView& chunk, int64_t unit, int first, int last) {
    const Straight found = straight<kWire>(chunk, unit, first, last);
    if (!found.destination) return copy_in_pieces<kWire>(chunk, unit, first, last);
    const Unit value = load_straight(found);
    store_unit(found.destination, value);
    return kWire == Wire::kNone ? 0 : terms_of_unit(value, unit, kUnit);
}

// Whether a tile is copied as an even tile, which also requires aligned bases.
template <Wire kWire>
ASYNCMOE_BOTH inline bool goes_evenly(const ChunkView& chunk, const Tile& tile) {
    return tile.column != kUneven && ends_of<kWire>(chunk, tile, chunk.jobs[tile.job]).aligned();
}

// Copies one thread's units of a tile. Returns their terms of the digest, or 0 if there is no message.
template <Wire kWire>
ASYNCMOE_BOTH inline uint64_t copy_tile(const ChunkView& chunk, const Tile& tile, int thread) {
    if (goes_evenly<kWire>(chunk, tile)) {
        const Job& job = chunk.jobs[tile.job];
        return copy_even_cast<kWire>(chunk, tile, job, ends_of<kWire>(chunk, tile, job), thread);
    }
    uint64_t sum = 0;
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
    for (int i = thread; i < tile.units; i += kThreads)
        sum += copy_unit<kWire>(chunk, tile.unit + i, tile.job, tile.last);
    return sum;
}

}  // namespace asyncmoe
