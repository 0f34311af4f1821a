// From tables of pieces to the copies that turn one sharding into another.
//
// Ranks whose memory is laid out alike share a table, so the work grows with the distinct layouts and not with the
// ranks. Everything is a pure function of the tables, in integers: every rank gets the same answer.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "copy.h"

namespace asyncmoe {

// Columns of a piece, all int64. Boxes are filled up in front to kMaxDims dimensions of extent 1; offset and strides
// are in elements of the storage.
enum PieceColumn : int {
    kTensor,  // a number, or kPadding
    kStorage,
    kDtype,
    kOffset,
    kStart,
    kExtent = kStart + kMaxDims,
    kStrides = kExtent + kMaxDims,
    kPieceColumns = kStrides + kMaxDims,
};
constexpr int64_t kPadding = -1;

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
    kCopyCast = kToStrides + kMaxDims,  // 1: the element changes its dtype on the way, see CastPair
    kCopyColumns,
};

struct Table {
    const int64_t* data;
    int64_t count;

    const int64_t* operator[](int64_t row) const { return data + row * kPieceColumns; }
};

// The tables of one side, and which of them each rank has. Ranks ascend.
struct Side {
    std::vector<Table> tables;
    std::vector<int64_t> ranks;
    std::vector<int32_t> table_of;

    // Position of a rank, -1 when it is not on this side.
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

// The first row of a table that does not lie within its tensor (extents[tensors, kMaxDims]) or its storage (elements).
struct BadRow {
    int64_t row;
    bool outside_storage;
};
std::optional<BadRow> find_bad_row(Table table, const int64_t* extents, const int64_t* elements);

// The storages (shapes[storages, kMaxDims]) whose elements are not seen to be held by exactly one row each: those with
// a hole or an overlap, and those with a piece that is no box of the storage's own shape.
std::vector<int64_t> doubtful_storages(Table table, const int64_t* shapes, int64_t storages);

// What the sources hold, made disjoint: cells, each with the rows that hold all of it. Cells with the same holders form
// a group.
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

    // Throws std::length_error where overlapping boxes of one tensor would fall into more than kMostCells cells.
    Holdings(Side side, int64_t tensors);

    const Side& side() const { return side_; }
    const std::vector<Group>& groups() const { return groups_; }
    const Cell& cell(int64_t number) const { return cells_[number]; }
    const std::vector<Holder>& holders() const { return holders_; }
    // The cells of a tensor: [first, last).
    std::pair<int64_t, int64_t> cells_of(int64_t tensor) const { return {first_[tensor], first_[tensor + 1]}; }
    int64_t last_holder(int64_t cell) const { return cells_[cell + 1].first_holder; }
    // The lowest row of a table that holds a cell; the table is known to.
    int32_t row_of(int64_t cell, int32_t table) const;

    // Calls visit(cell, overlap) for every cell that a region of a tensor meets, by ascending cell.
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
    std::vector<Cell> cells_;  // and one more, whose first_holder ends the last
    std::vector<int64_t> reach_;
    std::vector<int8_t> axis_;
    std::vector<Holder> holders_;
    std::vector<Group> groups_;
};

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

// The one change of dtype a copy may make, as numbers of dtypes.
struct CastPair {
    int64_t from;
    int64_t to;
};

// Which rank sends what to whom. A destination rank that holds an element itself copies it. The rest of a group, over
// all destinations, is one long row of bytes: destinations by rank, their pieces in order. The holders of the group
// share it in consecutive stretches, sized so that the busiest rank has as little to send as can be.
class Matching {
  public:
    // `in_place`: a rank on both sides has the same storages there; what lies where it is wanted already, and padding,
    // is left alone. Bytes are counted in the dtype of the destination.
    Matching(const Holdings& holdings, Side wanted, std::vector<int64_t> item_bytes, CastPair cast, bool in_place);

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

    void find_needs(int32_t table);
    void gather_demands();
    void divide();
    int64_t rounded(const Share& share, int64_t at) const;
    bool holds(int32_t group, int64_t destination) const;
    Region region(const Needs& needs, Table table, int64_t overlap) const;

    const Holdings& holdings_;
    Side wanted_;
    std::vector<int64_t> item_bytes_;
    CastPair cast_;
    bool in_place_;
    std::optional<Fault> fault_;
    std::vector<Needs> needs_;        // by table
    std::vector<int64_t> as_source_;  // by position of a destination rank: its position among the sources, or -1
    std::vector<Share> sharing_;      // by group
    std::vector<int64_t> shares_;
};

}  // namespace asyncmoe
