#include "routes.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "bits.h"
#include "crc32c.h"

namespace asyncmoe::trajectory {

namespace {

// Tokens packed at a time, a multiple of kGroup. The input is read once per layer, so a block's ids of all layers must
// stay in the L2 cache.
constexpr int64_t kBlock = 64;

// Copies ids to `to`; returns whether all of them are valid. Accumulates sign bits, which every vector unit can do.
template <int kTopK>
bool gather(const int32_t* from, int64_t tokens, int64_t stride, const RouteShape& shape, uint16_t* to) {
    const int64_t width = kTopK ? kTopK : shape.top_k;
    const auto last = static_cast<uint32_t>(shape.experts - 1);
    uint32_t signs = 0;
    for (int64_t t = 0; t < tokens; ++t, from += stride, to += width)
        for (int64_t k = 0; k < width; ++k) {
            const auto id = static_cast<uint32_t>(from[k]);
            signs |= id | (last - id);
            to[k] = static_cast<uint16_t>(id);
        }
    return signs >> 31 == 0;
}

// Prefetches a part of a later block while layer i of `count` is packed: the hardware prefetcher follows consecutive
// rows, but not a block's rows layer by layer.
void prefetch(const int32_t* routes, int64_t begin, int64_t end, int64_t i, int64_t count) {
    constexpr int64_t kLine = 64 / sizeof(int32_t);
    if (begin >= end) return;
    const int64_t ids = end - begin;
    for (int64_t at = begin + ids * i / count; at < begin + ids * (i + 1) / count; at += kLine)
        __builtin_prefetch(routes + at);
}

// Detects a token with the same expert twice in a layer: each expert remembers the last token that named it.
class Repeats {
  public:
    explicit Repeats(int64_t experts) : last_(static_cast<size_t>(experts)) {}

    // Checks `tokens` tokens of one layer; all their ids must be smaller than `experts`.
    template <int kTopK, typename Id>
    bool in(const Id* ids, int64_t tokens, int64_t top_k) {
        const int64_t width = kTopK ? kTopK : top_k;
        bool repeated = false;
        for (int64_t t = 0; t < tokens; ++t, ids += width) {
            ++token_;
            for (int64_t k = 0; k < width; ++k) {
                repeated |= last_[ids[k]] == token_;
                last_[ids[k]] = token_;
            }
        }
        return repeated;
    }

    template <typename Id>
    bool in(const Id* ids, int64_t tokens, int64_t top_k) {
        return top_k == 8 ? in<8>(ids, tokens, top_k) : in<0>(ids, tokens, top_k);
    }

  private:
    std::vector<uint64_t> last_;
    uint64_t token_ = 0;  // number of the current token, counted from 1
};

// Position of the first repeated expert within a token; -1 if there is none.
template <typename Id>
int64_t first_repeated(const Id* ids, int64_t tokens, int64_t top_k, int64_t stride) {
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t k = 1; k < top_k; ++k)
            if (const Id* row = ids + t * stride; std::find(row, row + k, row[k]) != row + k) return t * stride + k;
    return -1;
}

int64_t first_outside(const int32_t* routes, const RouteShape& shape, int64_t at, int64_t tokens, int64_t stride) {
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t k = 0; k < shape.top_k; ++k)
            if (const int64_t id = routes[at + t * stride + k]; id < 0 || id >= shape.experts)
                return at + t * stride + k;
    return -1;
}

void store(const uint64_t lanes[2], uint16_t* to) { std::memcpy(to, lanes, 16); }

void store(const uint64_t lanes[2], uint8_t* to) {
    uint64_t word = 0;
    for (int i = 0; i < 2; ++i) {
        const uint64_t pairs = (lanes[i] | lanes[i] >> 8) & 0x0000ffff0000ffffu;
        word |= ((pairs | pairs >> 16) & 0xffffffffu) << 32 * i;
    }
    std::memcpy(to, &word, sizeof word);
}

}  // namespace

