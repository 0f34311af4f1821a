#include "delta.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "threads.h"

namespace asyncmoe {
namespace {

std::invalid_argument wrong_payload() {
    return std::invalid_argument("payload of a delta: got one that does not fit, expected one of this message");
}

// Where a changed element lies, and what its term is computed from besides its bits.
struct Target {
    std::byte* place;
    uint64_t seed;
};

template <typename Bits>
uint64_t scatter(const DeltaView& view, const DeltaBlock& block, const std::vector<uint32_t>& positions,
                 const std::byte* values, bool write) {
    constexpr auto kSize = static_cast<int64_t>(sizeof(Bits));
    constexpr size_t kAhead = 24;  // elements, spread over as many cache lines
    std::vector<Target> targets(positions.size());
    DeltaWalk walk(view, block);
    for (size_t k = 0; k < positions.size(); ++k) {
        const DeltaWalk::Spot spot = walk.at(positions[k]);
        targets[k] = {spot.place, spot.seed + static_cast<uint64_t>(spot.index + 1) * kGolden};
    }
    uint64_t sum = 0;
    for (size_t k = 0; k < targets.size(); ++k, values += kSize) {
        if (k + kAhead < targets.size()) __builtin_prefetch(targets[k + kAhead].place);
        const Target& target = targets[k];
        const uint64_t before = element_bits(target.place, kSize), after = element_bits(values, kSize);
        if (write) std::memcpy(target.place, values, sizeof(Bits));
        sum += mix(target.seed + after) - mix(target.seed + before);
    }
    return sum;
}

uint64_t overwrite(const DeltaView& view, const DeltaBlock& block, const std::byte* values, bool write) {
    uint64_t sum = 0;
    DeltaWalk walk(view, block);
    for (int64_t element = 0; element < block.elements;) {
        const DeltaWalk::Spot spot = walk.at(element);
        const std::byte* from = values + element * block.item;
        sum += sum_of_elements(from, block.item, spot.left, spot.seed, spot.index) -
               sum_of_elements(spot.place, block.item, spot.left, spot.seed, spot.index);
        if (write) std::memcpy(spot.place, from, static_cast<size_t>(spot.left * block.item));
        element += spot.left;
    }
    return sum;
}

uint64_t apply_block(const DeltaView& view, const DeltaBlock& block, DeltaEntry entry, const std::byte* body,
                     bool write) {
    if (entry.changed == kDense) {
        if (entry.gaps != 0) throw wrong_payload();
        return overwrite(view, block, body, write);
    }
    if (entry.changed > block.elements) throw wrong_payload();
    std::vector<uint32_t> positions(entry.changed);
    if (!read_gaps(body, entry.gaps, entry.changed, block.elements, positions.data())) throw wrong_payload();
    const auto run = block.item == 1   ? scatter<uint8_t>
                     : block.item == 2 ? scatter<uint16_t>
                     : block.item == 4 ? scatter<uint32_t>
                                       : scatter<uint64_t>;
    return run(view, block, positions, body + entry.gaps, write);
}

}  // namespace

DeltaTable::DeltaTable(const int64_t* rows, int64_t count, std::vector<int64_t> firsts,
                       const std::vector<int64_t>& seeds)
    : firsts_(std::move(firsts)) {
    if (firsts_.empty() || firsts_.front() != 0 || firsts_.back() != count ||
        !std::is_sorted(firsts_.begin(), firsts_.end()))
        throw std::invalid_argument("first rows of chunks of a delta: got " + std::to_string(firsts_.size()) +
                                    " numbers, expected ascending ones from 0 to " + std::to_string(count));
    const auto check = [](const char* what, int64_t row, int64_t value, bool good, const std::string& expected) {
        if (!good)
            throw std::invalid_argument(std::string(what) + " of delta row " + std::to_string(row) + ": got " +
                                        std::to_string(value) + ", expected " + expected);
    };
    rows_.reserve(static_cast<size_t>(count));
    std::vector<int64_t> items;
    const auto descriptors = read_rows(rows, nullptr, count);
    for (int64_t i = 0; i < count; ++i) {
        const Descriptor& found = descriptors[static_cast<size_t>(i)];
        const int64_t item = rows[i * kColumns + kItem], bytes = found.copy.bytes();
        const auto known = static_cast<int64_t>(seeds.size());
        check("item bytes", i, item, item == 1 || item == 2 || item == 4 || item == 8, "1, 2, 4 or 8");
        check("tensor", i, found.source_index, found.source_index >= 0 && found.source_index < known,
              "0 to " + std::to_string(known - 1));
        check("bytes", i, bytes, bytes > 0 && bytes <= kDeltaBlock, "1 to " + std::to_string(kDeltaBlock));
        DeltaRow row{0,
                     found.destination_offset,
                     found.source_offset / item,
                     static_cast<uint64_t>(seeds[static_cast<size_t>(found.source_index)]),
                     static_cast<int32_t>(found.destination_index),
                     static_cast<uint32_t>(bytes / item),
                     static_cast<uint32_t>(found.copy.run / item),
                     found.copy.count,
                     {}};
        for (int k = 0; k < row.count; ++k) {
            const Dim& dim = found.copy.dims[static_cast<size_t>(k)];
            row.dims[k] = {static_cast<uint32_t>(dim.extent), dim.source_stride / item, dim.destination_stride};
        }
        bases_ = std::max(bases_, found.destination_index + 1);
        rows_.push_back(row);
        items.push_back(item);
    }
    add_blocks(items);
}

void DeltaTable::add_blocks(const std::vector<int64_t>& items) {
    for (size_t c = 0; c + 1 < firsts_.size(); ++c) {
        first_block_.push_back(static_cast<int64_t>(blocks_.size()));
        int64_t at = 0;
        for (int64_t i = firsts_[c]; i < firsts_[c + 1]; ++i) {
            DeltaRow& row = rows_[static_cast<size_t>(i)];
            const int64_t item = items[static_cast<size_t>(i)];
            if (i == firsts_[c] || blocks_.back().item != item ||
                (blocks_.back().elements + row.elements) * item > kDeltaBlock)
                blocks_.push_back({i, i, item, 0, at});
            row.begin = blocks_.back().elements;
            blocks_.back().last = i + 1;
            blocks_.back().elements += row.elements;
            at += row.elements * item;
        }
        bytes_.push_back(at);
    }
    first_block_.push_back(static_cast<int64_t>(blocks_.size()));
}

void DeltaTable::check_chunk(int64_t chunk) const {
    if (chunk < 0 || chunk >= chunks())
        throw std::invalid_argument("chunk of a delta: got " + std::to_string(chunk) + ", expected below " +
                                    std::to_string(chunks()));
}

int64_t DeltaTable::bytes(int64_t chunk) const {
    check_chunk(chunk);
    return bytes_[static_cast<size_t>(chunk)];
}

int64_t DeltaTable::bound(int64_t chunk) const {
    const auto c = static_cast<size_t>(chunk);
    return bytes(chunk) + kEntry * (first_block_[c + 1] - first_block_[c]);
}

int64_t DeltaTable::most_blocks() const {
    int64_t most = 0;
    for (size_t c = 0; c + 1 < first_block_.size(); ++c) most = std::max(most, first_block_[c + 1] - first_block_[c]);
    return most;
}

DeltaView DeltaTable::view(int64_t chunk, const std::vector<int64_t>& bases, std::byte* message) const {
    check_chunk(chunk);
    if (!message && (static_cast<int64_t>(bases.size()) < bases_ || std::count(bases.begin(), bases.end(), 0)))
        throw std::invalid_argument("base addresses of a delta: got " + std::to_string(bases.size()) +
                                    ", expected at least " + std::to_string(bases_) + ", none of them null");
    const int64_t first = first_block_[static_cast<size_t>(chunk)];
    const int64_t count = first_block_[static_cast<size_t>(chunk) + 1] - first;
    return {blocks_.data() + first, rows_.data(), bases.data(), message, count};
}

void DeltaTable::check(int64_t chunk, const Program& pack) const {
    bool same = firsts_ == pack.firsts() && bytes(chunk) == pack.bytes(chunk) && pack.wire() == Wire::kDestination;
    const auto c = static_cast<size_t>(chunk);
    for (int64_t k = first_block_[c]; same && k < first_block_[c + 1]; ++k) {
        const DeltaBlock& block = blocks_[static_cast<size_t>(k)];
        for (int64_t i = block.first; i < block.last; ++i)
            same &= rows_[static_cast<size_t>(i)].elements * block.item ==
                    pack.descriptors()[static_cast<size_t>(i)].copy.bytes();
    }
    if (!same)
        throw std::invalid_argument("delta of a program: got a table of other rows, expected those of the program");
}

uint64_t DeltaTable::read(int64_t chunk, const std::vector<int64_t>& bases, std::byte* message, int threads) const {
    const DeltaView where = view(chunk, bases, message);
    std::atomic<uint64_t> sum{0};
    run_on_threads(threads_for(threads, bytes(chunk)), where.count, [&](int64_t i) {
        const DeltaBlock& block = where.blocks[i];
        DeltaWalk walk(where, block);
        uint64_t part = 0;
        for (int64_t element = 0; element < block.elements;) {
            const DeltaWalk::Spot spot = walk.at(element);
            part += sum_of_elements(spot.place, block.item, spot.left, spot.seed, spot.index);
            element += spot.left;
        }
        sum += part;
    });
    return sum;
}

uint64_t DeltaTable::apply(int64_t chunk, const std::byte* payload, int64_t nbytes, const std::vector<int64_t>& bases,
                           bool write, int threads) const {
    const DeltaView where = view(chunk, bases, nullptr);
    if (nbytes < kEntry * where.count || nbytes > bound(chunk)) throw wrong_payload();
    std::vector<int64_t> begins;
    int64_t at = kEntry * where.count;
    for (int64_t i = 0; i < where.count; ++i) {
        begins.push_back(at);
        at += body_bytes(where.blocks[i], entry_of(payload, i));
    }
    if (at != nbytes) throw wrong_payload();
    std::atomic<uint64_t> sum{0};
    run_on_threads(threads_for(threads, bytes(chunk)), where.count, [&](int64_t i) {
        sum +=
            apply_block(where, where.blocks[i], entry_of(payload, i), payload + begins[static_cast<size_t>(i)], write);
    });
    return sum;
}

}  // namespace asyncmoe
