// Computes from tables of pieces the copies that turn one sharding into another: which rank sends which boxes to which.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "holdings.h"
#include "pieces.h"

namespace asyncmoe {

// Columns of a copy, the same as of `Transfer.copies` in asyncmoe.reshard.plan.
enum CopyColumn : int {
    kFrom,
    kFromOffset,
    kTo,
    kToOffset,
    kWireOffset,
    kItemBytes,
    kCopyExtents,
    kFromStrides = kCopyExtents + kMaxDims,
    kToStrides = kFromStrides + kMaxDims,
    kCopyCast = kToStrides + kMaxDims,  // a Cast
    kCopyTensor,                        // number of the tensor, or kPadding
    kCopyStart,                         // where the box begins in the tensor
    kCopyColumns = kCopyStart + kMaxDims,
};

// The dimension along which a region is cut if several ranks share it.
int cut_axis(const Region& region);

// The reason why a destination cannot be served.
struct Fault {
    bool dtype;  // true: a dtype that cannot be converted; false: an element without a source
    int32_t table;
    int64_t row;
    int32_t source_table;
    int64_t source_row;
};

struct Transfers {
    std::vector<int64_t> copies;  // [n, kCopyColumns]; storages by their number within the rank's layout
    struct Pair {
        int64_t source;
        int64_t destination;
        int64_t nbytes;  // bytes on the wire
        int64_t last;    // index after the pair's last copy
    };
    std::vector<Pair> pairs;  // ordered by source, then destination
};

// An allowed change of dtype, with the dtypes as numbers.
struct DtypeCast {
    int64_t from;
    int64_t to;
    int64_t cast;  // a Cast
};

// Decides which rank sends which boxes to which. A destination rank that holds an element itself copies it locally. The
// remaining bytes of a group (cells with the same holders), over all destinations, form one sequence: destinations by
// rank, their pieces in order. The holders share it in consecutive stretches, sized to minimise the traffic of the
// busiest rank.
class Matching {
  public:
    // Bytes are counted in the dtype of the destination.
    Matching(const Holdings& holdings, Side wanted, std::vector<int64_t> item_bytes, std::vector<DtypeCast> casts);

    const std::optional<Fault>& fault() const { return fault_; }

    // All copies with one of `ranks` as source or destination.
    Transfers part(const std::vector<int64_t>& ranks) const;

    struct Traffic {
        int64_t source;
        int64_t destination;
        int64_t nbytes;
    };
    // The bytes exchanged by every pair of different ranks, in no particular order; a pair may occur several times.
    std::vector<Traffic> traffic() const;

    // Bytes each source rank sends in the ideal division, which minimises the load of the busiest rank and ignores
    // element boundaries; by position of the rank.
    const std::vector<int64_t>& shares() const { return shares_; }

  private:
    struct Overlap {
        int64_t cell;
        int64_t row;
    };
    struct Run {
        int32_t group;
        int64_t first;
        int64_t last;
    };
    // The overlaps of one table, ordered by group; begin[i] is the offset of overlap i in the bytes of all overlaps.
    struct Needs {
        std::vector<Overlap> overlaps;
        std::vector<int64_t> begin;
        std::vector<Run> runs;
    };
    struct Demand {
        int64_t destination;  // position of the rank
        int32_t run;
        int64_t begin;  // offset in the group's sequence of bytes
    };
    struct Share {
        std::vector<Demand> demands;
        std::vector<int64_t> ends;  // end of each holder's stretch
    };
    struct Emitter;

    // Negative if no cast is allowed.
    int64_t cast_of(int64_t from, int64_t to) const;
    void find_needs(int32_t table);
    void gather_demands();
    void divide();
    int64_t rounded(const Share& share, int64_t at) const;
    bool holds(int32_t group, int64_t destination) const;
    Region region(const Needs& needs, Table table, int64_t overlap) const;

    const Holdings& holdings_;
    Side wanted_;
    std::vector<int64_t> item_bytes_;
    std::vector<DtypeCast> casts_;
    std::optional<Fault> fault_;
    std::vector<Needs> needs_;        // by table
    std::vector<int64_t> as_source_;  // each destination rank's position among the sources, or -1
    std::vector<Share> sharing_;      // by group
    std::vector<int64_t> shares_;
};

}  // namespace asyncmoe
