// The table of a delta in the form that host and GPU read, and the walk over its elements.
#pragma once

#include "copy.h"
#include "delta_format.h"
#include "element_digest.h"
#include "search.h"

namespace asyncmoe {

// A box of a tensor's elements; dimensions that are contiguous both in the tensor and in memory are merged into `run`
// elements. All numbers of elements are at most kDeltaBlock.
struct DeltaRow {
    int64_t begin;  // number of its first element in its block
    int64_t place;  // the first element's offset from the base, in bytes
    int64_t index;  // the first element's index in the tensor
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

// Consecutive rows of one item size, together at most kDeltaBlock bytes.
struct DeltaBlock {
    int64_t first;
    int64_t last;
    int64_t item;
    int64_t elements;
    int64_t at;  // offset of its bytes in the message
};

// The blocks of one chunk, and where their elements lie: in storages, or one after another in a message.
struct DeltaView {
    const DeltaBlock* blocks;
    const DeltaRow* rows;  // rows of all chunks, numbered as in the blocks
    const int64_t* bases;  // addresses of the storages
    std::byte* message;    // null: elements are in the storages
    int64_t count;         // number of blocks
};

ASYNCMOE_BOTH inline int64_t body_bytes(const DeltaBlock& block, DeltaEntry entry) {
    return entry.changed == kDense ? block.elements * block.item
                                   : int64_t{entry.gaps} + int64_t{entry.changed} * block.item;
}

// Finds elements of a block by their number in it; elements in ascending order are found fastest.
class DeltaWalk {
  public:
    ASYNCMOE_BOTH DeltaWalk(const DeltaView& view, const DeltaBlock& block)
        : view_(view), block_(block), number_(block.first) {}

    struct Spot {
        std::byte* place;
        uint64_t seed;
        int64_t index;  // the element's index in the tensor
        int64_t left;   // elements from this one to the end of its run
    };
    ASYNCMOE_BOTH Spot at(int64_t element) {
        if (static_cast<uint64_t>(element - start_) >= static_cast<uint64_t>(run_)) locate(element);
        const int64_t rest = element - start_;
        return {place_ + rest * block_.item, seed_, index_ + rest, run_ - rest};
    }

  private:
    ASYNCMOE_BOTH void locate(int64_t element) {
        const DeltaRow* rows = view_.rows;
        const int64_t begin = rows[number_].begin;
        if (element < begin || element >= begin + rows[number_].elements)
            number_ =
                last_from<&DeltaRow::begin>(rows, element < begin ? block_.first : number_, block_.last - 1, element);
        const DeltaRow& row = rows[number_];
        uint32_t number = static_cast<uint32_t>(element - row.begin) / row.run;
        start_ = row.begin + int64_t{number} * row.run, run_ = row.run, seed_ = row.seed;
        int64_t place = row.place;
        index_ = row.index;
        for (int k = row.count - 1; k >= 0; --k) {
            const auto& dim = row.dims[k];
            const uint32_t along = number % dim.extent;
            number /= dim.extent;
            place += along * dim.place_stride;
            index_ += along * dim.index_stride;
        }
        place_ = view_.message ? view_.message + block_.at + start_ * block_.item
                               : reinterpret_cast<std::byte*>(view_.bases[row.base]) + place;
    }

    const DeltaView& view_;
    const DeltaBlock& block_;
    int64_t number_, start_ = 0, run_ = 0, index_ = 0;
    uint64_t seed_ = 0;
    std::byte* place_ = nullptr;
};

}  // namespace asyncmoe
