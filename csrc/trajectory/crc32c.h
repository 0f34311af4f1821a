// CRC-32C (Castagnoli; RFC 3720, appendix B.4), by the processor's CRC instruction if it has one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace asyncmoe::trajectory {

// Extends `crc`, the CRC of the preceding data (0 if there is none), by `size` bytes.
uint32_t crc32c(const uint8_t* bytes, size_t size, uint32_t crc);

// The same result by tables alone, for a processor without the instruction.
uint32_t crc32c_by_table(const uint8_t* bytes, size_t size, uint32_t crc);

}  // namespace asyncmoe::trajectory
