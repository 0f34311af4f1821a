// From tables of pieces to the copies that turn one sharding into another: who sends what to whom.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "holdings.h"
#include "pieces.h"

namespace asyncmoe {

// Columns of a copy: those of a transfer's copies in asyncmoe.reshard.plan.
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
    kCopyCast = kToStrides + kMaxDims,  // a Cast: what becomes of the element on the way
    kCopyColumns,
};

// The dimension along which a region is cut when several ranks share it.
int cut_axis(const Region& region);

// Why a destination cannot be served.
struct Fault {
    bool dtype;  // else: not every element has a source
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
        int64_t nbytes;  // on the wire
        int64_t last;    // copies up to here
        uint64_t check;  // digest of its copies
    };
    std::vector<Pair> pairs;  // by source, then destination
};

// A change of dtype that a copy may make, as numbers of dtypes.
struct DtypeCast {
    int64_t from;
    int64_t to;
    int64_t cast;  // a Cast
};

// Which rank sends what to whom. A destination rank that holds an element itself copies it. The rest of a group, over
// all destinations, is one long row of bytes: destinations by rank, their pieces in order. The holders of the group
// share it in consecutive stretches, sized so that the busiest rank has as little to send as can be.
class Matching {
  public:
    // `in_place`: a rank on both sides has the same storages there; what lies where it is wanted already, and padding,
    // is left alone. Bytes are counted in the dtype of the destination.
    Matching(const Holdings& holdings, Side wanted, std::vector<int64_t> item_bytes, std::vector<DtypeCast> casts,
             bool in_place);

    const std::optional<Fault>& fault() const { return fault_; }

    // All copies of which one of `ranks` is source or destination.
    Transfers part(const std::vector<int64_t>& ranks) const;

    struct Traffic {
        int64_t source;
        int64_t destination;
        int64_t nbytes;
    };
    // What every pair of different ranks exchanges, in no order; a pair may come several times.
    std::vector<Traffic> traffic() const;

    // Bytes each source rank has to send at least when the busiest of them sends as little as possible (in fractions
    // of elements), by position of the rank.
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
    // The overlaps of one table, group by group; begin[i] is where overlap i begins among the bytes of all of them.
    struct Needs {
        std::vector<Overlap> overlaps;
        std::vector<int64_t> begin;
        std::vector<Run> runs;
    };
    struct Demand {
        int64_t destination;  // position of the rank
        int32_t run;
        int64_t begin;  // in the group's row of bytes
    };
    struct Share {
        std::vector<Demand> demands;
        std::vector<int64_t> ends;  // where each holder's stretch ends
    };
    struct Emitter;

    // Negative: none that a copy may make.
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
    bool in_place_;
    std::optional<Fault> fault_;
    std::vector<Needs> needs_;        // by table
    std::vector<int64_t> as_source_;  // by position of a destination rank: its position among the sources, or -1
    std::vector<Share> sharing_;      // by group
    std::vector<int64_t> shares_;
};

}  // namespace asyncmoe
