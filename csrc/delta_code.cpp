#include <algorithm>
#include <cstring>

#include "cpu.h"
#include "delta_format.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace asyncmoe {
namespace {

template <typename Bits>
int64_t differing_from(const std::byte* a, const std::byte* b, int64_t first, int64_t count, uint32_t* positions) {
    constexpr auto kSize = static_cast<int64_t>(sizeof(Bits));
    constexpr int64_t kPerWord = 8 / kSize;
    const auto equal = [&](int64_t i, size_t bytes) { return std::memcmp(a + i * kSize, b + i * kSize, bytes) == 0; };
    int64_t found = 0, i = first;
    while (i < count) {
        if (i + kPerWord <= count && equal(i, 8)) {
            i += kPerWord;
            continue;
        }
        for (const int64_t end = std::min(count, i + kPerWord); i < end; ++i)
            if (!equal(i, sizeof(Bits))) positions[found++] = static_cast<uint32_t>(i);
    }
    return found;
}

template <typename Bits>
int64_t differing_anywhere(const std::byte* a, const std::byte* b, int64_t count, uint32_t* positions) {
    return differing_from<Bits>(a, b, 0, count, positions);
}

#if defined(__x86_64__)
// One bit for each of a line's elements.
template <typename Bits>
ASYNCMOE_AVX512 inline uint64_t differences(const std::byte* a, const std::byte* b) {
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    switch (sizeof(Bits)) {
        case 1:
            return _mm512_cmpneq_epi8_mask(x, y);
        case 2:
            return _mm512_cmpneq_epi16_mask(x, y);
        case 4:
            return _mm512_cmpneq_epi32_mask(x, y);
        default:
            return _mm512_cmpneq_epi64_mask(x, y);
    }
}

// Positions are written 16 at a time without a branch for each: at a density of one in a hundred, branches would cost
// more than the comparison.
template <typename Bits>
ASYNCMOE_AVX512 int64_t differing_with_avx512(const std::byte* a, const std::byte* b, int64_t count,
                                              uint32_t* positions) {
    constexpr auto kSize = static_cast<int64_t>(sizeof(Bits));
    constexpr int64_t kPerLine = 64 / kSize, kLanes = 16, kAhead = 2048;
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int64_t found = 0, i = 0;
    for (; i + kPerLine <= count; i += kPerLine) {
        const std::byte *x = a + i * kSize, *y = b + i * kSize;
        __builtin_prefetch(x + kAhead);
        __builtin_prefetch(y + kAhead);
        uint64_t bits = differences<Bits>(x, y);
        if (!bits) continue;
        for (int64_t k = 0; k < kPerLine; k += kLanes, bits >>= kLanes) {
            const auto mask = static_cast<__mmask16>(bits);
            const __m512i numbers = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(i + k)));
            _mm512_storeu_si512(positions + found, _mm512_maskz_compress_epi32(mask, numbers));
            found += __builtin_popcount(mask);
        }
    }
    return found + differing_from<Bits>(a, b, i, count, positions + found);
}
#endif

template <typename Bits>
int64_t differing_of(const std::byte* a, const std::byte* b, int64_t count, uint32_t* positions) {
#if defined(__x86_64__)
    if (has_avx512()) return differing_with_avx512<Bits>(a, b, count, positions);
#endif
    return differing_anywhere<Bits>(a, b, count, positions);
}

}  // namespace

int64_t differing(const std::byte* a, const std::byte* b, int64_t item, int64_t count, uint32_t* positions) {
    switch (item) {
        case 1:
            return differing_of<uint8_t>(a, b, count, positions);
        case 2:
            return differing_of<uint16_t>(a, b, count, positions);
        case 4:
            return differing_of<uint32_t>(a, b, count, positions);
        default:
            return differing_of<uint64_t>(a, b, count, positions);
    }
}

int64_t write_gaps(const uint32_t* positions, int64_t count, std::byte* out, int64_t room) {
    std::byte* to = out;
    uint32_t next = 0;
    for (int64_t i = 0; i < count; ++i) {
        to = put_gap(to, positions[i] - next);
        if (to - out > room) return -1;
        next = positions[i] + 1;
    }
    return to - out;
}

bool read_gaps(const std::byte* gaps, int64_t nbytes, int64_t count, int64_t elements, uint32_t* positions) {
    int64_t at = 0, next = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (!take_gap(gaps, nbytes, elements, at, next)) return false;
        positions[i] = static_cast<uint32_t>(next++);
    }
    return at == nbytes;
}

}  // namespace asyncmoe
