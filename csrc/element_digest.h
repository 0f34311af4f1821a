// The canonical digest of a shard: a sum over its elements that depends neither on how the tensors are cut and placed
// nor on the order of the terms, so that a change of an element changes the digest by the difference of two terms.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "digest.h"

namespace asyncmoe {

// The term of element `index` (row-major, in the whole tensor) with the stored bits `bits`:
//   mix(seed + (index + 1) * 0x9e3779b97f4a7c15 + bits) modulo 2^64,
// where mix is splitmix64's finalizer (digest.h) and `seed` belongs to the tensor. Multiples of the golden ratio keep
// their distance: no two pairs (index, bits) of a tensor of fewer than 2^46 elements of up to 16 bits, or of 2^30
// elements of 32 bits, have the same argument, and mix is a bijection.
ASYNCMOE_BOTH __attribute__((always_inline)) inline uint64_t element_term(uint64_t seed, int64_t index, uint64_t bits) {
    return term_of(seed + bits, index);
}

// The bits of an element of `item` bytes: 1, 2, 4 or 8.
inline uint64_t element_bits(const std::byte* data, int64_t item) {
    switch (item) {
        case 1:
            return static_cast<uint8_t>(*data);
        case 2: {
            uint16_t bits;
            __builtin_memcpy(&bits, data, 2);
            return bits;
        }
        case 4: {
            uint32_t bits;
            __builtin_memcpy(&bits, data, 4);
            return bits;
        }
        default: {
            uint64_t bits;
            __builtin_memcpy(&bits, data, 8);
            return bits;
        }
    }
}

// The sum of the terms of `count` elements that follow each other both in memory and in the tensor; the first one is
// element `index`.
uint64_t sum_of_elements(const std::byte* data, int64_t item, int64_t count, uint64_t seed, int64_t index);

// Columns of a box of elements, all int64. Its rows follow each other in memory, but not in the tensor.
enum ElementColumn : int {
    kElements,      // address
    kElementItem,   // bytes of an element: 1, 2, 4 or 8
    kElementRows,   // number of rows
    kElementCount,  // elements of a row
    kElementIndex,  // index of the first element in the tensor
    kElementStep,   // index of a row's first element less that of the row before
    kElementPlace,  // number of the sum, and of the seed, that the elements belong to
    kElementColumns,
};

// The sum of the terms of all boxes of each place, on up to `threads` threads (0: as many as the machine has, at most
// 4). Throws std::invalid_argument for a negative number of elements, an item size that is not a power of two up to 8,
// or a place that does not exist.
std::vector<uint64_t> sums_of_elements(const int64_t* boxes, int64_t count, const std::vector<int64_t>& seeds,
                                       int threads);

}  // namespace asyncmoe
