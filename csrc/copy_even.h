// Even tiles: each unit is one aligned access on both sides, and its addresses follow from the first unit's by a
// multiplication. Nearly all bytes of a model's weights are in even tiles. Like copy_unit.h, this also runs on the
// host.
#pragma once

#include "copy_job.h"
#include "program.h"
#include "unit.h"

namespace asyncmoe {

constexpr int kThreads = 256;
constexpr int kEvenUnitsPerThread = 8;
constexpr int64_t kEvenUnits = int64_t{kThreads} * kEvenUnitsPerThread;

// The addresses at which the first unit of an even tile is read and written.
struct Ends {
    const std::byte* source;
    std::byte* destination;

    ASYNCMOE_BOTH bool aligned() const {
        return (reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(destination)) % kUnit == 0;
    }
};

template <Wire kWire>
ASYNCMOE_BOTH inline Ends ends_of(const ChunkView& chunk, const Tile& tile, const Job& job) {
    const auto* source = chunk.message;
    auto* destination = chunk.message;
    if (kWire != Wire::kSource) source = reinterpret_cast<std::byte*>(chunk.sources[job.source]);
    if (kWire != Wire::kDestination) destination = reinterpret_cast<std::byte*>(chunk.destinations[job.destination]);
    return {source + tile.source, destination + tile.destination};
}

// Number of units a thread loads before it stores the first, limited by the registers.
ASYNCMOE_BOTH constexpr int batch_of(Cast cast) {
    return cast == Cast::kNone ? kEvenUnitsPerThread : cast == Cast::kFloatToBfloat ? 4 : 2;
}

// For quantising a tile: the scales, and the position of the tile's first element in its matrix.
struct Matrix {
    const std::byte* scales;
    int64_t row;
    uint32_t column;
};

template <Cast kCast>
ASYNCMOE_BOTH inline Matrix matrix_of(const ChunkView& chunk, const Tile& tile, const Job& job) {
    if (!to_float8(kCast)) return {nullptr, 0, 0};
    const int64_t element = tile.source / source_bytes(kCast), row = element / job.width;
    return {reinterpret_cast<const std::byte*>(chunk.sources[job.scales]), row,
            static_cast<uint32_t>(element - row * job.width)};
}

// The scale of the element that lies `elements` after a tile's first element.
ASYNCMOE_BOTH inline float scale_behind(const Job& job, const Matrix& matrix, uint32_t elements) {
    const uint32_t at = matrix.column + elements, down = divide(at, job.width_divider, job.width);
    const uint32_t column = at - down * static_cast<uint32_t>(job.width);
    const int64_t number = (matrix.row + down) / kBlockSize * job.columns + column / uint32_t{kBlockSize};
    return float_of(load_as<uint32_t>(matrix.scales + 4 * number));
}

template <Cast kCast>
ASYNCMOE_BOTH inline Unit load_even(const std::byte* from, float scale) {
    if (kCast == Cast::kNone) return load_unit(from);
    if (kCast == Cast::kFloatToBfloat) return load_unit_rounded(from);
    return load_unit_quantised(from, kCast, scale);
}

// Number of complete runs before a unit that is `unit` units after the beginning of a tile's first run.
ASYNCMOE_BOTH inline uint32_t runs_before(uint32_t unit, const Rows& rows) {
#ifdef __CUDA_ARCH__
    return __umulhi(unit, rows.multiplier);
#else
    return static_cast<uint32_t>(uint64_t{unit} * rows.multiplier >> 32);
#endif
}

// The position of one thread in an even tile. The thread's units are kThreads apart.
template <Wire kWire, Cast kCast>
struct Walk {
    static constexpr int64_t kRatio = source_bytes(kCast) / destination_bytes(kCast);
    static constexpr int64_t kStep = kThreads * kUnit;
    static constexpr uint64_t kTermStep = 2 * kThreads * kGolden;

