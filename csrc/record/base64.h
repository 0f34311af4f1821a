// Base64 (RFC 4648, section 4) to bytes.
#pragma once

#include <cstdint>

namespace asyncmoe::record {

// Bytes that `size` characters stand for, or -1 when those are no whole groups of four.
int64_t base64_bytes(const char* text, int64_t size);

// Decodes `size` characters into base64_bytes of them. False when one is none of the alphabet's, padding is elsewhere
// than at the end, or bits behind the last byte are set.
bool decode_base64(const char* text, int64_t size, uint8_t* bytes);

}  // namespace asyncmoe::record
