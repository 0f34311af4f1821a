// The delta codec in host memory: of a message that was sent before and would be sent now, only what changed.
#pragma once

#include <memory>
#include <vector>

#include "delta_walk.h"
#include "program.h"

namespace asyncmoe {

// What the elements of messages are (which element of which canonical tensor) and where they lie at the receiver. Rows
// are those of copy.h: the source is a tensor, with offset and strides in elements times item bytes; the destination is
// the place. In a chunk (a message) elements follow each other row by row, row-major.
class DeltaTable {
  public:
    // Chunk c consists of the rows firsts[c] <= i < firsts[c + 1]; seeds are those of the tensors (element_digest.h).
    // Throws std::invalid_argument for `firsts` that do not ascend from 0 to count, a tensor without a seed, an item
    // size that is not 1, 2, 4 or 8, a row that is empty or has more than kDeltaBlock bytes, and as `read_rows`.
    DeltaTable(const int64_t* rows, int64_t count, std::vector<int64_t> firsts, const std::vector<int64_t>& seeds);

    int64_t chunks() const { return static_cast<int64_t>(firsts_.size()) - 1; }
    const std::vector<DeltaRow>& rows() const { return rows_; }
    const std::vector<DeltaBlock>& blocks() const { return blocks_; }
    // Blocks of the largest chunk.
    int64_t most_blocks() const;
    // Number of storages that the rows need.
    int64_t bases() const { return bases_; }
    // Bytes of a chunk's elements. This and all that follows throw std::invalid_argument if the chunk does not exist.
    int64_t bytes(int64_t chunk) const;
    // The most bytes that a payload of the chunk takes.
    int64_t bound(int64_t chunk) const;
    // The elements in storages, whose addresses must live as long, or, unless it is null, in a message. Throws
    // std::invalid_argument for too few or null addresses of storages.
    DeltaView view(int64_t chunk, const std::vector<int64_t>& bases, std::byte* message) const;
    // Throws std::invalid_argument unless `pack` packs messages of as many bytes, row by row.
    void check(int64_t chunk, const Program& pack) const;

    // The sum of the terms of a chunk's elements as they lie in memory. Throws as `view`.
    uint64_t read(int64_t chunk, const std::vector<int64_t>& bases, std::byte* message, int threads) const;

    // Returns the new terms less the old ones of the elements in a payload, the old ones as they lie in memory; with
    // `write`, writes the elements, too. Throws std::invalid_argument as `view`, and for a payload of which a length,
    // number or position does not fit (with `write` it may be partly written then). Reads and writes nothing outside
    // payload and rows, whatever the payload.
    uint64_t apply(int64_t chunk, const std::byte* payload, int64_t nbytes, const std::vector<int64_t>& bases,
                   bool write, int threads) const;

  private:
    void add_blocks(const std::vector<int64_t>& items);
    void check_chunk(int64_t chunk) const;

    std::vector<DeltaRow> rows_;
    std::vector<int64_t> firsts_;
    std::vector<DeltaBlock> blocks_;
    std::vector<int64_t> first_block_;  // of every chunk, and a sentinel
    std::vector<int64_t> bytes_;
    int64_t bases_ = 0;
};

// What was found in all blocks of a chunk together.
struct DeltaFound {
    uint64_t nbytes;   // of the payload
    uint64_t sum;      // of terms; or the new ones less the old ones
    uint64_t changed;  // elements
    uint64_t faults;   // blocks whose code does not fit
};

// Compares a chunk's message, as `pack` would make it now, with what was sent before (`base`), and codes what changed
// into `payload`, which has room for `bound` bytes; then `base` is the message as it is now. Takes less than 1 MiB a
// thread. Throws as DeltaTable::check and Program::check.
DeltaFound encode_delta(const DeltaTable& table, const Program& pack, int64_t chunk,
                        const std::vector<int64_t>& sources, std::byte* base, std::byte* payload, int threads);

}  // namespace asyncmoe
