#include "digest.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cpu.h"
#include "threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace asyncmoe {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the digest reads words as they lie in memory");

// The sum of the terms of `count` words at `data`; the first is word `first` of the buffer.
__attribute__((always_inline)) inline uint64_t sum_of_words(const std::byte* data, int64_t count, int64_t first) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
        uint64_t word;
        std::memcpy(&word, data + 8 * i, 8);
        sum += term_of(word, first + i);
    }
    return sum;
}

uint64_t copy_words_in_blocks(const std::byte* source, std::byte* destination, int64_t words, int64_t first) {
    constexpr int64_t kBlock = 512;  // words: 4 KiB stay in the L1 cache
    uint64_t sum = 0;
    for (int64_t at = 0; at < words; at += kBlock) {
        const int64_t count = std::min(kBlock, words - at);
        std::memcpy(destination + 8 * at, source + 8 * at, static_cast<size_t>(8 * count));
        sum += sum_of_words(destination + 8 * at, count, first + at);
    }
    return sum;
}

#if defined(__x86_64__)
// AVX-512 has a 64-bit multiplication; without it the digest is slower than the copy.
ASYNCMOE_AVX512 uint64_t sum_with_avx512(const std::byte* data, int64_t begin, int64_t end) {
    return sum_of_words(data, begin, end);
}

constexpr int64_t kLanes = 8;
using Line = uint64_t __attribute__((vector_size(8 * kLanes)));

ASYNCMOE_AVX512 inline Line terms_of(Line line, Line places) {
    Line z = line + places;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// If kStream, `destination` is a multiple of 64, and lines are written past the cache.
template <bool kStream>
ASYNCMOE_AVX512 inline Line copy_line(const std::byte* source, std::byte* destination) {
    Line line;
    std::memcpy(&line, source, sizeof line);
    if (kStream)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(destination), reinterpret_cast<__m512i>(line));
    else
        std::memcpy(destination, &line, sizeof line);
    return line;
}

constexpr int64_t kPageLines = 64, kPages = 4, kGroupLines = kPageLines * kPages;

template <bool kStream>
ASYNCMOE_AVX512 uint64_t copy_lines(const std::byte* source, std::byte* destination, int64_t lines, int64_t first) {
    Line places{}, sum{};
    for (int64_t i = 0; i < kLanes; ++i) places[i] = static_cast<uint64_t>(first + i + 1) * kGolden;
    int64_t done = 0;
    // The hardware prefetcher follows one page at a time; four pages in parallel keep more fetches under way.
    for (; kStream && done + kGroupLines <= lines; done += kGroupLines)
        for (int64_t i = 0; i < kPageLines; ++i)
            for (int64_t page = 0; page < kPages; ++page) {
                const int64_t at = done + page * kPageLines + i;
                if (at + kGroupLines < lines) __builtin_prefetch(source + 64 * (at + kGroupLines));
                const Line line = copy_line<kStream>(source + 64 * at, destination + 64 * at);
                sum += terms_of(line, places + static_cast<uint64_t>(at * kLanes) * kGolden);
            }
    for (; done < lines; ++done) {
        const Line line = copy_line<kStream>(source + 64 * done, destination + 64 * done);
        sum += terms_of(line, places + static_cast<uint64_t>(done * kLanes) * kGolden);
    }
    if (kStream) _mm_sfence();
    uint64_t total = 0;
    for (int64_t i = 0; i < kLanes; ++i) total += sum[i];
    return total;
}

uint64_t copy_words_with_avx512(const std::byte* source, std::byte* destination, int64_t words, int64_t first) {
    constexpr int64_t kWorthStreaming = 32, kWorthParts = 128;  // words
    const auto place = reinterpret_cast<uintptr_t>(destination);
    // Writing partial lines past the cache costs more than writing them through it.
    const bool whole_lines = place % 64 == 0 && words % kLanes == 0;
    const bool stream = place % 8 == 0 && words >= (whole_lines ? kWorthStreaming : kWorthParts);
    const int64_t head = stream ? static_cast<int64_t>((64 - place % 64) % 64 / 8) : 0;
    const int64_t lines = (words - head) / kLanes, done = head + lines * kLanes;
    uint64_t sum = head ? copy_words_in_blocks(source, destination, head, first) : 0;
    const auto copy = stream ? copy_lines<true> : copy_lines<false>;
    sum += copy(source + 8 * head, destination + 8 * head, lines, first + head);
    if (done < words)
        sum += copy_words_in_blocks(source + 8 * done, destination + 8 * done, words - done, first + done);
    return sum;
}

#endif

}  // namespace

uint64_t digest_of_words(const std::byte* data, int64_t begin, int64_t end) {
#if defined(__x86_64__)
    if (has_avx512()) return sum_with_avx512(data + 8 * begin, end - begin, begin);
#endif
    return sum_of_words(data + 8 * begin, end - begin, begin);
}

uint64_t copy_words(const std::byte* source, std::byte* destination, int64_t words, int64_t first) {
#if defined(__x86_64__)
    if (has_avx512()) return copy_words_with_avx512(source, destination, words, first);
#endif
    return copy_words_in_blocks(source, destination, words, first);
}

uint64_t digest_of_word(const std::byte* data, int64_t i, int64_t bytes) {
    uint64_t word = 0;
    std::memcpy(&word, data + 8 * i, static_cast<size_t>(bytes));
    return term_of(word, i);
}

uint64_t digest(const std::byte* data, int64_t nbytes, int threads) {
    constexpr int64_t kWords = int64_t{1} << 17;
    const int64_t words = nbytes / 8, rest = nbytes % 8;
    std::atomic<uint64_t> sum{static_cast<uint64_t>(nbytes)};
    run_on_threads(threads_for(threads, nbytes), (words + kWords - 1) / kWords,
                   [&](int64_t i) { sum += digest_of_words(data, i * kWords, std::min(words, (i + 1) * kWords)); });
    if (rest) sum += digest_of_word(data, words, rest);
    return mix(sum);
}

}  // namespace asyncmoe
