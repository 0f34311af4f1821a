// Base64 (RFC 4648, section 4) to bytes.
#pragma once

#include <cstdint>

namespace asyncmoe::trajectory {

// Number of bytes that `size` characters encode, or -1 if they are not whole groups of four.
int64_t base64_bytes(const char* text, int64_t size);

// Decodes `size` characters into base64_bytes(text, size) bytes. Returns false if a character is not in the alphabet,
// padding is not at the end, or bits after the last byte are set.
bool decode_base64(const char* text, int64_t size, uint8_t* bytes);

}  // namespace asyncmoe::trajectory
