// The sender's half of deltas: compare, and code what changed.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "delta.h"
#include "delta_walk.h"
#include "threads.h"

namespace asyncmoe {
namespace {

void check_rows(const DeltaTable& table, const Program& pack, int64_t chunk, const std::vector<int64_t>& sources) {
    pack.check(chunk, sources, {0});
    if (table.firsts() != pack.firsts() || table.bytes(chunk) != pack.bytes(chunk))
        throw std::invalid_argument("delta of a program: got a table of other rows, expected those of the program");
}

// Memory of one thread, of which only what is used is touched.
struct Scratch {
    std::unique_ptr<std::byte[]> fresh{new std::byte[kDeltaBlock]};
    std::unique_ptr<uint32_t[]> positions{new uint32_t[kDeltaBlock]};
};

// Calls task(scratch, i) for 0 <= i < tasks.
template <typename Task>
void run_with_scratch(int threads, int64_t tasks, const Task& task) {
    std::atomic<int64_t> next{0};
    run_on_threads(threads, threads, [&](int64_t) {
        Scratch scratch;
        for (int64_t i = next.fetch_add(1); i < tasks; i = next.fetch_add(1)) task(scratch, i);
    });
}

class Encoder {
  public:
    Encoder(const DeltaTable& table, const Program& pack, int64_t chunk, const std::vector<int64_t>& sources)
        : table_(table), pack_(pack), blocks_(table.begin(chunk)), sources_(sources) {}

    // The bytes of a block as they would be sent now; packed into `room` unless they lie in one place.
    const std::byte* fresh(int64_t number, std::byte* room) const {
        const auto& block = blocks_[number];
        const auto& all = pack_.descriptors();
        const int64_t message = static_cast<int64_t>(reinterpret_cast<intptr_t>(room)) - block.at;
        for (int64_t i = block.first; i < block.last; ++i) {
            const BoxCopy copy = all[static_cast<size_t>(i)].at(sources_.data(), &message);
            if (block.last - block.first == 1 && copy.count == 0 && copy.cast == Cast::kNone && copy.source)
                return copy.source;
            copy_one(copy);
        }
        return room;
    }

    // The sum of the terms of a block's elements, which lie one after another.
    uint64_t sum(int64_t number, const std::byte* data) const {
        const auto& block = blocks_[number];
        uint64_t total = 0;
        for (int64_t i = block.first; i < block.last; ++i) {
            const auto& row = table_.row(i);
            for_each_run(
                row, [&](int64_t place, int64_t index) { total += sum_of_run(row, data + (place - block.at), index); });
        }
        return total;
    }

    // Codes a block into `slot`, which has room for its elements. Returns the bytes of the body.
    int64_t encode(int64_t number, Scratch& scratch, const std::byte* base, std::byte* slot, std::byte* entry,
                   uint64_t& difference, int64_t& changed) const {
        const auto& block = blocks_[number];
        const std::byte* old = base + block.at;
        const std::byte* now = fresh(number, scratch.fresh.get());
        const int64_t count = differing(now, old, block.item, block.elements, scratch.positions.get());
        changed = count;
        const int64_t room = block.elements * block.item - count * block.item;
        const int64_t gaps = count < room ? write_gaps(scratch.positions.get(), count, slot, room - 1) : -1;
        const bool dense = count > 0 && gaps < 0;
        const uint32_t words[2] = {dense ? kDense : static_cast<uint32_t>(count),
                                   dense || count == 0 ? 0 : static_cast<uint32_t>(gaps)};
        std::memcpy(entry, words, sizeof words);
        if (dense) {
            std::memcpy(slot, now, static_cast<size_t>(block.elements * block.item));
            difference = sum(number, now) - sum(number, old);
            return block.elements * block.item;
        }
        if (count == 0) return 0;
        difference = changes(block, scratch.positions.get(), count, now, old, slot + gaps);
        return gaps + count * block.item;
    }

