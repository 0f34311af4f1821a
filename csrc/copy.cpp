#include "copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu.h"
#include "threads.h"

namespace asyncmoe {
namespace {

constexpr int64_t kGrain = int64_t{1} << 19;  // bytes of work one thread takes at a time

Descriptor read_row(const int64_t* row, const int64_t* given) {
    const Cast cast = given ? static_cast<Cast>(given[kCast]) : Cast::kNone;
    std::array<Dim, kMaxDims + 1> all;
    for (int k = 0; k < kMaxDims; ++k)
        all[k] = {row[kExtents + k], row[kSourceStrides + k], row[kDestinationStrides + k]};
    BoxCopy copy{nullptr, nullptr, 0, 0, cast, {}, {}};
    if (to_float8(cast)) copy.blocks = {nullptr, nullptr, given[kWidth], (given[kWidth] + kBlockSize - 1) / kBlockSize};
    // The innermost dimension is the bytes of an element or, with a cast, a single element.
    all[kMaxDims] = cast == Cast::kNone ? Dim{row[kItem], 1, 1} : Dim{1, copy.source_unit(), copy.destination_unit()};
    const bool zeros = row[kSource] < 0;
    Dim current = all[kMaxDims];
    std::array<Dim, kMaxDims + 1> joined;
    int count = 0;
    for (int k = kMaxDims - 1; k >= 0; --k) {
        if (all[k].extent == 1) continue;
        const bool source_follows = zeros || all[k].source_stride == current.extent * current.source_stride;
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
    const int64_t scales = to_float8(cast) ? given[kScales] : -1;
    return {row[kSource], row[kDestination], row[kSourceOffset], row[kDestinationOffset], scales, copy};
}

void check_row(const int64_t* row, const int64_t* given, int64_t index) {
    const auto check = [index](const char* what, int64_t value, int64_t least, int64_t most = INT64_MAX) {
        if (value >= least && value <= most) return;
        const std::string range = most == least       ? std::to_string(least)
                                  : most == INT64_MAX ? "at least " + std::to_string(least)
                                                      : std::to_string(least) + " to " + std::to_string(most);
        throw std::invalid_argument(std::string(what) + " of copy descriptor " + std::to_string(index) + ": got " +
                                    std::to_string(value) + ", expected " + range);
    };
    check("destination", row[kDestination], 0);
    check("source offset", row[kSourceOffset], 0);
    check("destination offset", row[kDestinationOffset], 0);
    const int64_t number = given ? given[kCast] : 0;
    check("cast", number, 0, kCasts - 1);
    const Cast cast = static_cast<Cast>(number);
    check("item bytes", row[kItem], source_bytes(cast), cast == Cast::kNone ? INT64_MAX : source_bytes(cast));
    if (to_float8(cast)) {
        check("scales", given[kScales], 0);
        check("width", given[kWidth], 1);
    }
    for (int k = 0; k < kMaxDims; ++k) {
        check("extent", row[kExtents + k], 0);
        check("source stride", row[kSourceStrides + k], 0);
        check("destination stride", row[kDestinationStrides + k], 0);
    }
}

using Run = void (*)(const std::byte*, std::byte*, int64_t, float);

// Casts `run` elements; if the cast has a scale, they must be in one block.
template <Cast kCast>
__attribute__((always_inline)) inline void cast_elements(const std::byte* source, std::byte* destination, int64_t run,
                                                         float scale) {
    for (int64_t i = 0; i < run; ++i) {
        uint32_t bits = 0;
        if (kCast == Cast::kBfloatToFloat8) {
            uint16_t half;
            std::memcpy(&half, source + 2 * i, 2);
            bits = static_cast<uint32_t>(half) << 16;
        } else {
            std::memcpy(&bits, source + 4 * i, 4);
        }
        if (kCast == Cast::kFloatToBfloat) {
            const auto rounded = static_cast<uint16_t>(bfloat_of(bits));
            std::memcpy(destination + 2 * i, &rounded, 2);
        } else {
            destination[i] = static_cast<std::byte>(quantised(float_of(bits), scale));
        }
    }
}

template <Cast kCast>
void cast_anywhere(const std::byte* source, std::byte* destination, int64_t run, float scale) {
    cast_elements<kCast>(source, destination, run, scale);
}

#if defined(__x86_64__)
template <Cast kCast>
ASYNCMOE_AVX512 void cast_with_avx512(const std::byte* source, std::byte* destination, int64_t run, float scale) {
    cast_elements<kCast>(source, destination, run, scale);
}
#endif

template <Cast kCast>
Run run_for() {
#if defined(__x86_64__)
    if (has_avx512()) return cast_with_avx512<kCast>;
#endif
    return cast_anywhere<kCast>;
}

// Quantises a run, which is contiguous in memory and may cross blocks and rows.
template <Cast kCast>
void quantise_run(const BoxCopy& copy, const std::byte* source, std::byte* destination, int64_t run) {
    const Run in_a_block = run_for<kCast>();
    const Blocks& blocks = copy.blocks;
    constexpr int64_t kItemBytes = source_bytes(kCast);
    int64_t at = (source - blocks.origin) / kItemBytes;
    while (run > 0) {
        const int64_t row = at / blocks.width, column = at % blocks.width;
        const int64_t count = std::min({run, blocks.width - column, kBlockSize - column % kBlockSize});
        in_a_block(source, destination, count, blocks.scales[row / kBlockSize * blocks.columns + column / kBlockSize]);
        at += count, run -= count, source += count * kItemBytes, destination += count;
    }
}

using Line = void (*)(const BoxCopy&, const std::byte*, std::byte*, const Dim&, int64_t);

// The loop over the innermost dimension. If kRun is known at compile time, the copy of a short run is a few moves.
template <int kRun>
void copy_line(const BoxCopy&, const std::byte* source, std::byte* destination, const Dim& dim, int64_t run) {
    const size_t n = kRun ? kRun : static_cast<size_t>(run);
    for (int64_t i = 0; i < dim.extent; ++i)
        std::memcpy(destination + i * dim.destination_stride, source + i * dim.source_stride, n);
}

void zero_line(const BoxCopy&, const std::byte*, std::byte* destination, const Dim& dim, int64_t run) {
    for (int64_t i = 0; i < dim.extent; ++i)
        std::memset(destination + i * dim.destination_stride, 0, static_cast<size_t>(run));
}

void round_line(const BoxCopy&, const std::byte* source, std::byte* destination, const Dim& dim, int64_t run) {
    const Run round = run_for<Cast::kFloatToBfloat>();
    for (int64_t i = 0; i < dim.extent; ++i)
        round(source + i * dim.source_stride, destination + i * dim.destination_stride, run, 1.0f);
}

template <Cast kCast>
void quantise_line(const BoxCopy& copy, const std::byte* source, std::byte* destination, const Dim& dim, int64_t run) {
    for (int64_t i = 0; i < dim.extent; ++i)
        quantise_run<kCast>(copy, source + i * dim.source_stride, destination + i * dim.destination_stride, run);
}

Line line_for(const BoxCopy& copy) {
    if (!copy.source) return zero_line;
    if (copy.cast == Cast::kFloatToBfloat) return round_line;
    if (copy.cast == Cast::kFloatToFloat8) return quantise_line<Cast::kFloatToFloat8>;
    if (copy.cast == Cast::kBfloatToFloat8) return quantise_line<Cast::kBfloatToFloat8>;
    switch (copy.run) {
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
        case 32:
            return copy_line<32>;
        case 64:
            return copy_line<64>;
        default:
            return copy_line<0>;
    }
}

void copy_dims(const BoxCopy& copy, int level, const std::byte* source, std::byte* destination, int64_t run,
               Line line) {
    const Dim& dim = copy.dims[level];
    if (level == copy.count - 1) {
        line(copy, source, destination, dim, run);
        return;
    }
    for (int64_t i = 0; i < dim.extent; ++i)
        copy_dims(copy, level + 1, source ? source + i * dim.source_stride : nullptr,
                  destination + i * dim.destination_stride, run, line);
}

}  // namespace

BoxCopy Descriptor::at(const int64_t* sources, const int64_t* destinations) const {
    BoxCopy placed = copy;
    if (source_index >= 0) {
        placed.blocks.origin = reinterpret_cast<const std::byte*>(sources[source_index]);
        placed.source = placed.blocks.origin + source_offset;
    }
    if (scales_index >= 0) placed.blocks.scales = reinterpret_cast<const float*>(sources[scales_index]);
    placed.destination = reinterpret_cast<std::byte*>(destinations[destination_index]) + destination_offset;
    return placed;
}

std::vector<Descriptor> read_rows(const int64_t* rows, const int64_t* casts, int64_t count) {
    std::vector<Descriptor> descriptors;
    descriptors.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
        const int64_t* cast = casts ? casts + i * kCastColumns : nullptr;
        check_row(rows + i * kColumns, cast, i);
        descriptors.push_back(read_row(rows + i * kColumns, cast));
    }
    return descriptors;
}

void check_bases(const std::vector<Descriptor>& descriptors, int64_t sources, int64_t destinations) {
    for (size_t i = 0; i < descriptors.size(); ++i) {
        const int64_t source = std::max(descriptors[i].source_index, descriptors[i].scales_index);
        const int64_t destination = descriptors[i].destination_index;
        if (source >= sources || destination >= destinations)
            throw std::invalid_argument("bases of copy descriptor " + std::to_string(i) + ": got source " +
                                        std::to_string(source) + " and destination " + std::to_string(destination) +
                                        ", expected below " + std::to_string(sources) + " and " +
                                        std::to_string(destinations));
    }
}

std::vector<BoxCopy> resolve(const int64_t* rows, const int64_t* casts, int64_t count, const int64_t* sources,
                             int64_t source_count, const int64_t* destinations, int64_t destination_count) {
    const auto descriptors = read_rows(rows, casts, count);
    check_bases(descriptors, source_count, destination_count);
    std::vector<BoxCopy> copies;
    copies.reserve(descriptors.size());
    for (const auto& descriptor : descriptors)
        if (descriptor.copy.bytes()) copies.push_back(descriptor.at(sources, destinations));
    return copies;
}

void split(const BoxCopy& copy, int64_t bytes, std::vector<BoxCopy>& parts) {
    if (copy.bytes() <= bytes) {
        parts.push_back(copy);
        return;
    }
    const bool through_run = copy.count == 0;
    const int64_t extent = through_run ? copy.run : copy.dims[0].extent;
    const int64_t slice = copy.bytes() / extent;
    const int64_t step = std::max<int64_t>(1, bytes / slice);
    const int64_t source_step = through_run ? copy.source_unit() : copy.dims[0].source_stride;
    const int64_t destination_step = through_run ? copy.destination_unit() : copy.dims[0].destination_stride;
    for (int64_t at = 0; at < extent; at += step) {
        BoxCopy part = copy;
        if (part.source) part.source += at * source_step;
        part.destination += at * destination_step;
        if (slice > bytes && !through_run) {  // one index of the outermost loop is too large: cut an inner loop
            --part.count;
            for (int k = 0; k < part.count; ++k) part.dims[k] = copy.dims[k + 1];
            split(part, bytes, parts);
        } else {
            (through_run ? part.run : part.dims[0].extent) = std::min(step, extent - at);
            parts.push_back(part);
        }
    }
}

void copy_one(const BoxCopy& copy) {
    const Line line = line_for(copy);
    if (copy.count == 0)
        line(copy, copy.source, copy.destination, Dim{1, 0, 0}, copy.run);
    else
        copy_dims(copy, 0, copy.source, copy.destination, copy.run, line);
}

void copy_on_cpu(const std::vector<BoxCopy>& copies, int threads) {
    std::vector<BoxCopy> parts;
    parts.reserve(copies.size());
    int64_t bytes = 0;
    for (const auto& copy : copies) {
        bytes += copy.bytes();
        split(copy, kGrain, parts);
    }
    run_on_threads(threads_for(threads, bytes), static_cast<int64_t>(parts.size()),
                   [&](int64_t i) { copy_one(parts[static_cast<size_t>(i)]); });
}

}  // namespace asyncmoe
