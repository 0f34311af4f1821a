#include "element_digest.h"

#include <cstring>

#include "cpu.h"

namespace asyncmoe {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the digest reads elements as they lie in memory");

template <typename Bits>
__attribute__((always_inline)) inline uint64_t sum_of(const std::byte* data, int64_t count, uint64_t place) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
        Bits bits;
        std::memcpy(&bits, data + i * static_cast<int64_t>(sizeof bits), sizeof bits);
        sum += mix(place + static_cast<uint64_t>(i) * kGolden + bits);
    }
    return sum;
}

template <typename Bits>
uint64_t sum_anywhere(const std::byte* data, int64_t count, uint64_t place) {
    return sum_of<Bits>(data, count, place);
}

#if defined(__x86_64__)
template <typename Bits>
ASYNCMOE_AVX512 uint64_t sum_with_avx512(const std::byte* data, int64_t count, uint64_t place) {
    return sum_of<Bits>(data, count, place);
}
#endif

template <typename Bits>
uint64_t sum(const std::byte* data, int64_t count, uint64_t place) {
#if defined(__x86_64__)
    if (has_avx512()) return sum_with_avx512<Bits>(data, count, place);
#endif
    return sum_anywhere<Bits>(data, count, place);
}

}  // namespace

uint64_t sum_of_elements(const std::byte* data, int64_t item, int64_t count, uint64_t seed, int64_t index) {
    const uint64_t place = seed + static_cast<uint64_t>(index + 1) * kGolden;
    switch (item) {
        case 1:
            return sum<uint8_t>(data, count, place);
        case 2:
            return sum<uint16_t>(data, count, place);
        case 4:
            return sum<uint32_t>(data, count, place);
        default:
            return sum<uint64_t>(data, count, place);
    }
}

}  // namespace asyncmoe
