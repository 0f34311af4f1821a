// CRC-32C (Castagnoli; RFC 3720, appendix B.4): by the processor's own instruction where it has one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace asyncmoe::record {

// The CRC of what `crc` is of, followed by `size` bytes; of nothing it is 0.
uint32_t crc32c(const uint8_t* bytes, size_t size, uint32_t crc);

// The same by tables alone: what a processor without the instruction runs.
uint32_t crc32c_by_table(const uint8_t* bytes, size_t size, uint32_t crc);

}  // namespace asyncmoe::record
