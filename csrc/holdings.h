// The elements held by the sources, indexed for matching with the destinations.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "pieces.h"

namespace asyncmoe {

// The elements held by the sources, divided into disjoint cells, each with the rows that hold all of it. Cells with the
// same holders form a group.
class Holdings {
  public:
    struct Holder {
        int32_t table;
        int32_t row;
    };
    struct Cell {
        Region region;
        int32_t group;
        int64_t first_holder;
    };
    struct Group {
        std::vector<int32_t> tables;   // ascending
        std::vector<int32_t> holders;  // positions of ranks, ascending
    };

    // Throws std::length_error if overlapping boxes of one tensor would be cut into more than kMostCells cells.
    Holdings(Side side, int64_t tensors);

    const Side& side() const { return side_; }
    const std::vector<Group>& groups() const { return groups_; }
    const Cell& cell(int64_t number) const { return cells_[number]; }
    const std::vector<Holder>& holders() const { return holders_; }
    // The cells of a tensor: [first, last).
    std::pair<int64_t, int64_t> cells_of(int64_t tensor) const { return {first_[tensor], first_[tensor + 1]}; }
    int64_t last_holder(int64_t cell) const { return cells_[cell + 1].first_holder; }
    // The first row of a table that holds a cell; the table must hold it.
    int32_t row_of(int64_t cell, int32_t table) const;

    // Calls visit(cell, overlap) for every cell that overlaps a region of a tensor, in ascending order.
    template <typename Visit>
    void overlaps(int64_t tensor, const Region& wanted, Visit&& visit) const;

    static constexpr int64_t kMostCells = int64_t{1} << 20;

  private:
    void add_tensor(std::vector<Holder>& held);
    void add_grid(const std::vector<Region>& boxes, const std::vector<Holder>& held, int axis);
    void add_cell(const Region& region, const Holder* first, const Holder* last);
    void number_groups();

    Side side_;
    std::vector<int64_t> first_;
    std::vector<Cell> cells_;  // the last one is a sentinel, whose first_holder ends the holders of the cell before
    std::vector<int64_t> reach_;
    std::vector<int8_t> axis_;
    std::vector<Holder> holders_;
    std::vector<Group> groups_;
};

template <typename Visit>
void Holdings::overlaps(int64_t tensor, const Region& wanted, Visit&& visit) const {
    const auto [first, last] = cells_of(tensor);
    const int axis = axis_[tensor];
    const int64_t end = wanted.start[axis] + wanted.extent[axis];
    int64_t i = std::upper_bound(reach_.begin() + first, reach_.begin() + last, wanted.start[axis]) - reach_.begin();
    for (; i < last && cells_[i].region.start[axis] < end; ++i)
        if (meet(cells_[i].region, wanted)) visit(i, intersection(cells_[i].region, wanted));
}

}  // namespace asyncmoe
