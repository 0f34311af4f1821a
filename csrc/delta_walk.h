// Walks over the elements of a row of a delta's table.
#pragma once

#include <cstdint>

#include "delta.h"
#include "element_digest.h"

namespace asyncmoe {

// Finds single elements of a row; elements in ascending order are found fastest.
class Cursor {
  public:
    explicit Cursor(const DeltaTable::Row& row) : row_(&row) { locate(0); }

    // Bytes from the base, and number in the tensor, of element `i` of the row in row-major order.
    struct Spot {
        int64_t place;
        int64_t index;
    };
    Spot at(uint32_t i) {
        if (i - begin_ >= static_cast<uint32_t>(row_->run)) locate(i);
        const int64_t rest = i - begin_;
        return {place_ + rest * row_->item, index_ + rest};
    }

  private:
    void locate(uint32_t i) {
        const auto run = static_cast<uint32_t>(row_->run);
        uint32_t number = i / run;
        begin_ = number * run;
        place_ = row_->place;
        index_ = row_->index;
        for (int k = row_->count - 1; k >= 0; --k) {
            const Dim& dim = row_->dims[static_cast<size_t>(k)];
            const auto extent = static_cast<uint32_t>(dim.extent);
            const uint32_t along = number % extent;
            number /= extent;
            place_ += along * dim.destination_stride;
            index_ += along * dim.source_stride;
        }
    }

    const DeltaTable::Row* row_;
    uint32_t begin_ = 0;
    int64_t place_ = 0;
    int64_t index_ = 0;
};

// Calls visit(place, index) for every run of a row, in row-major order.
template <typename Visit>
void for_each_run(const DeltaTable::Row& row, const Visit& visit, int level = 0, int64_t place = 0, int64_t index = 0) {
    if (level == row.count) {
        visit(row.place + place, row.index + index);
        return;
    }
    const Dim& dim = row.dims[static_cast<size_t>(level)];
    for (int64_t i = 0; i < dim.extent; ++i)
        for_each_run(row, visit, level + 1, place + i * dim.destination_stride, index + i * dim.source_stride);
}

// Calls visit(row, i, number) for every position: element `i` of a row, position `number` of the list.
template <typename Visit>
void for_each_position(const DeltaTable& table, const DeltaTable::Block& block, const uint32_t* positions,
                       int64_t count, const Visit& visit) {
    int64_t number = block.first, begin = 0;
    for (int64_t k = 0; k < count;) {
        while (positions[k] >= begin + table.row(number).elements) begin += table.row(number++).elements;
        const DeltaTable::Row& row = table.row(number);
        Cursor cursor(row);
        for (; k < count && positions[k] < begin + row.elements; ++k)
            visit(row, cursor.at(static_cast<uint32_t>(positions[k] - begin)), k);
    }
}

// The sum of the terms of a run that may be very short.
inline uint64_t sum_of_run(const DeltaTable::Row& row, const std::byte* data, int64_t index) {
    if (row.run == 1) return element_term(row.seed, index, data ? element_bits(data, row.item) : 0);
    return sum_of_elements(data, row.item, row.run, row.seed, index);
}

}  // namespace asyncmoe