    Ends ends;          // addresses of the unit, as if the tile were one run
    uint32_t unit;      // units since the beginning of the tile's first run
    uint32_t elements;  // elements since the beginning of the tile, as if it were one run
    uint64_t term;      // added to the unit's first word before it is mixed

    // Copies the next kCount units and advances past them. Returns their terms of the digest.
    template <int kCount>
    ASYNCMOE_BOTH uint64_t copy(const Job& job, const Rows& rows, const Matrix& matrix) {
        Unit values[kCount];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
        for (int j = 0; j < kCount; ++j) {  // issues all loads before it waits for the first
            const uint32_t runs = runs_before(unit + static_cast<uint32_t>(j) * kThreads, rows);
            const uint64_t skipped = kWire == Wire::kSource ? 0 : uint64_t{runs} * rows.source_gap;
            float scale = 1.0f;
            if (to_float8(kCast)) {
                const auto gap = static_cast<uint32_t>(skipped) / uint32_t{source_bytes(kCast)};
                scale = scale_behind(job, matrix, gap + elements + static_cast<uint32_t>(j) * uint32_t{kStep});
            }
            values[j] = load_even<kCast>(ends.source + skipped + j * kStep * kRatio, scale);
        }
        uint64_t sum = 0;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
        for (int j = 0; j < kCount; ++j) {
            const uint32_t runs = runs_before(unit + static_cast<uint32_t>(j) * kThreads, rows);
            const uint64_t over = kWire == Wire::kDestination ? 0 : uint64_t{runs} * rows.destination_gap;
            store_unit(ends.destination + over + j * kStep, values[j]);
            if (kWire == Wire::kNone) continue;
            const uint64_t low = term + static_cast<uint64_t>(j) * kTermStep, high = low + kGolden;
            sum += mix(values[j].low + low) + mix(values[j].high + high);
        }
        ends.source += kCount * kStep * kRatio;
        ends.destination += kCount * kStep;
        unit += kCount * kThreads;
        elements += kCount * static_cast<uint32_t>(kStep);
        term += kCount * kTermStep;
        return sum;
    }
};

// Copies one thread's units of an even tile with aligned ends. Returns their terms of the digest, or 0 if there is no
// message.
template <Wire kWire, Cast kCast>
ASYNCMOE_BOTH inline uint64_t copy_even(const ChunkView& chunk, const Tile& tile, const Job& job, const Ends& ends,
                                        int thread) {
    using Way = Walk<kWire, kCast>;
    constexpr int kBatch = batch_of(kCast);
    const Rows rows = job.rows;
    const Matrix matrix = matrix_of<kCast>(chunk, tile, job);
    Way way{{ends.source + thread * kUnit * Way::kRatio, ends.destination + thread * kUnit},
            static_cast<uint32_t>(tile.column + thread),
            static_cast<uint32_t>(thread * kUnit),
            (2 * static_cast<uint64_t>(tile.unit + thread) + 1) * kGolden};
    int left = (tile.units - thread + kThreads - 1) / kThreads;
    uint64_t sum = 0;
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
    for (; left >= kBatch; left -= kBatch) sum += way.template copy<kBatch>(job, rows, matrix);
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
    for (; left > 0; --left) sum += way.template copy<1>(job, rows, matrix);
    return sum;
}

template <Wire kWire>
ASYNCMOE_BOTH inline uint64_t copy_even_cast(const ChunkView& chunk, const Tile& tile, const Job& job, const Ends& ends,
                                             int thread) {
    if (kWire == Wire::kSource || job.cast == Cast::kNone)
        return copy_even<kWire, Cast::kNone>(chunk, tile, job, ends, thread);
    if (job.cast == Cast::kFloatToBfloat) return copy_even<kWire, Cast::kFloatToBfloat>(chunk, tile, job, ends, thread);
    if (job.cast == Cast::kFloatToFloat8) return copy_even<kWire, Cast::kFloatToFloat8>(chunk, tile, job, ends, thread);
    return copy_even<kWire, Cast::kBfloatToFloat8>(chunk, tile, job, ends, thread);
}

}  // namespace asyncmoe
