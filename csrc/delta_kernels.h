// The bodies of the delta kernels. A thread block handles one block of a table at a time; the functions also run on the
// host, with the same results as the CPU codec, bit for bit.
#pragma once

#include "delta.h"
#include "delta_team.h"

namespace asyncmoe {

// Number of elements that a thread handles at a time; adjacent threads handle adjacent groups.
constexpr int64_t kGroup = 8;
constexpr int kBatch = 4096;  // positions that are decoded at a time

ASYNCMOE_BOTH inline void add_found(DeltaFound& found, const DeltaFound& more) {
    found.sum += more.sum;
    found.changed += more.changed;
    found.faults += more.faults;
}

ASYNCMOE_BOTH inline int64_t groups_of(const DeltaBlock& block) { return (block.elements + kGroup - 1) / kGroup; }

// Calls visit(spot, element) for a thread's elements.
template <typename Visit>
ASYNCMOE_BOTH inline void for_elements(const DeltaView& view, const DeltaBlock& block, int thread, const Visit& visit) {
    DeltaWalk walk(view, block);
    for (int64_t group = thread; group < groups_of(block); group += kTeam) {
        const int64_t begin = group * kGroup;
        const int64_t end = begin + kGroup < block.elements ? begin + kGroup : block.elements;
        for (int64_t element = begin; element < end; ++element) visit(walk.at(element), element);
    }
}

// Finds where each block's body begins in a payload; returns the payload's size in bytes. All threads call it.
ASYNCMOE_BOTH inline uint64_t place_bodies(const DeltaView& view, const std::byte* payload, int64_t* bodies,
                                           OfTeam<uint64_t>& sums) {
    const int64_t share = (view.count + kTeam - 1) / kTeam;
    const auto for_blocks = [&](int thread, const auto& visit) {
        const int64_t end = (thread + 1) * share < view.count ? (thread + 1) * share : view.count;
        for (int64_t i = thread * share; i < end; ++i)
            visit(i, static_cast<uint64_t>(body_bytes(view.blocks[i], entry_of(payload, i))));
    };
    step([&](int thread) {
        uint64_t sum = 0;
        for_blocks(thread, [&](int64_t, uint64_t bytes) { sum += bytes; });
        sums.now[thread] = sum;
    });
    scan_sums(sums);
    const auto entries = static_cast<uint64_t>(kEntry * view.count);
    step([&](int thread) {
        uint64_t at = entries + sums.before(thread);
        for_blocks(thread, [&](int64_t i, uint64_t bytes) { bodies[i] = static_cast<int64_t>(at), at += bytes; });
    });
    return entries + sums.total();
}

// ---------------------------------------------------------------- the sender: compare, and encode the changes

// Memory that the threads of a block share.
struct CompareScratch {
    alignas(8) uint8_t changed[kDeltaBlock / kGroup];  // a bit for each element
    OfTeam<uint32_t> counts;                           // number of changed elements
    OfTeam<uint32_t> ends;                             // 1 + the last changed element, or 0
    OfTeam<uint32_t> gaps;                             // bytes
    OfTeam<uint64_t> sums;
};

// One bit for each of up to kGroup elements.
ASYNCMOE_BOTH inline uint8_t changed_in_group(const std::byte* now, const std::byte* old, int item, int64_t elements) {
    const auto bytes = static_cast<int>(elements) * item;
    const uint64_t element = item == 8 ? ~uint64_t{0} : (uint64_t{1} << 8 * item) - 1;
    uint32_t bits = 0;
    for (int at = 0; at < bytes; at += 8) {
        Unit fresh{0, 0}, kept{0, 0};
        const int width = bytes - at < 8 ? bytes - at : 8;
        load_bytes(fresh, 0, width, now + at);
        load_bytes(kept, 0, width, old + at);
        const uint64_t differing = fresh.low ^ kept.low;
        for (int k = 0; k < 8 / item; ++k)
            bits |= static_cast<uint32_t>((differing >> 8 * item * k & element) != 0) << (at / item + k);
    }
    return static_cast<uint8_t>(bits);
}

// Calls visit(position) for the changed elements among a thread's share, which are consecutive, in ascending order.
template <typename Visit>
ASYNCMOE_BOTH inline void for_changed(const CompareScratch& scratch, const DeltaBlock& block, int thread,
                                      const Visit& visit) {
    const int64_t groups = groups_of(block), share = (groups + kTeam - 1) / kTeam;
    const int64_t end = (thread + 1) * share < groups ? (thread + 1) * share : groups;
    for (int64_t group = thread * share; group < end; ++group)
        for (uint32_t bits = scratch.changed[group], k = 0; bits; bits >>= 1, ++k)
            if (bits & 1) visit(static_cast<uint32_t>(group * kGroup) + k);
}

// Finds the changes from a block's bytes `old` to `now`, and how to encode them. All threads call it.
ASYNCMOE_BOTH inline DeltaEntry compare_block(const DeltaBlock& block, const std::byte* now, const std::byte* old,
                                              CompareScratch& scratch) {
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

// Compares a block, and writes its entry; returns its part of the totals. All threads call it.
ASYNCMOE_BOTH inline DeltaFound survey(const DeltaView& view, int64_t number, const std::byte* now, std::byte* payload,
                                       CompareScratch& scratch) {
    const DeltaBlock& block = view.blocks[number];
    now += block.at;
    const DeltaEntry entry = compare_block(block, now, view.message + block.at, scratch);
    const uint64_t changed = scratch.counts.total();
    step([&](int thread) {
        DeltaWalk walk(view, block);
        uint64_t sum = 0;
        for_changed(scratch, block, thread, [&](uint32_t position) {
            const DeltaWalk::Spot spot = walk.at(position);
            sum += element_term(spot.seed, spot.index, load_element(now + position * block.item, block.item)) -
                   element_term(spot.seed, spot.index, load_element(spot.place, block.item));
        });
        scratch.sums.now[thread] = sum;
        if (thread == 0) put_entry(payload, number, entry);
    });
    return {0, sum_of_team(scratch.sums), changed, 0};
}

// Writes a block's body, once its entry is written and its place is known, and overwrites the message last sent with
// the current block. All threads call it.
ASYNCMOE_BOTH inline void code_block(const DeltaView& view, int64_t number, const std::byte* now, std::byte* payload,
                                     int64_t place, CompareScratch& scratch) {
    const DeltaBlock& block = view.blocks[number];
    const DeltaEntry entry = entry_of(payload, number);
    std::byte *old = view.message + block.at, *body = payload + place;
    now += block.at;
    if (entry.changed == 0) return;
    if (entry.changed == kDense) {
        const int64_t bytes = block.elements * block.item;
        step([&](int thread) {
            for (int64_t at = thread * kUnit; at < bytes; at += kTeam * kUnit) {
                Unit unit{0, 0};
                const auto width = static_cast<int>(bytes - at < kUnit ? bytes - at : kUnit);
                load_bytes(unit, 0, width, now + at);
                store_bytes(unit, 0, width, body + at);
                store_bytes(unit, 0, width, old + at);
            }
        });
        return;
    }
    compare_block(block, now, old, scratch);
    step([&](int thread) {
        std::byte* gaps = body + scratch.gaps.before(thread);
        std::byte* values = body + scratch.gaps.total() + int64_t{scratch.counts.before(thread)} * block.item;
        uint32_t next = scratch.ends.before(thread);
        for_changed(scratch, block, thread, [&](uint32_t position) {
            gaps = put_gap(gaps, position - next);
            next = position + 1;
            const uint64_t bits = load_element(now + position * block.item, block.item);
            store_element(values, block.item, bits);
            store_element(old + position * block.item, block.item, bits);
            values += block.item;
        });
    });
}

// ---------------------------------------------------------------- the receiver: verify, scatter, and read elements

struct ApplyScratch {
    uint32_t positions[kBatch];
    int count;         // number of positions
    int64_t at, next;  // bytes of gaps decoded so far, and the lowest position still possible
    OfTeam<uint64_t> sums;
};

// DeltaTable::apply for one block, whose body lies within the payload. A body with a position that does not fit is a
// fault, and may be partly written. All threads call it.
ASYNCMOE_BOTH inline DeltaFound apply_coded(const DeltaView& view, const DeltaBlock& block, DeltaEntry entry,
                                            const std::byte* body, bool write, ApplyScratch& scratch) {
    const bool dense = entry.changed == kDense;
    if (dense ? entry.gaps != 0 : entry.changed > block.elements) return {0, 0, 0, 1};
    // Computes the new term minus the old one of an element, and with `write` writes the element.
    const auto change = [&](const DeltaWalk::Spot& spot, const std::byte* value) {
        const uint64_t before = load_element(spot.place, block.item), after = load_element(value, block.item);
        if (write) store_element(spot.place, block.item, after);
        return element_term(spot.seed, spot.index, after) - element_term(spot.seed, spot.index, before);
    };
    step([&](int thread) {
        uint64_t sum = 0;
        if (dense)
            for_elements(view, block, thread,
                         [&](const DeltaWalk::Spot& spot, int64_t i) { sum += change(spot, body + i * block.item); });
        scratch.sums.now[thread] = sum;
        if (thread == 0) scratch.at = scratch.next = 0;
    });
    bool good = true;
    for (int64_t done = 0; !dense && good && done < entry.changed; done += kBatch) {
        const auto wanted = static_cast<int>(entry.changed - done < kBatch ? entry.changed - done : kBatch);
        step([&](int thread) {
            if (thread != 0) return;
            // Only one thread decodes, because where a gap begins depends on all gaps before it.
            int count = 0;
            while (count < wanted && take_gap(body, entry.gaps, block.elements, scratch.at, scratch.next))
                scratch.positions[count++] = static_cast<uint32_t>(scratch.next++);
            scratch.count = count;
        });
        good = scratch.count == wanted;
        const std::byte* values = body + entry.gaps + done * block.item;
        step([&](int thread) {
            DeltaWalk walk(view, block);
            for (int k = thread; k < scratch.count; k += kTeam)
                scratch.sums.now[thread] += change(walk.at(scratch.positions[k]), values + k * block.item);
        });
    }
    good = good && (dense || scratch.at == entry.gaps);
    return {0, sum_of_team(scratch.sums), 0, good ? 0u : 1u};
}

// The sum of the terms of a block's elements. All threads call it.
ASYNCMOE_BOTH inline uint64_t read_block(const DeltaView& view, const DeltaBlock& block, OfTeam<uint64_t>& sums) {
    step([&](int thread) {
        uint64_t sum = 0;
        for_elements(view, block, thread, [&](const DeltaWalk::Spot& spot, int64_t) {
            sum += element_term(spot.seed, spot.index, load_element(spot.place, block.item));
        });
        sums.now[thread] = sum;
    });
    return sum_of_team(sums);
}

}  // namespace asyncmoe