  private:
    // Writes the changed values and returns their terms less the old ones.
    uint64_t changes(const DeltaTable::Block& block, const uint32_t* positions, int64_t count, const std::byte* now,
                     const std::byte* old, std::byte* values) const {
        switch (block.item) {
            case 1:
                return changes_of<uint8_t>(block, positions, count, now, old, values);
            case 2:
                return changes_of<uint16_t>(block, positions, count, now, old, values);
            case 4:
                return changes_of<uint32_t>(block, positions, count, now, old, values);
            default:
                return changes_of<uint64_t>(block, positions, count, now, old, values);
        }
    }

    template <typename Bits>
    uint64_t changes_of(const DeltaTable::Block& block, const uint32_t* positions, int64_t count, const std::byte* now,
                        const std::byte* old, std::byte* values) const {
        constexpr auto kSize = static_cast<int64_t>(sizeof(Bits));
        uint64_t sum = 0;
        for_each_position(table_, block, positions, count, [&](const auto& row, Cursor::Spot spot, int64_t k) {
            const int64_t at = positions[k] * kSize;
            std::memcpy(values + k * kSize, now + at, sizeof(Bits));
            sum += element_term(row.seed, spot.index, element_bits(now + at, kSize)) -
                   element_term(row.seed, spot.index, element_bits(old + at, kSize));
        });
        return sum;
    }

    const DeltaTable& table_;
    const Program& pack_;
    const DeltaTable::Block* blocks_;
    const std::vector<int64_t>& sources_;
};

}  // namespace

Encoded encode_delta(const DeltaTable& table, const Program& pack, int64_t chunk, const std::vector<int64_t>& sources,
                     const std::byte* base, std::byte* out, int threads) {
    check_rows(table, pack, chunk, sources);
    const Encoder encoder(table, pack, chunk, sources);
    const auto* blocks = table.begin(chunk);
    const int64_t count = table.end(chunk) - blocks;
    std::byte* bodies = out + kEntry * count;
    std::vector<int64_t> nbytes(static_cast<size_t>(count));
    std::atomic<uint64_t> difference{0};
    std::atomic<int64_t> changed{0}, dense{0};
    run_with_scratch(threads_for(threads, table.bytes(chunk)), count, [&](Scratch& scratch, int64_t i) {
        uint64_t terms = 0;
        int64_t elements = 0;
        const int64_t body = encoder.encode(i, scratch, base, bodies + blocks[i].at, out + kEntry * i, terms, elements);
        nbytes[static_cast<size_t>(i)] = body;
        difference += terms;
        changed += elements;
        if (body == blocks[i].elements * blocks[i].item) ++dense;
    });
    int64_t end = 0;
    for (int64_t i = 0; i < count; ++i) {  // each body now begins where it would if all were dense
        if (end != blocks[i].at)
            std::memmove(bodies + end, bodies + blocks[i].at, static_cast<size_t>(nbytes[static_cast<size_t>(i)]));
        end += nbytes[static_cast<size_t>(i)];
    }
    return {kEntry * count + end, difference, changed, dense};
}

uint64_t fill_delta_base(const DeltaTable& table, const Program& pack, int64_t chunk,
                         const std::vector<int64_t>& sources, std::byte* base, int threads) {
    check_rows(table, pack, chunk, sources);
    const Encoder encoder(table, pack, chunk, sources);
    const auto* blocks = table.begin(chunk);
    std::atomic<uint64_t> total{0};
    run_on_threads(threads_for(threads, table.bytes(chunk)), table.end(chunk) - blocks, [&](int64_t i) {
        std::byte* place = base + blocks[i].at;
        const std::byte* now = encoder.fresh(i, place);
        if (now != place) std::memcpy(place, now, static_cast<size_t>(blocks[i].elements * blocks[i].item));
        total += encoder.sum(i, place);
    });
    return total;
}

}  // namespace asyncmoe
