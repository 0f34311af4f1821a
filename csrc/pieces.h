// Tables of pieces (the places of tensor boxes in storages), and checks that need only one table.
//
// Ranks with equal layouts share a table, so the work grows with the number of distinct layouts and not with the number
// of ranks. Everything is a pure function of the tables, in integers, so every rank gets the same result.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "copy.h"

namespace asyncmoe {

// Columns of a piece, all int64. Boxes are padded in front to kMaxDims dimensions with extent 1; offset and strides are
// in elements of the storage.
enum PieceColumn : int {
    kTensor,  // number of a tensor, or kPadding
    kStorage,
    kDtype,
    kOffset,
    kStart,
    kExtent = kStart + kMaxDims,
    kStrides = kExtent + kMaxDims,
    kPieceColumns = kStrides + kMaxDims,
};
constexpr int64_t kPadding = -1;

struct Table {
    const int64_t* data;
    int64_t count;

    const int64_t* operator[](int64_t row) const { return data + row * kPieceColumns; }
};

// The tables of one side, and the table of each rank. Ranks ascend.
struct Side {
    std::vector<Table> tables;
    std::vector<int64_t> ranks;
    std::vector<int32_t> table_of;

    // Position of a rank, -1 if it is not on this side.
    int64_t find(int64_t rank) const;
};

using Coordinates = std::array<int64_t, kMaxDims>;

struct Region {
    Coordinates start;
    Coordinates extent;

    int64_t size() const;
    bool operator==(const Region& other) const { return start == other.start && extent == other.extent; }
    bool operator<(const Region& other) const {
        return start != other.start ? start < other.start : extent < other.extent;
    }
};

inline Region region_of(const int64_t* row) {
    Region region;
    std::copy_n(row + kStart, kMaxDims, region.start.begin());
    std::copy_n(row + kExtent, kMaxDims, region.extent.begin());
    return region;
}

inline bool meet(const Region& a, const Region& b) {
    for (int k = 0; k < kMaxDims; ++k)
        if (a.start[k] >= b.start[k] + b.extent[k] || b.start[k] >= a.start[k] + a.extent[k]) return false;
    return true;
}

inline Region intersection(const Region& a, const Region& b) {
    Region found;
    for (int k = 0; k < kMaxDims; ++k) {
        found.start[k] = std::max(a.start[k], b.start[k]);
        found.extent[k] = std::min(a.start[k] + a.extent[k], b.start[k] + b.extent[k]) - found.start[k];
    }
    return found;
}

// The dimension with the most distinct starts of boxes: after sorting along it, few boxes have to be compared.
int busiest_axis(const std::vector<Region>& boxes);
void sort_along(std::vector<Region>& boxes, int axis);
// `boxes` must be sorted along `axis`.
bool any_meet(const std::vector<Region>& boxes, int axis);

// The first row of a table that is outside its tensor (extents[tensors, kMaxDims]) or its storage (elements).
struct BadRow {
    int64_t row;
    bool outside_storage;
};
std::optional<BadRow> find_bad_row(Table table, const int64_t* extents, const int64_t* elements);

// The storages (shapes[storages, kMaxDims]) for which this quick check cannot confirm that each element is in at most
// one piece or, if `covered`, in exactly one: storages with an overlap or a hole, and storages with a piece that is not
// a box of the storage's shape.
std::vector<int64_t> doubtful_storages(Table table, const int64_t* shapes, int64_t storages, bool covered);

}  // namespace asyncmoe
