// The sender's half of the delta codec: compare, and encode the changes.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "delta.h"
#include "threads.h"

namespace asyncmoe {
namespace {

// Memory of one thread; only the used part is touched.
struct Scratch {
    std::unique_ptr<std::byte[]> fresh{new std::byte[kDeltaBlock]};
    std::unique_ptr<std::byte[]> gaps{new std::byte[kDeltaBlock + kEntry]};
    std::unique_ptr<uint32_t[]> positions{new uint32_t[kDeltaBlock + kSlack]};
};

// Packs a box, whose bytes are consecutive in the message.
void pack_box(const BoxCopy& copy) {
    constexpr int64_t kShortest = 64, kAhead = 4096, kLine = 64;  // bytes
    if (copy.cast != Cast::kNone || !copy.source || copy.count != 1 || copy.run < kShortest) {
        copy_one(copy);
        return;
    }
    const Dim& dim = copy.dims[0];
    // The hardware prefetcher does not predict where the next run begins.
    const int64_t ahead = (kAhead + copy.run - 1) / copy.run;
    for (int64_t i = 0; i < dim.extent; ++i) {
        const std::byte* from = copy.source + i * dim.source_stride;
        if (i + ahead < dim.extent)
            for (int64_t k = 0; k < copy.run; k += kLine) __builtin_prefetch(from + ahead * dim.source_stride + k);
        std::memcpy(copy.destination + i * copy.run, from, static_cast<size_t>(copy.run));
    }
}

// The current bytes of a block; packed into `room` unless they are contiguous and need no cast.
const std::byte* packed(const DeltaBlock& block, const Program& pack, const std::vector<int64_t>& sources,
                        std::byte* room) {
    const int64_t message = static_cast<int64_t>(reinterpret_cast<intptr_t>(room)) - block.at;
    for (int64_t i = block.first; i < block.last; ++i) {
        const BoxCopy copy = pack.descriptors()[static_cast<size_t>(i)].at(sources.data(), &message);
        if (block.last - block.first == 1 && copy.count == 0 && copy.cast == Cast::kNone && copy.source)
            return copy.source;
        pack_box(copy);
    }
    return room;
}

// Writes the changed values to `values` and over the old ones, and returns the new terms minus the old ones.
template <typename Bits>
uint64_t move_changed(const DeltaView& view, const DeltaBlock& block, const uint32_t* positions, int64_t count,
                      const std::byte* now, std::byte* old, std::byte* values) {
    constexpr auto kSize = static_cast<int64_t>(sizeof(Bits));
    DeltaWalk walk(view, block);
    uint64_t sum = 0;
    for (int64_t k = 0; k < count; ++k) {
        const int64_t at = positions[k] * kSize;
        const DeltaWalk::Spot spot = walk.at(positions[k]);
        sum += element_term(spot.seed, spot.index, element_bits(now + at, kSize)) -
               element_term(spot.seed, spot.index, element_bits(old + at, kSize));
        std::memcpy(values + k * kSize, now + at, sizeof(Bits));
        std::memcpy(old + at, now + at, sizeof(Bits));
    }
    return sum;
}

// Encodes a block into `body`, which has room for all of its elements; returns its entry, and adds to the totals.
DeltaEntry encode_block(const DeltaView& view, const DeltaBlock& block, const std::byte* now, std::byte* body,
                        Scratch& scratch, std::atomic<uint64_t>& sum, std::atomic<uint64_t>& changed) {
    std::byte* old = view.message + block.at;
    const int64_t whole = block.elements * block.item;
    const int64_t count = differing(now, old, block.item, block.elements, scratch.positions.get());
    const int64_t room = whole - count * block.item - 1;  // with larger gaps, a dense body is no larger
    const int64_t gaps = room < 0 ? -1 : write_gaps(scratch.positions.get(), count, scratch.gaps.get(), room);
    changed += static_cast<uint64_t>(count);
    if (gaps >= 0) std::memcpy(body, scratch.gaps.get(), static_cast<size_t>(gaps));
    const auto run = block.item == 1   ? move_changed<uint8_t>
                     : block.item == 2 ? move_changed<uint16_t>
                     : block.item == 4 ? move_changed<uint32_t>
                                       : move_changed<uint64_t>;
    sum += run(view, block, scratch.positions.get(), count, now, old, body + std::max<int64_t>(gaps, 0));
    if (gaps >= 0) return {static_cast<uint32_t>(count), static_cast<uint32_t>(gaps)};
    std::memcpy(body, now, static_cast<size_t>(whole));
    return {kDense, 0};
}

}  // namespace

DeltaFound encode_delta(const DeltaTable& table, const Program& pack, int64_t chunk,
                        const std::vector<int64_t>& sources, std::byte* base, std::byte* payload, int threads) {
    table.check(chunk, pack);
    pack.check(chunk, sources, {0});
    const DeltaView view = table.view(chunk, {}, base);
    std::byte* bodies = payload + kEntry * view.count;
    std::atomic<uint64_t> sum{0}, changed{0};
    std::atomic<int64_t> next{0};
    const int workers = threads_for(threads, table.bytes(chunk));
    run_on_threads(workers, workers, [&](int64_t) {
        Scratch scratch;
        for (int64_t i = next.fetch_add(1); i < view.count; i = next.fetch_add(1)) {
            const DeltaBlock& block = view.blocks[i];
            const std::byte* now = packed(block, pack, sources, scratch.fresh.get());
            put_entry(payload, i, encode_block(view, block, now, bodies + block.at, scratch, sum, changed));
        }
    });
    std::byte* end = bodies;  // each body lies where a dense one would: move them together
    for (int64_t i = 0; i < view.count; ++i) {
        const auto nbytes = static_cast<size_t>(body_bytes(view.blocks[i], entry_of(payload, i)));
        std::memmove(end, bodies + view.blocks[i].at, nbytes);
        end += nbytes;
    }
    return {static_cast<uint64_t>(end - payload), sum, changed, 0};
}

}  // namespace asyncmoe
