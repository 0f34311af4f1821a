#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace asyncmoe::trajectory {

namespace {

constexpr uint32_t kPolynomial = 0x82f63b78u;  // 0x1edc6f41, bits reversed

// at[k][b]: effect of byte b on the CRC if k zero bytes follow it.
struct Tables {
    std::array<std::array<uint32_t, 256>, 8> at{};

    constexpr Tables() {
        for (uint32_t byte = 0; byte < 256; ++byte) {
            uint32_t crc = byte;
            for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
            at[0][byte] = crc;
        }
        for (int zeros = 1; zeros < 8; ++zeros)
            for (int byte = 0; byte < 256; ++byte) {
                const uint32_t before = at[zeros - 1][byte];
                at[zeros][byte] = before >> 8 ^ at[0][before & 0xff];
            }
    }
};

constexpr Tables kTables;

uint64_t word_at(const uint8_t* bytes) {
    uint64_t word;
    std::memcpy(&word, bytes, sizeof word);
    return word;
}

#if defined(__x86_64__)

bool has_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }

__attribute__((target("sse4.2"))) uint32_t by_instruction(const uint8_t* bytes, size_t size, uint32_t crc) {
    uint64_t state = ~crc;
    for (; size >= 8; bytes += 8, size -= 8) state = _mm_crc32_u64(state, word_at(bytes));
    auto rest = static_cast<uint32_t>(state);
    for (; size; ++bytes, --size) rest = _mm_crc32_u8(rest, *bytes);
    return ~rest;
}

#elif defined(__aarch64__)

bool has_instruction() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }

__attribute__((target("+crc"))) uint32_t by_instruction(const uint8_t* bytes, size_t size, uint32_t crc) {
    uint32_t state = ~crc;
    for (; size >= 8; bytes += 8, size -= 8) state = __crc32cd(state, word_at(bytes));
    for (; size; ++bytes, --size) state = __crc32cb(state, *bytes);
    return ~state;
}

#else

bool has_instruction() { return false; }

uint32_t by_instruction(const uint8_t* bytes, size_t size, uint32_t crc) { return crc32c_by_table(bytes, size, crc); }

#endif

}  // namespace

uint32_t crc32c_by_table(const uint8_t* bytes, size_t size, uint32_t crc) {
    uint32_t state = ~crc;
    for (; size >= 8; bytes += 8, size -= 8) {
        uint8_t eight[8];
        std::memcpy(eight, bytes, 8);
        for (int i = 0; i < 4; ++i) eight[i] ^= static_cast<uint8_t>(state >> 8 * i);
        state = 0;
        for (int i = 0; i < 8; ++i) state ^= kTables.at[static_cast<size_t>(7 - i)][eight[i]];
    }
    for (; size; ++bytes, --size) state = state >> 8 ^ kTables.at[0][(state ^ *bytes) & 0xff];
    return ~state;
}

uint32_t crc32c(const uint8_t* bytes, size_t size, uint32_t crc) {
    static const bool fast = has_instruction();
    return fast ? by_instruction(bytes, size, crc) : crc32c_by_table(bytes, size, crc);
}

}  // namespace asyncmoe::trajectory
