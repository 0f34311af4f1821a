// The bytes of a delta: which elements of a block changed, as compact gaps between their positions. Host and GPU share
// this file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "digest.h"
#include "unit.h"

namespace asyncmoe {

// Maximum bytes of the blocks in which elements are compared and encoded: block and positions fit in a core's cache.
constexpr int64_t kDeltaBlock = int64_t{1} << 17;

// A payload begins with an entry for each block. The bodies of the blocks follow: the gaps, then the values of the
// changed elements; or, if kDense, all elements, with 0 bytes of gaps.
struct DeltaEntry {
    uint32_t changed;  // elements, or kDense
    uint32_t gaps;     // bytes
};
constexpr int64_t kEntry = sizeof(DeltaEntry);
constexpr uint32_t kDense = 0xffffffffu;

// A gap is the number of unchanged elements before a changed one, counted from the previous changed one. Bytes:
//   gap                                       below kOneByte
//   kOneByte + h, l                           gap = kOneByte + 256 h + l, for h below kLong - kOneByte
//   kLong, and 3 bytes, little-endian         any larger gap
// With one element in a hundred changed at random, a gap takes 1.1 bytes on average; at 0.3 %, 1.5.
constexpr uint32_t kOneByte = 224, kLong = 255, kTwoBytes = kOneByte + 256 * (kLong - kOneByte);

// Elements of 1, 2, 4 or 8 bytes at any address.
ASYNCMOE_BOTH inline uint64_t load_element(const std::byte* from, int64_t item) {
    Unit unit{0, 0};
    load_bytes(unit, 0, static_cast<int>(item), from);
    return unit.low;
}

ASYNCMOE_BOTH inline void store_element(std::byte* to, int64_t item, uint64_t bits) {
    store_bytes(Unit{bits, 0}, 0, static_cast<int>(item), to);
}

ASYNCMOE_BOTH inline DeltaEntry entry_of(const std::byte* payload, int64_t block) {
    const uint64_t words = load_element(payload + kEntry * block, kEntry);
    return {static_cast<uint32_t>(words), static_cast<uint32_t>(words >> 32)};
}

ASYNCMOE_BOTH inline void put_entry(std::byte* payload, int64_t block, DeltaEntry entry) {
    store_element(payload + kEntry * block, kEntry, uint64_t{entry.gaps} << 32 | entry.changed);
}

ASYNCMOE_BOTH inline uint32_t gap_bytes(uint32_t gap) { return gap < kOneByte ? 1 : gap < kTwoBytes ? 2 : 4; }

ASYNCMOE_BOTH inline std::byte* put_gap(std::byte* to, uint32_t gap) {
    if (gap < kOneByte) {
        *to++ = static_cast<std::byte>(gap);
    } else if (gap < kTwoBytes) {
        *to++ = static_cast<std::byte>(kOneByte + ((gap - kOneByte) >> 8));
        *to++ = static_cast<std::byte>(gap - kOneByte);
    } else {
        *to++ = static_cast<std::byte>(kLong);
        for (int shift = 0; shift < 24; shift += 8) *to++ = static_cast<std::byte>(gap >> shift);
    }
    return to;
}

// Decodes the gap at byte `at`, and advances `at` past it and `next`, the lowest position still possible, to the
// changed element. Returns false for a gap that is cut off or longer than necessary, or a position that is not below
// `elements`.
ASYNCMOE_BOTH inline bool take_gap(const std::byte* gaps, int64_t nbytes, int64_t elements, int64_t& at,
                                   int64_t& next) {
    if (at >= nbytes) return false;
    auto gap = static_cast<uint32_t>(gaps[at]);
    if (gap < kOneByte) {
        at += 1;
    } else if (gap < kLong) {
        if (at + 2 > nbytes) return false;
        gap = kOneByte + ((gap - kOneByte) << 8) + static_cast<uint32_t>(gaps[at + 1]);
        at += 2;
    } else {
        if (at + 4 > nbytes) return false;
        gap = 0;
        for (int k = 0; k < 3; ++k) gap |= static_cast<uint32_t>(gaps[at + 1 + k]) << 8 * k;
        if (gap < kTwoBytes) return false;
        at += 4;
    }
    next += gap;
    return next < elements;
}

// ---------------------------------------------------------------- in host memory (delta_code.cpp)

// Writes the ascending positions at which two arrays differ and returns their number. `item` is 1, 2, 4 or 8 bytes;
// `positions` has room for `count` + kSlack.
constexpr int64_t kSlack = 16;
int64_t differing(const std::byte* a, const std::byte* b, int64_t item, int64_t count, uint32_t* positions);

// Writes the gaps of ascending positions and returns their size in bytes, or -1 if that exceeds `room`. `out` has room
// for 4 more bytes.
int64_t write_gaps(const uint32_t* positions, int64_t count, std::byte* out, int64_t room);

// Reads `count` positions. Returns false unless the gaps take exactly `nbytes` in their shortest form and every
// position is below `elements`.
bool read_gaps(const std::byte* gaps, int64_t nbytes, int64_t count, int64_t elements, uint32_t* positions);

}  // namespace asyncmoe