int64_t pack_routes(const int32_t* routes, const RouteShape& shape, int64_t all_layers, const int64_t* layers,
                    int64_t count, uint8_t* planes) {
    const int64_t stride = all_layers * shape.top_k, plane = shape.plane_bytes();
    uint16_t ids[kBlock * kMaxTopK];
    Repeats repeats(shape.experts);
    for (int64_t begin = 0; begin < shape.rows; begin += kBlock) {
        const int64_t tokens = std::min(kBlock, shape.rows - begin), values = tokens * shape.top_k;
        for (int64_t i = 0; i < count; ++i) {
            prefetch(routes, (begin + kBlock) * stride, std::min(begin + 2 * kBlock, shape.rows) * stride, i, count);
            const int64_t at = begin * stride + layers[i] * shape.top_k;
            if (!(shape.top_k == 8 ? gather<8> : gather<0>)(routes + at, tokens, stride, shape, ids))
                return first_outside(routes, shape, at, tokens, stride);
            if (repeats.in(ids, tokens, shape.top_k))
                return at + first_repeated(routes + at, tokens, shape.top_k, stride);
            for (int64_t v = values; v % kGroup; ++v) ids[v] = 0;
            uint8_t* to = planes + i * plane + begin * shape.top_k * shape.bits / 8;
            const uint8_t* end = planes + (i + 1) * plane;
            for (int64_t v = 0; v < values; v += kGroup, to += shape.bits)
                pack_group(ids + v, shape.bits, to, end - to);
        }
    }
    return -1;
}

template <typename Id>
int64_t unpack_routes(const uint8_t* planes, const RouteShape& shape, int64_t count, Id* ids) {
    const int64_t values = shape.ids(), plane = shape.plane_bytes();
    Repeats repeats(shape.experts);
    for (int64_t i = 0; i < count; ++i) {
        const uint8_t *from = planes + i * plane, *end = from + plane;
        Id* to = ids + i * values;
        uint64_t lanes[2];
        int64_t v = 0;
        for (; v + kGroup <= values; v += kGroup, from += shape.bits) {
            unpack_group(from, end - from, shape.bits, lanes);
            store(lanes, to + v);
        }
        if (v < values) {
            Id last[kGroup];
            unpack_group(from, end - from, shape.bits, lanes);
            store(lanes, last);
            std::copy_n(last, values - v, to + v);
        }
        const auto used = static_cast<int>(values * shape.bits % 8);
        if (used && end[-1] >> used) return count * values;
        if (shape.experts != int64_t{1} << shape.bits && values && *std::max_element(to, to + values) >= shape.experts)
            return i * values + (std::find_if(to, to + values, [&](Id id) { return id >= shape.experts; }) - to);
        if (repeats.in(to, shape.rows, shape.top_k))
            return i * values + first_repeated(to, shape.rows, shape.top_k, shape.top_k);
    }
    return -1;
}

namespace {

// Moves eight adjacent values of `bits` (at most 8) bits each into the eight bytes of a word.
class ToBytes {
  public:
    explicit ToBytes(int bits) : bits_(bits), half_(low_bits(4 * bits)) {
        const uint64_t pair = low_bits(2 * bits), one = low_bits(bits);
        pairs_ = pair | pair << 32;
        ones_ = one | one << 16 | one << 32 | one << 48;
    }

    uint64_t operator()(uint64_t x) const {
        if (bits_ == 8) return x;
        x = (x & half_) | (x >> 4 * bits_ & half_) << 32;
        x = (x & pairs_) | (x >> 2 * bits_ & pairs_) << 16;
        return (x & ones_) | (x >> bits_ & ones_) << 8;
    }

