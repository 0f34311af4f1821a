#include "element_digest.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu.h"
#include "threads.h"

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

// The sum of the terms of elements begin <= i < end of a box.
uint64_t sum_of_part(const int64_t* box, uint64_t seed, int64_t begin, int64_t end) {
    const auto* data = reinterpret_cast<const std::byte*>(box[kElements]);
    const int64_t item = box[kElementItem], width = box[kElementCount];
    uint64_t sum = 0;
    while (begin < end) {
        const int64_t row = begin / width, column = begin % width, count = std::min(width - column, end - begin);
        const int64_t index = box[kElementIndex] + row * box[kElementStep] + column;
        sum += sum_of_elements(data + begin * item, item, count, seed, index);
        begin += count;
    }
    return sum;
}

void check_box(const int64_t* box, int64_t number, int64_t places) {
    const int64_t item = box[kElementItem], place = box[kElementPlace];
    const bool sized = item == 1 || item == 2 || item == 4 || item == 8;
    if (sized && box[kElementRows] >= 0 && box[kElementCount] >= 0 && place >= 0 && place < places) return;
    throw std::invalid_argument("box " + std::to_string(number) + " of elements: got " +
                                std::to_string(box[kElementRows]) + " x " + std::to_string(box[kElementCount]) +
                                " elements of " + std::to_string(item) + " bytes for place " + std::to_string(place) +
                                ", expected elements of 1, 2, 4 or 8 bytes for a place below " +
                                std::to_string(places));
}

}  // namespace

std::vector<uint64_t> sums_of_elements(const int64_t* boxes, int64_t count, const std::vector<int64_t>& seeds,
                                       int threads) {
    constexpr int64_t kTask = int64_t{1} << 18;  // elements
    std::vector<int64_t> ends(static_cast<size_t>(count));
    int64_t total = 0, bytes = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t* box = boxes + i * kElementColumns;
        check_box(box, i, static_cast<int64_t>(seeds.size()));
        const int64_t elements = box[kElementRows] * box[kElementCount];
        bytes += elements * box[kElementItem];
        ends[static_cast<size_t>(i)] = total += elements;
    }
    std::vector<std::atomic<uint64_t>> sums(seeds.size());
    run_on_threads(threads_for(threads, bytes), (total + kTask - 1) / kTask, [&](int64_t task) {
        int64_t at = task * kTask;
        const int64_t last = std::min(total, at + kTask);
        auto end = std::upper_bound(ends.begin(), ends.end(), at);
        for (; at < last; at = std::min(last, *end++)) {
            const int64_t* box = boxes + (end - ends.begin()) * kElementColumns;
            const int64_t first = *end - box[kElementRows] * box[kElementCount];
            const auto place = static_cast<size_t>(box[kElementPlace]);
            sums[place] +=
                sum_of_part(box, static_cast<uint64_t>(seeds[place]), at - first, std::min(last, *end) - first);
        }
    });
    return {sums.begin(), sums.end()};
}

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
