// Packs eight values of `bits` (1 to 16) bits each into `bits` bytes: value i starts at bit i * bits of the
// little-endian stream.
//
// Four values at a time are widened and squeezed inside a 64-bit word with plain integer instructions: one core is
// already several times faster than memory.
#pragma once

#include <cstdint>
#include <cstring>

namespace asyncmoe::trajectory {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "streams are little-endian words in memory");

constexpr int kGroup = 8;
constexpr int kMaxBits = 16;

inline uint64_t low_bits(int bits) { return bits >= 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1; }

// Four values in lanes of 16 bits -> four adjacent values.
inline uint64_t squeeze(uint64_t lanes, int bits) {
    const uint64_t pairs = (lanes & 0x0000ffff0000ffffu) | (lanes & 0xffff0000ffff0000u) >> (16 - bits);
    return (pairs & 0xffffffffu) | (pairs >> 32) << 2 * bits;
}

// The inverse of squeeze.
inline uint64_t spread(uint64_t packed, int bits) {
    const uint64_t pairs = (packed & low_bits(2 * bits)) | (packed >> 2 * bits) << 32;
    const uint64_t even = low_bits(bits) * 0x0000000100000001u;
    return (pairs & even) | (pairs & even << bits) << (16 - bits);
}

// Writes the group's `bits` bytes and, if `left` permits, overwrites bytes after them, up to 16 in all. `left` is the
// number of bytes from `to` that may be overwritten.
inline void pack_group(const uint16_t* values, int bits, uint8_t* to, int64_t left) {
    uint64_t lanes[2];
    std::memcpy(lanes, values, sizeof lanes);
    const uint64_t first = squeeze(lanes[0], bits), second = squeeze(lanes[1], bits);
    const int half = 4 * bits;
    const uint64_t words[2] = {half == 64 ? first : first | second << half, second >> (half == 64 ? 0 : 64 - half)};
    if (bits <= 8 && left >= 8)
        std::memcpy(to, words, 8);
    else if (left >= 16)
        std::memcpy(to, words, 16);
    else
        std::memcpy(to, words, left < bits ? left : bits);
}

// The inverse of pack_group. Reads at most `left` bytes; missing bytes count as zero.
inline void unpack_group(const uint8_t* from, int64_t left, int bits, uint64_t lanes[2]) {
    uint64_t words[2] = {0, 0};
    if (bits <= 8 && left >= 8)
        std::memcpy(words, from, 8);
    else
        std::memcpy(words, from, left < bits ? left : bits);
    const int half = 4 * bits;
    const uint64_t second = half == 64 ? words[1] : words[0] >> half | words[1] << (64 - half);
    lanes[0] = spread(words[0] & low_bits(half), bits);
    lanes[1] = spread(second & low_bits(half), bits);
}

}  // namespace asyncmoe::trajectory
