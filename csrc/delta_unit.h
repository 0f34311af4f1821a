// A DeltaTable in the form that the delta kernels read. A thread block takes a block of it at a time, at most
// kDeltaBlock bytes; its functions also run on the host, and give what the CPU's give, bit for bit.
#pragma once

#include "delta.h"
#include "delta_code.h"
#include "delta_team.h"
#include "element_digest.h"
#include "search.h"
#include "unit.h"

namespace asyncmoe {

// A row of a DeltaTable. All numbers of elements are at most kDeltaBlock.
struct DeltaRow {
    int64_t begin;  // number of its first element in its block
    int64_t place;
    int64_t index;
    uint64_t seed;
    int32_t base;
    uint32_t elements;
    uint32_t run;
    int32_t count;
    struct {
        uint32_t extent;
        int64_t index_stride;
        int64_t place_stride;
    } dims[kMaxDims];
};

// One chunk's part of the tables.
struct DeltaView {
    const DeltaTable::Block* blocks;
    const DeltaRow* rows;  // of all chunks, as the blocks number them
    const int64_t* bases;  // addresses
    int64_t count;         // of blocks
};

// As it begins a payload, for each block.
struct DeltaEntry {
    uint32_t changed;  // or kDense
    uint32_t gaps;     // bytes
};

// What a kernel finds in all blocks of a chunk together.
struct DeltaFound {
    uint64_t sum;      // of terms; or the new ones less the old ones
    uint64_t changed;  // elements
    uint64_t dense;    // blocks
    uint64_t nbytes;   // of the payload
    uint64_t faults;   // blocks whose code does not fit
};

ASYNCMOE_BOTH inline void add_found(DeltaFound& found, const DeltaFound& more) {
    found.sum += more.sum;
    found.changed += more.changed;
    found.dense += more.dense;
    found.faults += more.faults;
}

ASYNCMOE_BOTH inline int64_t body_bytes(const DeltaTable::Block& block, DeltaEntry entry) {
    return entry.changed == kDense ? block.elements * block.item
                                   : int64_t{entry.gaps} + int64_t{entry.changed} * block.item;
}

ASYNCMOE_BOTH inline uint64_t load_element(const std::byte* from, int64_t item) {
    Unit unit{0, 0};
    load_bytes(unit, 0, static_cast<int>(item), from);
    return unit.low;
}

ASYNCMOE_BOTH inline void store_element(std::byte* to, int64_t item, uint64_t bits) {
    store_bytes(Unit{bits, 0}, 0, static_cast<int>(item), to);
}

ASYNCMOE_BOTH inline DeltaEntry entry_of(const std::byte* payload, int64_t block) {
    const uint64_t words = load_element(payload + kEntry * block, kEntry);
    return {static_cast<uint32_t>(words), static_cast<uint32_t>(words >> 32)};
}

// Finds elements of a block by their number in it.
class BlockWalk {
  public:
    ASYNCMOE_BOTH BlockWalk(const DeltaView& view, const DeltaTable::Block& block)
        : rows_(view.rows), number_(block.first), first_(block.first), last_(block.last - 1), item_(block.item) {}

    struct Spot {
        int64_t place;  // bytes from the base
        int64_t index;  // in the tensor
        int64_t left;   // elements from this one to the end of its run
    };
    // `row` is then the element's.
    ASYNCMOE_BOTH Spot at(int64_t element) {
        if (element < row().begin || element >= row().begin + row().elements)
            number_ = last_from<&DeltaRow::begin>(rows_, element < row().begin ? first_ : number_, last_, element);
        const auto i = static_cast<uint32_t>(element - row().begin);
        uint32_t number = i / row().run;
        const uint32_t rest = i - number * row().run;
        int64_t place = row().place + rest * item_, index = row().index + rest;
        for (int k = row().count - 1; k >= 0; --k) {
            const auto& dim = row().dims[k];
            const uint32_t along = number % dim.extent;
            number /= dim.extent;
            place += along * dim.place_stride;
            index += along * dim.index_stride;
        }
        return {place, index, int64_t{row().run} - rest};
    }
    ASYNCMOE_BOTH const DeltaRow& row() const { return rows_[number_]; }
    ASYNCMOE_BOTH std::byte* base(const DeltaView& view) const {
        return reinterpret_cast<std::byte*>(view.bases[row().base]);
    }

  private:
    const DeltaRow* rows_;
    int64_t number_, first_, last_, item_;
};

// Elements that a thread takes at a time, next to those of the threads beside it.
constexpr int64_t kGroup = 8;

ASYNCMOE_BOTH inline int64_t groups_of(const DeltaTable::Block& block) {
    return (block.elements + kGroup - 1) / kGroup;
}

// Calls visit(base, place, seed, index, element) for a thread's elements; a null base stays null.
template <typename Visit>
ASYNCMOE_BOTH inline void for_elements(const DeltaView& view, const DeltaTable::Block& block, int thread,
                                       const Visit& visit) {
    BlockWalk walk(view, block);
    for (int64_t group = thread; group < groups_of(block); group += kTeam) {
        const int64_t begin = group * kGroup;
        const int64_t end = begin + kGroup < block.elements ? begin + kGroup : block.elements;
        for (int64_t element = begin; element < end;) {
            const BlockWalk::Spot spot = walk.at(element);
            const int64_t most = spot.left < end - element ? spot.left : end - element;
            for (int64_t i = 0; i < most; ++i)
                visit(walk.base(view), spot.place + i * block.item, walk.row().seed, spot.index + i, element + i);
            element += most;
        }
    }
}

// Finds where in a payload the body of each block begins; returns the payload's bytes. For all threads.
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

}  // namespace asyncmoe
