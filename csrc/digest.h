// 64-bit digests of memory.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define ASYNCMOE_BOTH __host__ __device__
#else
#define ASYNCMOE_BOTH
#endif

namespace asyncmoe {

// 64-bit digest of a buffer of n bytes with little-endian 64-bit words w[i] (the last one padded with zero bytes):
//   mix(n + sum_i mix(w[i] + (i + 1) * 0x9e3779b97f4a7c15)) modulo 2^64,
// where mix is the finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
// The sum does not depend on the order of its terms, so parts can be digested separately, by many threads or on a GPU.
// Not cryptographic.
uint64_t digest(const std::byte* data, int64_t nbytes, int threads);

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;

ASYNCMOE_BOTH __attribute__((always_inline)) inline uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// The term of word i.
ASYNCMOE_BOTH __attribute__((always_inline)) inline uint64_t term_of(uint64_t word, int64_t i) {
    return mix(word + static_cast<uint64_t>(i + 1) * kGolden);
}

// The sum of the terms of the whole words begin <= i < end.
uint64_t digest_of_words(const std::byte* data, int64_t begin, int64_t end);

// Copies `words` words and returns the sum of their terms; the first of them is word `first` of the message. Copies and
// digests in one pass, because large copies bypass the cache, like a plain memcpy of that size, and would have to be
// fetched again for the digest.
uint64_t copy_words(const std::byte* source, std::byte* destination, int64_t words, int64_t first);

// The term of word i, of which `bytes` bytes (1 to 8) exist.
uint64_t digest_of_word(const std::byte* data, int64_t i, int64_t bytes);

}  // namespace asyncmoe
