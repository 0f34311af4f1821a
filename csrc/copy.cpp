#include "copy.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

namespace asyncmoe {
namespace {

constexpr int64_t kGrain = int64_t{1} << 20;  // bytes of work one thread takes at a time
constexpr int kMostThreads = 4;

int threads_for(int asked, int64_t bytes) {
    if (asked <= 0) asked = std::min<int>(kMostThreads, std::max(1u, std::thread::hardware_concurrency()));
    return static_cast<int>(std::clamp<int64_t>(bytes / kGrain, 1, asked));
}

template <typename Task>
void run_on_threads(int threads, int64_t tasks, const Task& task) {
    std::atomic<int64_t> next{0};
    auto work = [&] {
        for (int64_t i = next.fetch_add(1); i < tasks; i = next.fetch_add(1)) task(i);
    };
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back(work);
    work();
    for (auto& thread : others) thread.join();
}

BoxCopy resolve_row(const int64_t* row, const std::byte* source, std::byte* destination) {
    std::array<Dim, kMaxDims + 1> all;
    for (int k = 0; k < kMaxDims; ++k)
        all[k] = {row[kExtents + k], row[kSourceStrides + k], row[kDestinationStrides + k]};
    all[kMaxDims] = {row[kItem], 1, 1};  // the bytes of an element are the innermost dimension
    BoxCopy copy{source, destination, row[kItem], 0, {}};
    Dim current = all[kMaxDims];
    std::array<Dim, kMaxDims + 1> joined;
    int count = 0;
    for (int k = kMaxDims - 1; k >= 0; --k) {
        if (all[k].extent == 1) continue;
        const bool source_follows = !source || all[k].source_stride == current.extent * current.source_stride;
        if (source_follows && all[k].destination_stride == current.extent * current.destination_stride) {
            current.extent *= all[k].extent;
        } else {
            joined[count++] = current;
            current = all[k];
        }
    }
    joined[count++] = current;
    copy.run = joined[0].extent;
    copy.count = count - 1;
    for (int k = 0; k < copy.count; ++k) copy.dims[k] = joined[count - 1 - k];
    return copy;
}

void check_row(const int64_t* row, int64_t index, int64_t source_count, int64_t destination_count) {
    bool good = row[kSource] < source_count && row[kDestination] >= 0 && row[kDestination] < destination_count &&
                row[kItem] >= 1 && row[kSourceOffset] >= 0 && row[kDestinationOffset] >= 0;
    for (int k = 0; k < kMaxDims; ++k)
        good = good && row[kExtents + k] >= 0 && row[kSourceStrides + k] >= 0 && row[kDestinationStrides + k] >= 0;
    if (!good) throw std::invalid_argument("copy descriptor " + std::to_string(index) + " is malformed");
}

// Cuts a copy into parts of about kGrain bytes: along its outermost loop, or through the run when there is no loop.
void split(const BoxCopy& copy, std::vector<BoxCopy>& parts) {
    if (copy.bytes() <= kGrain) {
        parts.push_back(copy);
        return;
    }
    const bool through_run = copy.count == 0;
    const int64_t extent = through_run ? copy.run : copy.dims[0].extent;
    const int64_t step = std::max<int64_t>(1, kGrain / (copy.bytes() / extent));
    for (int64_t at = 0; at < extent; at += step) {
        BoxCopy part = copy;
        (through_run ? part.run : part.dims[0].extent) = std::min(step, extent - at);
        if (part.source) part.source += at * (through_run ? 1 : copy.dims[0].source_stride);
        part.destination += at * (through_run ? 1 : copy.dims[0].destination_stride);
        parts.push_back(part);
    }
}

// The loop over the innermost dimension; kRun known at compile time makes the copy of a short run a few moves.
template <int kRun>
void copy_line(const std::byte* source, std::byte* destination, const Dim& dim, int64_t run) {
    const size_t n = kRun ? kRun : static_cast<size_t>(run);
    for (int64_t i = 0; i < dim.extent; ++i) {
        if (source)
            std::memcpy(destination + i * dim.destination_stride, source + i * dim.source_stride, n);
        else
            std::memset(destination + i * dim.destination_stride, 0, n);
    }
}

using Line = void (*)(const std::byte*, std::byte*, const Dim&, int64_t);

Line line_for(int64_t run) {
    switch (run) {
        case 1:
            return copy_line<1>;
        case 2:
            return copy_line<2>;
        case 4:
            return copy_line<4>;
        case 8:
            return copy_line<8>;
        case 16:
            return copy_line<16>;
        default:
            return copy_line<0>;
    }
}

void copy_dims(const BoxCopy& copy, int level, const std::byte* source, std::byte* destination, Line line) {
    const Dim& dim = copy.dims[level];
    if (level == copy.count - 1) {
        line(source, destination, dim, copy.run);
        return;
    }
    for (int64_t i = 0; i < dim.extent; ++i)
        copy_dims(copy, level + 1, source ? source + i * dim.source_stride : nullptr,
                  destination + i * dim.destination_stride, line);
}

void copy_one(const BoxCopy& copy) {
    if (copy.count == 0)
        copy_line<0>(copy.source, copy.destination, Dim{1, 0, 0}, copy.run);
    else
        copy_dims(copy, 0, copy.source, copy.destination, line_for(copy.run));
}

uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the digest reads words as they lie in memory");

uint64_t word_at(const std::byte* data, size_t bytes) {
    uint64_t word = 0;
    std::memcpy(&word, data, bytes);
    return word;
}

uint64_t digest_of_words(const std::byte* data, int64_t begin, int64_t end) {
    uint64_t sum = 0;
    for (int64_t i = begin; i < end; ++i)
        sum += mix(word_at(data + 8 * i, 8) + static_cast<uint64_t>(i + 1) * 0x9e3779b97f4a7c15u);
    return sum;
}

}  // namespace

std::vector<BoxCopy> resolve(const int64_t* rows, int64_t count, const int64_t* sources, int64_t source_count,
                             const int64_t* destinations, int64_t destination_count) {
    std::vector<BoxCopy> copies;
    copies.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
        const int64_t* row = rows + i * kColumns;
        check_row(row, i, source_count, destination_count);
        if (std::any_of(row + kExtents, row + kExtents + kMaxDims, [](int64_t n) { return n == 0; })) continue;
        const std::byte* source = nullptr;
        if (row[kSource] >= 0) source = reinterpret_cast<const std::byte*>(sources[row[kSource]]) + row[kSourceOffset];
        auto* destination = reinterpret_cast<std::byte*>(destinations[row[kDestination]]) + row[kDestinationOffset];
        copies.push_back(resolve_row(row, source, destination));
    }
    return copies;
}

void copy_on_cpu(const std::vector<BoxCopy>& copies, int threads) {
    std::vector<BoxCopy> parts;
    parts.reserve(copies.size());
    int64_t bytes = 0;
    for (const auto& copy : copies) {
        bytes += copy.bytes();
        split(copy, parts);
    }
    run_on_threads(threads_for(threads, bytes), static_cast<int64_t>(parts.size()),
                   [&](int64_t i) { copy_one(parts[static_cast<size_t>(i)]); });
}

uint64_t digest(const std::byte* data, int64_t nbytes, int threads) {
    constexpr int64_t kWords = kGrain / 8;
    const int64_t words = nbytes / 8, rest = nbytes % 8;
    std::atomic<uint64_t> sum{static_cast<uint64_t>(nbytes)};
    run_on_threads(threads_for(threads, nbytes), (words + kWords - 1) / kWords,
                   [&](int64_t i) { sum += digest_of_words(data, i * kWords, std::min(words, (i + 1) * kWords)); });
    if (rest)
        sum += mix(word_at(data + 8 * words, static_cast<size_t>(rest)) +
                   static_cast<uint64_t>(words + 1) * 0x9e3779b97f4a7c15u);
    return mix(sum);
}

}  // namespace asyncmoe
