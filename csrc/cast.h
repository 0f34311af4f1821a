// Casts of single elements during a copy, with identical bits on the host and on a GPU.
#pragma once

#include <cstdint>
#include <cstring>

#include "digest.h"

namespace asyncmoe {

// No cast; float32 to bfloat16; or float32 or bfloat16, divided by the scale of its block, to float8 (e4m3fn). Rounds
// to the nearest, ties to even.
enum class Cast : int { kNone, kFloatToBfloat, kFloatToFloat8, kBfloatToFloat8 };
constexpr int kCasts = 4;

// Rows and columns that share a scale.
constexpr int64_t kBlockSize = 128;
// The largest float8: a block's scale is its largest magnitude divided by this.
constexpr float kFloat8Max = 448.0f;
// Lower bound of a block's largest magnitude, as in SGLang (quantization/mxfp8_block_convert.py).
constexpr float kLeastMagnitude = 1e-4f;

// Scales of the blocks of a row-major matrix that begins at `origin`: block (i, j) has scales[i * columns + j].
struct Blocks {
    const std::byte* origin;
    const float* scales;
    int64_t width;    // elements in a row
    int64_t columns;  // blocks in a row
};

ASYNCMOE_BOTH constexpr bool to_float8(Cast cast) { return cast >= Cast::kFloatToFloat8; }

ASYNCMOE_BOTH constexpr int64_t source_bytes(Cast cast) {
    return cast == Cast::kNone ? 1 : cast == Cast::kBfloatToFloat8 ? 2 : 4;
}

ASYNCMOE_BOTH constexpr int64_t destination_bytes(Cast cast) { return cast == Cast::kFloatToBfloat ? 2 : 1; }

ASYNCMOE_BOTH inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

ASYNCMOE_BOTH inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Loads a T. On a GPU the address must be a multiple of T's size; on the host any address will do.
template <typename T>
ASYNCMOE_BOTH inline T load_bits(const std::byte* from) {
#ifdef __CUDA_ARCH__
    return *reinterpret_cast<const T*>(from);
#else
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
#endif
}

// Both kinds of rounding are branch-free, so that loops over them can be vectorised.

// float32 to bfloat16 as bits; a NaN stays a NaN and keeps its sign.
ASYNCMOE_BOTH inline uint32_t bfloat_of(uint32_t bits) {
    const uint32_t nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const uint32_t nan = bits >> 16 | 0x40u;
    return (bits & 0x7fffffffu) > 0x7f800000u ? nan : nearest;
}

// float32 to float8 e4m3fn as bits (OCP 8-bit floating point, 2023: bias 7, no infinities, 0x7f and 0xff are NaN).
// Magnitudes above 448, including infinity, become 448, as in torch; a NaN stays a NaN.
ASYNCMOE_BOTH inline uint32_t float8_of(uint32_t bits) {
    constexpr uint32_t kLeastNormal = 121u << 23;  // 2^-6
    constexpr uint32_t kLargest = 0x43e00000u;     // 448
    constexpr float kStep = 16384.0f;              // its last bit is worth 2^-9, the smallest float8
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u) - (120u << 23)) >> 20;
    const uint32_t small = bits_of(float_of(magnitude < kLeastNormal ? magnitude : 0u) + kStep) - bits_of(kStep);
    const uint32_t finite = magnitude < kLeastNormal ? small : normal;
    const uint32_t number = magnitude > kLargest ? 0x7eu : finite;
    return (magnitude > 0x7f800000u ? 0x7fu : number) | (bits >> 24 & 0x80u);
}

ASYNCMOE_BOTH inline uint32_t quantised(float value, float scale) { return float8_of(bits_of(value / scale)); }

// The scale of a block from the bits of its largest magnitude; a NaN stays a NaN. `power_of_two` rounds the scale up to
// a power of two, as in the format UE8M0.
ASYNCMOE_BOTH inline float scale_of(uint32_t magnitude, bool power_of_two) {
    const uint32_t least = bits_of(kLeastMagnitude);
    const float scale = float_of(magnitude > least ? magnitude : least) / kFloat8Max;
    if (!power_of_two || magnitude > 0x7f800000u) return scale;
    const uint32_t bits = bits_of(scale);
    const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1u : 0u);
    return float_of(exponent << 23);
}

}  // namespace asyncmoe