  private:
    int bits_;
    uint64_t half_, pairs_, ones_;
};

constexpr uint64_t kEach = 0x0101010101010101u;
constexpr uint64_t kHigh = kEach << 7;

// Sets the high bit of each byte that is at least `experts` (at most 128); all bytes are below 128.
inline uint64_t outside(uint64_t bytes, uint64_t experts) { return (bytes + (128 - experts) * kEach) & kHigh; }

// Sets high bits if two of the bytes, all below 128, are equal: rotations by one to four bytes align every pair.
inline uint64_t equal(uint64_t bytes) {
    uint64_t differ = kHigh;
    for (int shift = 8; shift <= 32; shift += 8)
        differ &= (bytes ^ (bytes << shift | bytes >> (64 - shift))) + (kHigh - kEach);
    return ~differ & kHigh;
}

// Whether the ids of one plane are valid if tokens choose 8 of at most 128 experts: the 8 ids of a token fit in a word,
// and no byte's sum carries into the next.
bool plane_valid_8(const uint8_t* from, const uint8_t* end, const RouteShape& shape) {
    const ToBytes to_bytes(shape.bits);
    const auto experts = static_cast<uint64_t>(shape.experts);
    uint64_t wrong = 0, word;
    const auto check = [&](uint64_t packed) {
        const uint64_t ids = to_bytes(packed);
        wrong |= equal(ids) | outside(ids, experts);
    };
    for (; end - from >= static_cast<int64_t>(sizeof word); from += shape.bits) {
        std::memcpy(&word, from, sizeof word);
        check(word);
    }
    for (; from < end; from += shape.bits) {
        word = 0;
        std::memcpy(&word, from, static_cast<size_t>(end - from));
        check(word);
    }
    return wrong == 0;
}

bool plane_valid(const uint8_t* from, const uint8_t* end, const RouteShape& shape, Repeats& repeats) {
    uint16_t ids[kBlock * kMaxTopK];
    for (int64_t begin = 0; begin < shape.rows; begin += kBlock) {
        const int64_t tokens = std::min(kBlock, shape.rows - begin), values = tokens * shape.top_k;
        for (int64_t v = 0; v < values; v += kGroup, from += shape.bits) {
            uint64_t lanes[2];
            unpack_group(from, end - from, shape.bits, lanes);
            store(lanes, ids + v);
        }
        if (*std::max_element(ids, ids + values) >= shape.experts || repeats.in(ids, tokens, shape.top_k)) return false;
    }
    return true;
}

}  // namespace

bool routes_valid(const uint8_t* planes, const RouteShape& shape, int64_t count) {
    const int64_t plane = shape.plane_bytes();
    const auto used = static_cast<int>(shape.ids() * shape.bits % 8);
    Repeats repeats(shape.experts);
    for (int64_t i = 0; i < count; ++i, planes += plane) {
        const uint8_t* end = planes + plane;
        if (used && end[-1] >> used) return false;
        const bool words = shape.top_k == kGroup && shape.bits < 8;
        if (!(words ? plane_valid_8(planes, end, shape) : plane_valid(planes, end, shape, repeats))) return false;
    }
    return true;
}

void digest_routes(const uint8_t* planes, const RouteShape& shape, const int64_t* layers, int64_t count,
                   uint32_t* digests) {
    const auto size = static_cast<size_t>(shape.plane_bytes());
    for (int64_t i = 0; i < count; ++i, planes += size) {
        const int64_t about[] = {shape.rows, layers[i], shape.top_k, shape.experts};
        uint8_t bytes[sizeof about];
        for (size_t at = 0; at < sizeof about; ++at)
            bytes[at] = static_cast<uint8_t>(static_cast<uint64_t>(about[at / 8]) >> (at % 8 * 8));
        digests[i] = crc32c(planes, size, crc32c(bytes, sizeof bytes, 0));
    }
}

template int64_t unpack_routes(const uint8_t*, const RouteShape&, int64_t, uint8_t*);
template int64_t unpack_routes(const uint8_t*, const RouteShape&, int64_t, uint16_t*);

}  // namespace asyncmoe::trajectory
