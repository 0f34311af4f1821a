// Search in a sequence of items that begin one after another.
#pragma once

#include <cstdint>

#include "digest.h"

namespace asyncmoe {

// The last of items[first .. last] whose member kBegin is at or before a position; the first if there is none.
template <auto kBegin, typename Item, typename Index>
ASYNCMOE_BOTH inline Index last_from(const Item* items, Index first, Index last, int64_t position) {
    while (first < last) {
        const Index middle = first + (last - first + 1) / 2;
        if (items[middle].*kBegin <= position)
            first = middle;
        else
            last = middle - 1;
    }
    return first;
}

}  // namespace asyncmoe
