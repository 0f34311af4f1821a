// The vocabulary ids a token was sampled from, row by row, as compressed sparse rows.
//
// Bytes: one that says how ids are written; for every row the number of its ids, in base 128; then the ids of all rows,
//   kPacked: ceil(log2(vocabulary)) bits each, little-endian, or
//   kGaps: in base 128, of each row the first id, then how many ids were left out before the next.
// Base 128 is LEB128: seven bits a byte from the lowest on, the highest bit set in all but the last byte.
#pragma once

#include <cstdint>
#include <vector>

namespace asyncmoe::record {

struct Masks {
    std::vector<int32_t> offsets;  // rows + 1
    std::vector<int32_t> ids;      // ascending within a row
};

// Throws std::invalid_argument, naming the row, when ids of a row do not ascend or are not of 0 .. vocabulary - 1.
std::vector<uint8_t> encode_masks(const int32_t* offsets, int64_t rows, const int32_t* ids, int64_t vocabulary);

// Throws std::invalid_argument when the bytes are not what encode_masks makes of `rows` rows of `count` ids in all. No
// more than a fixed multiple of `size` is allocated before they are known to be.
Masks decode_masks(const uint8_t* bytes, int64_t size, int64_t rows, int64_t count, int64_t vocabulary);

}  // namespace asyncmoe::record
