// The sender's half of the delta kernels: compare a message with what was sent before, and code what changed.
#pragma once

#include "delta_unit.h"

namespace asyncmoe {

// Memory that the threads of a block share.
struct CompareScratch {
    alignas(8) uint8_t changed[kDeltaBlock / kGroup];  // a bit for each element
    OfTeam<uint32_t> counts;                           // changed elements
    OfTeam<uint32_t> ends;                             // 1 + the last changed element, or 0
    OfTeam<uint32_t> gaps;                             // bytes
    OfTeam<uint64_t> sums;
};

// One bit for each of a word's elements.
ASYNCMOE_BOTH inline uint32_t changed_in_word(uint64_t differing, int item) {
    if (item == 8) return differing != 0;
    const uint64_t element = (uint64_t{1} << 8 * item) - 1;
    uint32_t bits = 0;
    for (int k = 0; k < 8 / item; ++k) bits |= static_cast<uint32_t>((differing >> 8 * item * k & element) != 0) << k;
    return bits;
}

// One bit for each of up to kGroup elements.
ASYNCMOE_BOTH inline uint8_t changed_in_group(const std::byte* now, const std::byte* old, int item, int64_t elements) {
    const auto bytes = static_cast<int>(elements) * item;
    uint32_t bits = 0;
    for (int at = 0; at < bytes; at += 8) {
        Unit fresh{0, 0}, kept{0, 0};
        const int width = bytes - at < 8 ? bytes - at : 8;
        load_bytes(fresh, 0, width, now + at);
        load_bytes(kept, 0, width, old + at);
        bits |= changed_in_word(fresh.low ^ kept.low, item) << at / item;
    }
    return static_cast<uint8_t>(bits);
}

// Calls visit(position) for the changed elements among a thread's share, which are consecutive, in ascending order.
template <typename Visit>
ASYNCMOE_BOTH inline void for_changed(const CompareScratch& scratch, const DeltaTable::Block& block, int thread,
                                      const Visit& visit) {
    const int64_t groups = groups_of(block), share = (groups + kTeam - 1) / kTeam;
    const int64_t end = (thread + 1) * share < groups ? (thread + 1) * share : groups;
    for (int64_t group = thread * share; group < end; ++group)
        for (uint32_t bits = scratch.changed[group], k = 0; bits; bits >>= 1, ++k)
            if (bits & 1) visit(static_cast<uint32_t>(group * kGroup) + k);
}

ASYNCMOE_BOTH inline uint32_t gap_bytes(uint32_t gap) { return gap < kOneByte ? 1 : gap < kTwoBytes ? 2 : 4; }

// Finds what changed in a block, of which `now` and `old` are the bytes, and how it is coded. For all threads.
ASYNCMOE_BOTH inline DeltaEntry compare_block(const DeltaTable::Block& block, const std::byte* now,
                                              const std::byte* old, CompareScratch& scratch) {
    const auto item = static_cast<int>(block.item);
    step([&](int thread) {
        for (int64_t group = thread; group < groups_of(block); group += kTeam) {
            const int64_t at = group * kGroup, left = block.elements - at;
            scratch.changed[group] =
                changed_in_group(now + at * item, old + at * item, item, left < kGroup ? left : kGroup);
        }
    });
    step([&](int thread) {
        uint32_t count = 0, end = 0;
        for_changed(scratch, block, thread, [&](uint32_t position) { ++count, end = position + 1; });
        scratch.counts.now[thread] = count;
        scratch.ends.now[thread] = end;
    });
    scan_sums(scratch.counts);
    scan_largest(scratch.ends);
    step([&](int thread) {
        uint32_t bytes = 0, next = scratch.ends.before(thread);
        for_changed(scratch, block, thread,
                    [&](uint32_t position) { bytes += gap_bytes(position - next), next = position + 1; });
        scratch.gaps.now[thread] = bytes;
    });
    scan_sums(scratch.gaps);
    const uint32_t changed = scratch.counts.total(), gaps = scratch.gaps.total();
    const int64_t coded = int64_t{gaps} + int64_t{changed} * item;
    return coded < block.elements * item ? DeltaEntry{changed, gaps} : DeltaEntry{kDense, 0};
}

// The new terms less the old ones, after `compare_block`. For all threads.
ASYNCMOE_BOTH inline uint64_t difference_of_block(const DeltaView& view, const DeltaTable::Block& block,
                                                  const std::byte* now, const std::byte* old, CompareScratch& scratch) {
    step([&](int thread) {
        BlockWalk walk(view, block);
        uint64_t sum = 0;
        for_changed(scratch, block, thread, [&](uint32_t position) {
            const BlockWalk::Spot spot = walk.at(position);
            const int64_t at = position * block.item;
            sum += element_term(walk.row().seed, spot.index, load_element(now + at, block.item)) -
                   element_term(walk.row().seed, spot.index, load_element(old + at, block.item));
        });
        scratch.sums.now[thread] = sum;
    });
    return sum_of_team(scratch.sums);
}

ASYNCMOE_BOTH inline std::byte* put_gap(std::byte* to, uint32_t gap) {
    if (gap < kOneByte) {
        *to++ = static_cast<std::byte>(gap);
    } else if (gap < kTwoBytes) {
        *to++ = static_cast<std::byte>(kOneByte + ((gap - kOneByte) >> 8));
        *to++ = static_cast<std::byte>(gap - kOneByte);
    } else {
        *to++ = static_cast<std::byte>(kLong);
        for (int shift = 0; shift < 24; shift += 8) *to++ = static_cast<std::byte>(gap >> shift);
    }
    return to;
}

// Writes a block's body, after `compare_block`, unless all elements are sent.
ASYNCMOE_BOTH inline void write_body(const DeltaTable::Block& block, const std::byte* now, std::byte* body,
                                     const CompareScratch& scratch) {
    step([&](int thread) {
        std::byte* gaps = body + scratch.gaps.before(thread);
        std::byte* values = body + scratch.gaps.total() + int64_t{scratch.counts.before(thread)} * block.item;
        uint32_t next = scratch.ends.before(thread);
        for_changed(scratch, block, thread, [&](uint32_t position) {
            gaps = put_gap(gaps, position - next);
            next = position + 1;
            store_element(values, block.item, load_element(now + position * block.item, block.item));
            values += block.item;
        });
    });
}

// Writes all elements of a block as its body.
ASYNCMOE_BOTH inline void write_whole(const DeltaTable::Block& block, const std::byte* now, std::byte* body) {
    const int64_t bytes = block.elements * block.item;
    step([&](int thread) {
        for (int64_t at = thread * kUnit; at < bytes; at += kTeam * kUnit) {
            Unit unit{0, 0};
            const auto width = static_cast<int>(bytes - at < kUnit ? bytes - at : kUnit);
            load_bytes(unit, 0, width, now + at);
            store_bytes(unit, 0, width, body + at);
        }
    });
}

// ---------------------------------------------------------------- the two passes over a chunk

// Compares a block, and writes its entry; returns what it adds to what is found. For all threads.
ASYNCMOE_BOTH inline DeltaFound survey(const DeltaView& view, int64_t number, const std::byte* now,
                                       const std::byte* old, std::byte* payload, CompareScratch& scratch) {
    const auto& block = view.blocks[number];
    const DeltaEntry entry = compare_block(block, now + block.at, old + block.at, scratch);
    const uint64_t changed = scratch.counts.total();
    const uint64_t sum = difference_of_block(view, block, now + block.at, old + block.at, scratch);
    step([&](int thread) {
        if (thread == 0) store_element(payload + kEntry * number, kEntry, uint64_t{entry.gaps} << 32 | entry.changed);
    });
    return {sum, changed, entry.changed == kDense, 0, 0};
}

// Writes a block's body, once its entry is written and its place is known. For all threads.
ASYNCMOE_BOTH inline void code_block(const DeltaView& view, int64_t number, const std::byte* now, const std::byte* old,
                                     std::byte* payload, int64_t body, CompareScratch& scratch) {
    const auto& block = view.blocks[number];
    const DeltaEntry entry = entry_of(payload, number);
    if (entry.changed == kDense) {
        write_whole(block, now + block.at, payload + body);
    } else if (entry.changed != 0) {
        compare_block(block, now + block.at, old + block.at, scratch);
        write_body(block, now + block.at, payload + body, scratch);
    }
}

}  // namespace asyncmoe
