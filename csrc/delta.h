// The delta codec in host memory: encodes only what changed in a message since it was last sent.
#pragma once

#include <memory>
#include <vector>

#include "delta_walk.h"
#include "program.h"

namespace asyncmoe {

// Maps the elements of messages to elements of canonical tensors, and to their locations at the receiver. Rows are
// those of copy.h: the source is a tensor, with offset and strides in elements times item bytes; the destination is the
// location. In a chunk (a message) elements follow each other row by row, row-major.
class DeltaTable {
  public:
    // Chunk c consists of the rows firsts[c] <= i < firsts[c + 1]; seeds are those of the tensors (element_digest.h).
    // Throws std::invalid_argument for `firsts` that do not ascend from 0 to count, a tensor without a seed, an item
    // size that is not 1, 2, 4 or 8, a row that is empty or has more than kDeltaBlock bytes, and as `read_rows`.
    DeltaTable(const int64_t* rows, int64_t count, std::vector<int64_t> firsts, const std::vector<int64_t>& seeds);

    int64_t chunks() const { return static_cast<int64_t>(firsts_.size()) - 1; }
    const std::vector<DeltaRow>& rows() const { return rows_; }
    const std::vector<DeltaBlock>& blocks() const { return blocks_; }
    // Number of blocks in the largest chunk.
    int64_t most_blocks() const;
    // Number of storages that the rows need.
    int64_t bases() const { return bases_; }
    // Size of a chunk's elements in bytes. Throws std::invalid_argument if the chunk does not exist, as do all below.
    int64_t bytes(int64_t chunk) const;
    // Maximum size of a payload of the chunk in bytes.
    int64_t bound(int64_t chunk) const;
    // A view of a chunk's elements in `message` or, if that is null, in storages at `bases`, which must outlive the
    // view. Throws std::invalid_argument for too few or null addresses of storages.
    DeltaView view(int64_t chunk, const std::vector<int64_t>& bases, std::byte* message) const;
    // Throws std::invalid_argument unless `pack` packs messages of the same size, row by row.
    void check(int64_t chunk, const Program& pack) const;

    // The sum of the terms of a chunk's elements, read from memory. Throws as `view`.
    uint64_t read(int64_t chunk, const std::vector<int64_t>& bases, std::byte* message, int threads) const;

    // Returns the new terms minus the old ones of the elements in a payload, with the old ones read from memory; with
    // `write`, also writes the elements. Throws std::invalid_argument as `view`, and for a payload with a length,
    // number or position that does not fit (with `write` it may then be partly written). Never reads or writes outside
    // payload and rows, whatever the payload.
    uint64_t apply(int64_t chunk, const std::byte* payload, int64_t nbytes, const std::vector<int64_t>& bases,
                   bool write, int threads) const;

  private:
    void add_blocks(const std::vector<int64_t>& items);
    void check_chunk(int64_t chunk) const;

    std::vector<DeltaRow> rows_;
    std::vector<int64_t> firsts_;
    std::vector<DeltaBlock> blocks_;
    std::vector<int64_t> first_block_;  // each chunk's first block, and a sentinel
    std::vector<int64_t> bytes_;
    int64_t bases_ = 0;
};

// Totals over all blocks of a chunk.
struct DeltaFound {
    uint64_t nbytes;   // size of the payload
    uint64_t sum;      // the sum of terms, or of the new terms minus the old ones
    uint64_t changed;  // number of changed elements
    uint64_t faults;   // number of blocks with an invalid encoding
};

// Compares a chunk's current message, as made by `pack`, with the last one sent (`base`), and encodes the changes into
// `payload`, which has room for `bound` bytes; `base` becomes the current message. Needs less than 1 MiB per thread.
// Throws as DeltaTable::check and Program::check.
DeltaFound encode_delta(const DeltaTable& table, const Program& pack, int64_t chunk,
                        const std::vector<int64_t>& sources, std::byte* base, std::byte* payload, int threads);

}  // namespace asyncmoe
