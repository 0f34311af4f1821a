// The receiver's half of the delta kernels: prove, scatter, and read what is held.
#pragma once

#include "delta_unit.h"

namespace asyncmoe {

constexpr int kBatch = 4096;  // positions that are decoded at a time

struct ApplyScratch {
    uint32_t positions[kBatch];
    int count;         // of them
    int64_t at, next;  // bytes of gaps that are decoded, and the first position that may come
    OfTeam<uint64_t> sums;
};

// Computes the new term less the old one of an element, and writes the element if asked.
ASYNCMOE_BOTH inline uint64_t change(std::byte* place, const std::byte* value, int64_t item, uint64_t seed,
                                     int64_t index, bool write) {
    const uint64_t before = load_element(place, item), after = load_element(value, item);
    if (write) store_element(place, item, after);
    return element_term(seed, index, after) - element_term(seed, index, before);
}

// As DeltaTable::apply for one block, whose body lies within the payload. Returns the sum and, for a body of which a
// position does not fit, false; it may then be partly written. For all threads.
struct Applied {
    uint64_t sum;
    bool good;
};
ASYNCMOE_BOTH inline Applied apply_block(const DeltaView& view, const DeltaTable::Block& block, DeltaEntry entry,
                                         const std::byte* body, bool write, ApplyScratch& scratch) {
    const bool dense = entry.changed == kDense;
    if (dense ? entry.gaps != 0 : entry.changed > block.elements) return {0, false};
    step([&](int thread) {
        uint64_t sum = 0;
        if (dense)
            for_elements(view, block, thread,
                         [&](std::byte* base, int64_t place, uint64_t seed, int64_t index, int64_t i) {
                             sum += change(base + place, body + i * block.item, block.item, seed, index, write);
                         });
        scratch.sums.now[thread] = sum;
        if (thread == 0) scratch.at = scratch.next = 0;
    });
    bool good = true;
    for (int64_t done = 0; !dense && good && done < entry.changed; done += kBatch) {
        const auto wanted = static_cast<int>(entry.changed - done < kBatch ? entry.changed - done : kBatch);
        step([&](int thread) {
            if (thread != 0) return;
            // One thread: where a gap begins depends on all gaps before it.
            int count = 0;
            while (count < wanted && take_gap(body, entry.gaps, block.elements, scratch.at, scratch.next))
                scratch.positions[count++] = static_cast<uint32_t>(scratch.next++);
            scratch.count = count;
        });
        good = scratch.count == wanted;
        const std::byte* values = body + entry.gaps + done * block.item;
        step([&](int thread) {
            BlockWalk walk(view, block);
            for (int k = thread; k < scratch.count; k += kTeam) {
                const BlockWalk::Spot spot = walk.at(scratch.positions[k]);
                scratch.sums.now[thread] += change(walk.base(view) + spot.place, values + k * block.item, block.item,
                                                   walk.row().seed, spot.index, write);
            }
        });
    }
    good = good && (dense || scratch.at == entry.gaps);
    return {sum_of_team(scratch.sums), good};
}

// The sum of the terms of a block's elements; a null base holds zeros. For all threads.
ASYNCMOE_BOTH inline uint64_t read_block(const DeltaView& view, const DeltaTable::Block& block,
                                         OfTeam<uint64_t>& sums) {
    step([&](int thread) {
        uint64_t sum = 0;
        for_elements(view, block, thread, [&](std::byte* base, int64_t place, uint64_t seed, int64_t index, int64_t) {
            sum += element_term(seed, index, base ? load_element(base + place, block.item) : 0);
        });
        sums.now[thread] = sum;
    });
    return sum_of_team(sums);
}

}  // namespace asyncmoe
