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

// 64-bit digest of a buffer: with w[i] its little-endian 64-bit words (the last one filled up with zero bytes),
//   mix(n + sum_i mix(w[i] + (i + 1) * 0x9e3779b97f4a7c15)) modulo 2^64, n its length in bytes,
// where mix is the finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
// The sum does not depend on the order of its terms, so parts may be digested apart, by many threads or on a GPU. Not
// cryptographic.
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

// The terms of that sum for the whole words begin <= i < end.
uint64_t digest_of_words(const std::byte* data, int64_t begin, int64_t end);

// Copies `words` words and returns their terms, where the first of them is word `first`. In one pass: large copies are
// written around the cache, as a plain memcpy of that size is, and would have to be fetched again to be digested.
uint64_t copy_words(const std::byte* source, std::byte* destination, int64_t words, int64_t first);

// The term of word i, of which `bytes` (1 to 8) are there.
uint64_t digest_of_word(const std::byte* data, int64_t i, int64_t bytes);

}  // namespace asyncmoe
