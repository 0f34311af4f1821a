#include "base64.h"

#include <array>
#include <cstring>

namespace asyncmoe::trajectory {

namespace {

constexpr uint32_t kNone = 0xff000000u;  // above the 24 bits of a group

// The six bits of every character, at their position in a group, whose first byte is the lowest byte of a little-endian
// word.
struct Tables {
    std::array<std::array<uint32_t, 256>, 4> at{};

    constexpr Tables() {
        for (auto& table : at)
            for (auto& entry : table) entry = kNone;
        const char* alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        for (uint32_t value = 0; value < 64; ++value)
            for (int place = 0; place < 4; ++place) {
                const uint32_t big = value << (18 - 6 * place);
                at[place][static_cast<uint8_t>(alphabet[value])] = big >> 16 | (big & 0xff00u) | (big & 0xffu) << 16;
            }
    }
};

constexpr Tables kTables;

uint32_t group(const char* text) {
    const auto at = [&](int place) { return kTables.at[place][static_cast<uint8_t>(text[place])]; };
    return at(0) | at(1) | at(2) | at(3);
}

int64_t padding(const char* text, int64_t size) {
    return size == 0 || text[size - 1] != '=' ? 0 : text[size - 2] != '=' ? 1 : 2;
}

}  // namespace

int64_t base64_bytes(const char* text, int64_t size) { return size % 4 ? -1 : size / 4 * 3 - padding(text, size); }

bool decode_base64(const char* text, int64_t size, uint8_t* bytes) {
    const int64_t padded = padding(text, size), whole = padded ? size - 4 : size;
    uint32_t wrong = 0;
    int64_t i = 0;
    // The fourth byte written belongs to the next group, which overwrites it.
    for (; i + 4 < whole; i += 4, bytes += 3) {
        const uint32_t word = group(text + i);
        wrong |= word;
        std::memcpy(bytes, &word, 4);
    }
    for (; i < whole; i += 4, bytes += 3) {
        const uint32_t word = group(text + i);
        wrong |= word;
        std::memcpy(bytes, &word, 3);
    }
    if (padded) {
        const char last[4] = {text[i], text[i + 1], padded == 2 ? 'A' : text[i + 2], 'A'};
        const uint32_t word = group(last);
        wrong |= word | (word >> 8 * (3 - padded) ? kNone : 0);
        std::memcpy(bytes, &word, static_cast<size_t>(3 - padded));
    }
    return (wrong & kNone) == 0;
}

}  // namespace asyncmoe::trajectory
