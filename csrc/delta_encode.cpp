// The sender's half of deltas: compare, and code what changed.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "delta.h"
#include "delta_walk.h"
#include "threads.h"

namespace asyncmoe {
namespace {

// Whether a row's elements lie one after another in the message, from byte `at`.
bool lies_at(const DeltaTable::Row& row, int64_t at) {
    int64_t step = row.run * row.item;
    for (int k = row.count - 1; k >= 0; --k) {
        const Dim& dim = row.dims[static_cast<size_t>(k)];
        if (dim.destination_stride != step) return false;
        step *= dim.extent;
    }
    return row.place == at;
}

// All that is written and read by offsets of the table must lie within what the program packs: every row is compared.
void check_rows(const DeltaTable& table, const Program& pack, int64_t chunk, const std::vector<int64_t>& sources) {
    pack.check(chunk, sources, {0});
    const auto wrong = [](const std::string& what) {
        return std::invalid_argument("delta of a program: got a table of other " + what +
                                     ", expected those of the program");
    };
    if (table.firsts() != pack.firsts() || table.bytes(chunk) != pack.bytes(chunk)) throw wrong("rows");
    const auto first = static_cast<size_t>(chunk);
    for (int64_t i = table.firsts()[first]; i < table.firsts()[first + 1]; ++i) {
        const int64_t bytes = table.row(i).elements * table.row(i).item;
        if (bytes != pack.descriptors()[static_cast<size_t>(i)].copy.bytes())
            throw wrong("rows: row " + std::to_string(i) + " has " + std::to_string(bytes) + " bytes");
    }
    table.check_message(chunk);
}

// Memory of one thread, of which only what is used is touched.
struct Scratch {
    std::unique_ptr<std::byte[]> fresh{new std::byte[kDeltaBlock]};
    std::unique_ptr<std::byte[]> gaps{new std::byte[kDeltaBlock]};
    std::unique_ptr<uint32_t[]> positions{new uint32_t[kDeltaBlock + kSlack]};
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

// Packs a box; its bytes follow each other in the message.
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
            pack_box(copy);
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

    struct Coded {
        Encoded::Body body;
        uint64_t difference;
        int64_t changed;
        bool dense;
    };
    // Codes a block, and writes its entry.
    Coded encode(int64_t number, Scratch& scratch, const std::byte* base, std::byte* entry) const {
        const auto& block = blocks_[number];
        const std::byte* old = base + block.at;
        const std::byte* now = fresh(number, scratch.fresh.get());
        const int64_t whole = block.elements * block.item;
        const int64_t count = differing(now, old, block.item, block.elements, scratch.positions.get());
        const int64_t room = whole - count * block.item - 1;  // else all elements take no more
        const int64_t gaps = room < 0 ? -1 : write_gaps(scratch.positions.get(), count, scratch.gaps.get(), room);
        const bool dense = gaps < 0;
        const uint32_t words[2] = {dense ? kDense : static_cast<uint32_t>(count),
                                   dense ? 0 : static_cast<uint32_t>(gaps)};
        std::memcpy(entry, words, sizeof words);
        const int64_t nbytes = dense ? whole : gaps + count * block.item;
        std::unique_ptr<std::byte[]> body(new std::byte[static_cast<size_t>(nbytes)]);
        if (dense) {
            std::memcpy(body.get(), now, static_cast<size_t>(whole));
            return {{std::move(body), nbytes}, sum(number, now) - sum(number, old), count, true};
        }
        std::memcpy(body.get(), scratch.gaps.get(), static_cast<size_t>(gaps));
        const uint64_t terms = changes(block, scratch.positions.get(), count, now, old, body.get() + gaps);
        return {{std::move(body), nbytes}, terms, count, false};
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

void DeltaTable::check_message(int64_t chunk) const {
    check_chunk(chunk);
    int64_t at = 0;
    for (int64_t i = firsts_[static_cast<size_t>(chunk)]; i < firsts_[static_cast<size_t>(chunk) + 1]; ++i) {
        if (!lies_at(row(i), at))
            throw std::invalid_argument("delta of a program: got a table of other places: row " + std::to_string(i) +
                                        " does not follow the one before, expected those of the program");
        at += row(i).elements * row(i).item;
    }
}

int64_t Encoded::nbytes() const {
    int64_t total = static_cast<int64_t>(entries.size());
    for (const Body& body : bodies) total += body.nbytes;
    return total;
}

void Encoded::write(std::byte* out) const {
    std::memcpy(out, entries.data(), entries.size());
    out += entries.size();
    for (const Body& body : bodies) {
        std::memcpy(out, body.bytes.get(), static_cast<size_t>(body.nbytes));
        out += body.nbytes;
    }
}

Encoded encode_delta(const DeltaTable& table, const Program& pack, int64_t chunk, const std::vector<int64_t>& sources,
                     const std::byte* base, int threads) {
    check_rows(table, pack, chunk, sources);
    const Encoder encoder(table, pack, chunk, sources);
    const auto count = static_cast<size_t>(table.end(chunk) - table.begin(chunk));
    Encoded made{std::vector<std::byte>(kEntry * count), std::vector<Encoded::Body>(count), 0, 0, 0};
    std::atomic<uint64_t> difference{0};
    std::atomic<int64_t> changed{0}, dense{0};
    run_with_scratch(threads_for(threads, table.bytes(chunk)), static_cast<int64_t>(count),
                     [&](Scratch& scratch, int64_t i) {
                         auto coded = encoder.encode(i, scratch, base, made.entries.data() + kEntry * i);
                         made.bodies[static_cast<size_t>(i)] = std::move(coded.body);
                         difference += coded.difference;
                         changed += coded.changed;
                         dense += coded.dense;
                     });
    made.difference = difference;
    made.changed = changed;
    made.dense = dense;
    return made;
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
