#include "pieces.h"

#include <algorithm>
#include <numeric>

namespace asyncmoe {

namespace {

using Wide = __int128;  // sums of products of any two int64

Coordinates row_major(const Coordinates& shape) {
    Coordinates steps;
    int64_t step = 1;
    for (int k = kMaxDims - 1; k >= 0; --k) steps[k] = step, step *= shape[k];
    return steps;
}

// Returns the elements visited by nested loops (loop i: `extents[i]` elements, `strides[i]` apart) from an offset as a
// box of a storage's shape, or nullopt if they do not form a box.
std::optional<Region> box_of_runs(const Coordinates& shape, int64_t offset, const int64_t* extents,
                                  const int64_t* strides, int count) {
    const Coordinates steps = row_major(shape);
    Region box;
    for (int k = 0; k < kMaxDims; ++k) box.start[k] = offset / steps[k] % shape[k], box.extent[k] = 1;
    for (int i = 0; i < count; ++i) {
        if (extents[i] == 1) continue;
        int axis = 0;
        while (axis < kMaxDims && (steps[axis] != strides[i] || shape[axis] == 1)) ++axis;
        if (axis == kMaxDims || box.extent[axis] != 1 || box.start[axis] + extents[i] > shape[axis])
            return std::nullopt;
        box.extent[axis] = extents[i];
    }
    return box;
}

std::optional<Region> box_in_storage(const int64_t* row, const Coordinates& shape) {
    if (auto box = box_of_runs(shape, row[kOffset], row + kExtent, row + kStrides, kMaxDims)) return box;
    const Region region = region_of(row);
    const Coordinates steps = row_major(region.extent);
    for (int k = 0; k < kMaxDims; ++k)
        if (region.extent[k] > 1 && steps[k] != row[kStrides + k]) return std::nullopt;
    const int64_t size = region.size(), one = 1;
    return box_of_runs(shape, row[kOffset], &size, &one, 1);
}

}  // namespace

int busiest_axis(const std::vector<Region>& boxes) {
    int best = 0;
    size_t most = 0;
    std::vector<int64_t> starts(boxes.size());
    for (int k = 0; k < kMaxDims; ++k) {
        for (size_t i = 0; i < boxes.size(); ++i) starts[i] = boxes[i].start[k];
        std::sort(starts.begin(), starts.end());
        const size_t places = std::unique(starts.begin(), starts.end()) - starts.begin();
        if (places > most) most = places, best = k;
    }
    return best;
}

void sort_along(std::vector<Region>& boxes, int axis) {
    std::sort(boxes.begin(), boxes.end(), [axis](const Region& a, const Region& b) {
        return a.start[axis] != b.start[axis] ? a.start[axis] < b.start[axis] : a < b;
    });
}

bool any_meet(const std::vector<Region>& boxes, int axis) {
    for (size_t i = 0; i < boxes.size(); ++i) {
        const int64_t end = boxes[i].start[axis] + boxes[i].extent[axis];
        for (size_t j = i + 1; j < boxes.size() && boxes[j].start[axis] < end; ++j)
            if (meet(boxes[i], boxes[j])) return true;
    }
    return false;
}

int64_t Region::size() const {
    int64_t n = 1;
    for (int64_t e : extent) n *= e;
    return n;
}

int64_t Side::find(int64_t rank) const {
    const auto at = std::lower_bound(ranks.begin(), ranks.end(), rank);
    return at != ranks.end() && *at == rank ? at - ranks.begin() : -1;
}

std::optional<BadRow> find_bad_row(Table table, const int64_t* extents, const int64_t* elements) {
    std::optional<BadRow> outside;
    for (int64_t i = 0; i < table.count; ++i) {
        const int64_t* row = table[i];
        Wide last = row[kOffset];
        bool stored = row[kOffset] >= 0, inside = true;
        for (int k = 0; k < kMaxDims; ++k) {
            const int64_t start = row[kStart + k], extent = row[kExtent + k], stride = row[kStrides + k];
            inside &= start >= 0 && extent >= 1;
            if (row[kTensor] != kPadding)
                inside &= static_cast<Wide>(start) + extent <= extents[row[kTensor] * kMaxDims + k];
            stored &= stride >= 0;
            last += static_cast<Wide>(extent - 1) * stride;
        }
        if (!inside) return BadRow{i, false};
        if (!outside && !(stored && last < elements[row[kStorage]])) outside = BadRow{i, true};
    }
    return outside;
}

std::vector<int64_t> doubtful_storages(Table table, const int64_t* shapes, int64_t storages, bool covered) {
    std::vector<int64_t> first(storages + 1, 0), order(table.count);
    for (int64_t i = 0; i < table.count; ++i) ++first[table[i][kStorage] + 1];
    std::partial_sum(first.begin(), first.end(), first.begin());
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t i = 0; i < table.count; ++i) order[next[table[i][kStorage]]++] = i;
    std::vector<int64_t> found;
    std::vector<Region> boxes;
    for (int64_t s = 0; s < storages; ++s) {
        Coordinates shape;
        std::copy_n(shapes + s * kMaxDims, kMaxDims, shape.begin());
        Wide missing = Region{{}, shape}.size();
        if (first[s] == first[s + 1] && (missing == 0 || !covered)) continue;
        boxes.clear();
        bool known = missing > 0;
        for (int64_t i = first[s]; i < first[s + 1] && known; ++i) {
            const auto box = box_in_storage(table[order[i]], shape);
            known = box.has_value();
            if (known) boxes.push_back(*box), missing -= box->size();
        }
        known = known && (covered ? missing == 0 : missing >= 0);
        if (known && boxes.size() > 1) {
            const int axis = busiest_axis(boxes);
            sort_along(boxes, axis);
            known = !any_meet(boxes, axis);
        }
        if (!known) found.push_back(s);
    }
    return found;
}

}  // namespace asyncmoe
