// The vocabulary ids from which each token was sampled, as compressed sparse rows.
//
// Format: one byte for the encoding of the ids; for each row, its number of ids in base 128; then the ids of all rows,
//   kPacked: ceil(log2(vocabulary)) bits each, little-endian, or
//   kGaps: in base 128; for each row, its first id, then the number of ids skipped before each further id.
// Base 128 is LEB128: seven bits per byte, lowest bits first, the high bit set in all but the last byte.
#pragma once

#include <cstdint>
#include <vector>

namespace asyncmoe::trajectory {

struct Masks {
    std::vector<int32_t> offsets;  // rows + 1
    std::vector<int32_t> ids;      // ascending within a row
};

// Throws std::invalid_argument, naming the row, if ids of a row do not ascend or are outside 0 .. vocabulary - 1.
std::vector<uint8_t> encode_masks(const int32_t* offsets, int64_t rows, const int32_t* ids, int64_t vocabulary);

// Throws std::invalid_argument if the bytes do not encode `rows` rows with `count` ids in all. Allocates at most a
// fixed multiple of `size`.
Masks decode_masks(const uint8_t* bytes, int64_t size, int64_t rows, int64_t count, int64_t vocabulary);

}  // namespace asyncmoe::trajectory
