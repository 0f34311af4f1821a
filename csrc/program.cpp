#include "program.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "digest.h"
#include "threads.h"

namespace asyncmoe {
namespace {

// Small enough that copied bytes are still in a core's cache when they are digested.
constexpr int64_t kBlock = int64_t{1} << 17;

bool lies_row_major(const BoxCopy& copy, Wire wire) {
    int64_t step = copy.run * (wire == Wire::kSource ? copy.source_unit() : copy.destination_unit());
    for (int k = copy.count - 1; k >= 0; --k) {
        if ((wire == Wire::kSource ? copy.dims[k].source_stride : copy.dims[k].destination_stride) != step)
            return false;
        step *= copy.dims[k].extent;
    }
    return true;
}

struct Part {
    BoxCopy copy;
    int64_t at;  // offset of its first byte in the message
};

// Whether runs consist of whole words of the message and are long enough to be worth one call each.
bool runs_are_words(const Part& part) {
    constexpr int64_t kShortest = 64;
    const BoxCopy& copy = part.copy;
    return copy.cast == Cast::kNone && copy.run >= kShortest && copy.run % 8 == 0 && part.at % 8 == 0;
}

// Copies all runs of the loops from dims[level] inwards; `word` counts the message's words. Returns the sum of their
// terms of the digest.
uint64_t copy_runs(const BoxCopy& copy, int level, const std::byte* source, std::byte* destination, int64_t& word) {
    if (level == copy.count) {
        const int64_t words = copy.run / 8, first = word;
        word += words;
        return copy_words(source, destination, words, first);
    }
    constexpr int64_t kAhead = 4096, kLine = 64;  // bytes
    uint64_t sum = 0;
    const Dim& dim = copy.dims[level];
    // The hardware prefetcher does not predict where the next run begins.
    const int64_t ahead =
        level + 1 == copy.count && copy.run < kAhead ? (kAhead + copy.run - 1) / copy.run : dim.extent;
    for (int64_t i = 0; i < dim.extent; ++i) {
        if (i + ahead < dim.extent)
            for (int64_t k = 0; k < copy.run; k += kLine)
                __builtin_prefetch(source + (i + ahead) * dim.source_stride + k);
        sum +=
            copy_runs(copy, level + 1, source + i * dim.source_stride, destination + i * dim.destination_stride, word);
    }
    return sum;
}

// Copies a part and returns the sum of the terms of the message's words that are entirely in it.
uint64_t copy_part(const Part& part, const std::byte* message) {
    if (runs_are_words(part)) {
        int64_t word = part.at / 8;
        return copy_runs(part.copy, 0, part.copy.source, part.copy.destination, word);
    }
    copy_one(part.copy);
    return digest_of_words(message, (part.at + 7) / 8, (part.at + part.copy.bytes()) / 8);
}

}  // namespace

Program::Program(const int64_t* rows, const int64_t* casts, int64_t count, std::vector<int64_t> firsts, Wire wire)
    : descriptors_(read_rows(rows, casts, count)), firsts_(std::move(firsts)), wire_(wire) {
    if (firsts_.empty() || firsts_.front() != 0 || firsts_.back() != count ||
        !std::is_sorted(firsts_.begin(), firsts_.end()))
        throw std::invalid_argument("first rows of chunks: got " + std::to_string(firsts_.size()) + " numbers" +
                                    (firsts_.empty() ? "" : ", the last " + std::to_string(firsts_.back())) +
                                    ", expected ascending ones from 0 to " + std::to_string(count));
    for (const auto& descriptor : descriptors_) {
        if (wire == Wire::kSource && descriptor.copy.cast != Cast::kNone)
            throw std::invalid_argument("cast: got one in a program that unpacks, expected casts only while packing");
        sources_ = std::max({sources_, descriptor.source_index + 1, descriptor.scales_index + 1});
        destinations_ = std::max(destinations_, descriptor.destination_index + 1);
    }
    for (size_t c = 0; c + 1 < firsts_.size(); ++c) {
        int64_t bytes = 0;
        for (int64_t i = firsts_[c]; i < firsts_[c + 1]; ++i)
            bytes += descriptors_[static_cast<size_t>(i)].copy.bytes();
        bytes_.push_back(bytes);
    }
    if (wire_ != Wire::kNone) check_messages();
}

void Program::check_messages() const {
    for (size_t c = 0; c + 1 < firsts_.size(); ++c) {
        int64_t at = 0;
        for (int64_t i = firsts_[c]; i < firsts_[c + 1]; ++i) {
            const auto& d = descriptors_[static_cast<size_t>(i)];
            const int64_t base = wire_ == Wire::kSource ? d.source_index : d.destination_index;
            const int64_t offset = wire_ == Wire::kSource ? d.source_offset : d.destination_offset;
            if (base != 0 || offset != at || !lies_row_major(d.copy, wire_))
                throw std::invalid_argument("message of copy descriptor " + std::to_string(i) + ": got base " +
                                            std::to_string(base) + ", offset " + std::to_string(offset) +
                                            ", expected base 0, offset " + std::to_string(at) + ", row-major");
            at += d.copy.bytes();
        }
    }
}

void Program::check_chunk(int64_t chunk) const {
    if (chunk < 0 || chunk >= chunks())
        throw std::invalid_argument("chunk: got " + std::to_string(chunk) + ", expected below " +
                                    std::to_string(chunks()));
}

int64_t Program::bytes(int64_t chunk) const {
    check_chunk(chunk);
    return bytes_[static_cast<size_t>(chunk)];
}

void Program::check(int64_t chunk, const std::vector<int64_t>& sources,
                    const std::vector<int64_t>& destinations) const {
    check_chunk(chunk);
    if (static_cast<int64_t>(sources.size()) < sources_ || static_cast<int64_t>(destinations.size()) < destinations_)
        throw std::invalid_argument("base addresses: got " + std::to_string(sources.size()) + " sources and " +
                                    std::to_string(destinations.size()) + " destinations, expected at least " +
                                    std::to_string(sources_) + " and " + std::to_string(destinations_));
}

std::vector<BoxCopy> Program::copies(int64_t chunk, const std::vector<int64_t>& sources,
                                     const std::vector<int64_t>& destinations) const {
    check(chunk, sources, destinations);
    std::vector<BoxCopy> placed;
    const auto first = static_cast<size_t>(firsts_[static_cast<size_t>(chunk)]);
    const auto last = static_cast<size_t>(firsts_[static_cast<size_t>(chunk) + 1]);
    placed.reserve(last - first);
    for (size_t i = first; i < last; ++i)
        if (descriptors_[i].copy.bytes()) placed.push_back(descriptors_[i].at(sources.data(), destinations.data()));
    return placed;
}

uint64_t Program::run(int64_t chunk, const std::vector<int64_t>& sources, const std::vector<int64_t>& destinations,
                      int threads) const {
    std::vector<Part> parts;
    std::vector<BoxCopy> blocks;
    int64_t end = 0;
    for (const auto& copy : copies(chunk, sources, destinations)) {
        blocks.clear();
        split(copy, kBlock, blocks);
        for (const auto& block : blocks) {
            parts.push_back({block, end});
            end += block.bytes();
        }
    }
    const std::byte* message = nullptr;
    if (wire_ != Wire::kNone && end > 0)
        message = reinterpret_cast<const std::byte*>(wire_ == Wire::kSource ? sources[0] : destinations[0]);
    std::atomic<uint64_t> sum{static_cast<uint64_t>(end)};
    run_on_threads(threads_for(threads, end), static_cast<int64_t>(parts.size()), [&](int64_t i) {
        const Part& part = parts[static_cast<size_t>(i)];
        if (message)
            sum += copy_part(part, message);
        else
            copy_one(part.copy);
    });
    if (wire_ == Wire::kNone) return 0;
    int64_t done = -1;  // add words that several parts share, and the last word if it is incomplete, once each
    for (size_t i = 0; i <= parts.size(); ++i) {
        const int64_t at = i < parts.size() ? parts[i].at : end;
        if (at % 8 == 0 || at / 8 == done) continue;
        done = at / 8;
        sum += digest_of_word(message, done, std::min<int64_t>(8, end - 8 * done));
    }
    return mix(sum);
}

}  // namespace asyncmoe
