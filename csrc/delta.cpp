#include "delta.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "delta_walk.h"
#include "threads.h"

namespace asyncmoe {
namespace {

struct Entry {
    uint32_t changed;
    uint32_t gaps;
};

Entry entry_of(const std::byte* payload, int64_t block) {
    Entry entry;
    std::memcpy(&entry, payload + kEntry * block, sizeof entry);
    return entry;
}

int64_t body_bytes(const DeltaTable::Block& block, Entry entry) {
    return entry.changed == kDense ? block.elements * block.item : entry.gaps + entry.changed * block.item;
}

std::byte* at_base(const DeltaTable::Row& row, const std::vector<int64_t>& bases) {
    return reinterpret_cast<std::byte*>(bases[static_cast<size_t>(row.base)]);
}

// Where a changed element lies, and what its term is computed from besides its bits.
struct Target {
    std::byte* place;
    uint64_t seed;
};

template <typename Bits>
uint64_t scatter(const DeltaTable& table, const DeltaTable::Block& block, const std::vector<uint32_t>& positions,
                 const std::byte* values, const std::vector<int64_t>& bases, bool write) {
    constexpr auto kSize = static_cast<int64_t>(sizeof(Bits));
    constexpr int64_t kAhead = 24;  // elements, which are spread over as many lines of memory
    const auto count = static_cast<int64_t>(positions.size());
    std::vector<Target> targets(positions.size());
    for_each_position(table, block, positions.data(), count,
                      [&](const DeltaTable::Row& row, Cursor::Spot spot, int64_t k) {
                          targets[static_cast<size_t>(k)] = {
                              at_base(row, bases) + spot.place,
                              row.seed + static_cast<uint64_t>(spot.index + 1) * kGolden,
                          };
                      });
    uint64_t sum = 0;
    for (int64_t k = 0; k < count; ++k) {
        if (k + kAhead < count) __builtin_prefetch(targets[static_cast<size_t>(k + kAhead)].place);
        const Target& target = targets[static_cast<size_t>(k)];
        const uint64_t before = element_bits(target.place, kSize), after = element_bits(values + k * kSize, kSize);
        if (write) std::memcpy(target.place, values + k * kSize, sizeof(Bits));
        sum += mix(target.seed + after) - mix(target.seed + before);
    }
    return sum;
}

uint64_t overwrite(const DeltaTable& table, const DeltaTable::Block& block, const std::byte* values,
                   const std::vector<int64_t>& bases, bool write) {
    uint64_t sum = 0;
    for (int64_t number = block.first; number < block.last; ++number) {
        const DeltaTable::Row& row = table.row(number);
        std::byte* base = at_base(row, bases);
        const int64_t bytes = row.run * row.item;
        for_each_run(row, [&](int64_t place, int64_t index) {
            sum += sum_of_run(row, values, index) - sum_of_run(row, base + place, index);
            if (write) std::memcpy(base + place, values, static_cast<size_t>(bytes));
            values += bytes;
        });
    }
    return sum;
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
    const auto descriptors = read_rows(rows, nullptr, count);
    for (int64_t i = 0; i < count; ++i) {
        const Descriptor& found = descriptors[static_cast<size_t>(i)];
        const int64_t item = rows[i * kColumns + kItem];
        check("item bytes", i, item, item == 1 || item == 2 || item == 4 || item == 8, "1, 2, 4 or 8");
        const auto known = static_cast<int64_t>(seeds.size());
        check("tensor", i, found.source_index, found.source_index >= 0 && found.source_index < known,
              "0 to " + std::to_string(known - 1));
        const int64_t bytes = found.copy.bytes();
        check("bytes", i, bytes, bytes > 0 && bytes <= kDeltaBlock, "1 to " + std::to_string(kDeltaBlock));
        Row row{found.destination_index,
                item,
                static_cast<uint64_t>(seeds[static_cast<size_t>(found.source_index)]),
                bytes / item,
                found.destination_offset,
                found.source_offset / item,
                found.copy.run / item,
                found.copy.count,
                found.copy.dims};
        for (int k = 0; k < row.count; ++k) row.dims[static_cast<size_t>(k)].source_stride /= item;
        bases_ = std::max(bases_, row.base + 1);
        rows_.push_back(row);
    }
    add_blocks();
}

void DeltaTable::add_blocks() {
    for (size_t c = 0; c + 1 < firsts_.size(); ++c) {
        first_block_.push_back(static_cast<int64_t>(blocks_.size()));
        int64_t at = 0;
        for (int64_t i = firsts_[c]; i < firsts_[c + 1]; ++i) {
            const Row& next = row(i);
            const bool fresh = i == firsts_[c] || blocks_.back().item != next.item ||
                               (blocks_.back().elements + next.elements) * next.item > kDeltaBlock;
            if (fresh) blocks_.push_back({i, i, next.item, 0, at});
            blocks_.back().last = i + 1;
            blocks_.back().elements += next.elements;
            at += next.elements * next.item;
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

void DeltaTable::check_bases(const std::vector<int64_t>& bases, bool null) const {
    if (static_cast<int64_t>(bases.size()) < bases_)
        throw std::invalid_argument("base addresses of a delta: got " + std::to_string(bases.size()) +
                                    ", expected at least " + std::to_string(bases_));
    if (!null && std::count(bases.begin(), bases.end(), 0))
        throw std::invalid_argument("base addresses of a delta: got null, expected memory");
}

int64_t DeltaTable::bytes(int64_t chunk) const {
    check_chunk(chunk);
    return bytes_[static_cast<size_t>(chunk)];
}

const DeltaTable::Block* DeltaTable::begin(int64_t chunk) const {
    check_chunk(chunk);
    return blocks_.data() + first_block_[static_cast<size_t>(chunk)];
}

const DeltaTable::Block* DeltaTable::end(int64_t chunk) const {
    check_chunk(chunk);
    return blocks_.data() + first_block_[static_cast<size_t>(chunk) + 1];
}

int64_t DeltaTable::bound(int64_t chunk) const { return bytes(chunk) + kEntry * (end(chunk) - begin(chunk)); }

uint64_t DeltaTable::read(int64_t chunk, const std::vector<int64_t>& bases, int threads) const {
    check_bases(bases, true);
    const Block* blocks = begin(chunk);
    std::atomic<uint64_t> sum{0};
    run_on_threads(threads_for(threads, bytes(chunk)), end(chunk) - blocks, [&](int64_t i) {
        uint64_t part = 0;
        for (int64_t number = blocks[i].first; number < blocks[i].last; ++number) {
            const Row& one = row(number);
            const std::byte* base = at_base(one, bases);
            for_each_run(one, [&](int64_t place, int64_t index) {
                part += sum_of_run(one, base ? base + place : nullptr, index);
            });
        }
        sum += part;
    });
    return sum;
}

std::optional<std::string> DeltaTable::fault(int64_t chunk, const std::byte* payload, int64_t nbytes,
                                             int threads) const {
    const Block* blocks = begin(chunk);
    const int64_t count = end(chunk) - blocks;
    if (nbytes < kEntry * count || nbytes > bound(chunk))
        return "payload: got " + std::to_string(nbytes) + " bytes, expected " + std::to_string(kEntry * count) +
               " to " + std::to_string(bound(chunk));
    std::vector<int64_t> begins;
    int64_t at = kEntry * count;
    const auto in_block = [](int64_t i) { return " in block " + std::to_string(i); };
    for (int64_t i = 0; i < count; ++i) {
        const Entry entry = entry_of(payload, i);
        if (entry.changed != kDense && entry.changed > blocks[i].elements)
            return "changed elements" + in_block(i) + ": got " + std::to_string(entry.changed) + ", expected at most " +
                   std::to_string(blocks[i].elements);
        if (entry.changed == kDense && entry.gaps != 0) return "gaps" + in_block(i) + ": got some, expected none";
        begins.push_back(at);
        at += body_bytes(blocks[i], entry);
        if (at > nbytes)
            return "payload: got " + std::to_string(nbytes) + " bytes, expected at least " + std::to_string(at);
    }
    if (at != nbytes) return "payload: got " + std::to_string(nbytes) + " bytes, expected " + std::to_string(at);
    std::atomic<int64_t> bad{-1};
    run_on_threads(threads_for(threads, nbytes), count, [&](int64_t i) {
        const Entry entry = entry_of(payload, i);
        if (entry.changed == kDense) return;
        std::vector<uint32_t> positions(entry.changed);
        const std::byte* gaps = payload + begins[static_cast<size_t>(i)];
        if (!read_gaps(gaps, entry.gaps, entry.changed, blocks[i].elements, positions.data())) bad = i;
    });
    if (bad < 0) return std::nullopt;
    return "positions" + in_block(bad) + ": got some outside the block or badly coded, expected " +
           std::to_string(entry_of(payload, bad).changed) + " ascending ones";
}

uint64_t DeltaTable::apply(int64_t chunk, const std::byte* payload, int64_t nbytes, const std::vector<int64_t>& bases,
                           bool write, int threads) const {
    check_bases(bases, false);
    const Block* blocks = begin(chunk);
    const int64_t count = end(chunk) - blocks;
    const auto wrong = [] { return std::invalid_argument("payload of a delta: got a fault, expected none"); };
    if (nbytes < kEntry * count) throw wrong();
    std::vector<int64_t> begins;
    int64_t at = kEntry * count;
    for (int64_t i = 0; i < count; ++i) {
        begins.push_back(at);
        at += body_bytes(blocks[i], entry_of(payload, i));
    }
    if (at != nbytes) throw wrong();
    std::atomic<uint64_t> sum{0};
    std::atomic<bool> bad{false};
    run_on_threads(threads_for(threads, bytes(chunk)), count, [&](int64_t i) {
        const Block& block = blocks[i];
        const Entry entry = entry_of(payload, i);
        const std::byte* body = payload + begins[static_cast<size_t>(i)];
        if (entry.changed == kDense) {
            sum += overwrite(*this, block, body, bases, write);
            return;
        }
        if (entry.changed == 0) return;
        std::vector<uint32_t> positions(std::min<size_t>(entry.changed, static_cast<size_t>(block.elements)));
        if (entry.changed > block.elements ||
            !read_gaps(body, entry.gaps, entry.changed, block.elements, positions.data())) {
            bad = true;
            return;
        }
        const auto run = block.item == 1   ? scatter<uint8_t>
                         : block.item == 2 ? scatter<uint16_t>
                         : block.item == 4 ? scatter<uint32_t>
                                           : scatter<uint64_t>;
        sum += run(*this, block, positions, body + entry.gaps, bases, write);
    });
    if (bad) throw wrong();
    return sum;
}

}  // namespace asyncmoe
