// Units of 16 bytes that one thread reads, writes, rounds, quantises and digests.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>

#include "cast.h"
#include "digest.h"

namespace asyncmoe {

constexpr int64_t kUnit = 16;  // bytes: the widest access

struct alignas(kUnit) Unit {
    uint64_t low;
    uint64_t high;
};

inline void check_aligned(const std::byte* address, size_t bytes) {
    const auto number = reinterpret_cast<uintptr_t>(address);
    if (number % bytes)
        throw std::logic_error("address of an access: got " + std::to_string(number) + ", expected a multiple of " +
                               std::to_string(bytes));
}

// Aligned accesses, as a GPU requires them. The host throws std::logic_error if an access is not aligned.
template <typename T>
ASYNCMOE_BOTH inline T load_as(const std::byte* from) {
#ifdef __CUDA_ARCH__
    return *reinterpret_cast<const T*>(from);
#else
    check_aligned(from, sizeof(T));
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
    check_aligned(to, sizeof(T));
    std::memcpy(to, &value, sizeof value);
#endif
}

// One access of 16 bytes each: for a struct the compiler would emit two accesses of 8 bytes.
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

// `width` is 1, 2, 4 or 8 and divides the address.
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

// The widest aligned access at an address for the part of a unit that begins at `offset` and has `bytes` left.
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

// Loads bytes offset <= i < offset + bytes of a unit, which must be 0 before, from memory of any alignment.
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

// As load_bytes, but rounds float32 to bfloat16. `half` is 1 if the first byte is the second of its element, else 0.
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

// Quantises two float32 to float8.
ASYNCMOE_BOTH inline uint64_t two_float8(uint64_t floats, float scale) {
    return quantised(float_of(static_cast<uint32_t>(floats)), scale) |
           quantised(float_of(static_cast<uint32_t>(floats >> 32)), scale) << 8;
}

// Quantises four bfloat16 to float8.
ASYNCMOE_BOTH inline uint64_t four_float8(uint64_t bfloats, float scale) {
    uint64_t made = 0;
    for (int i = 0; i < 4; ++i) {
        const auto bits = static_cast<uint32_t>(bfloats >> 16 * i) << 16;
        made |= uint64_t{quantised(float_of(bits), scale)} << 8 * i;
    }
    return made;
}

// Loads and quantises 16 elements of one block.
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

// The terms of the digest for a unit's words; only the first `bytes` bytes exist, the others are 0.
ASYNCMOE_BOTH inline uint64_t terms_of_unit(const Unit& unit, int64_t number, int64_t bytes) {
    return term_of(unit.low, 2 * number) + (bytes > 8 ? term_of(unit.high, 2 * number + 1) : 0);
}

}  // namespace asyncmoe
