// Sparse deltas of messages: of what a sender sent before and would send now, only the elements that changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "copy.h"
#include "delta_code.h"
#include "program.h"

namespace asyncmoe {

// What an element of a message is (which element of which canonical tensor) and where it lies: at a receiver, in boxes
// of its storages; at a sender, one after another in what it sent last. Rows are those of copy.h: the source is a
// tensor, with offset and strides in elements times item bytes; the destination is the place. Elements of a chunk
// (a message) follow each other row by row, row-major.
class DeltaTable {
  public:
    // A row, with dimensions that follow each other both in the tensor and in memory merged into `run` elements.
    struct Row {
        int64_t base;
        int64_t item;
        uint64_t seed;
        int64_t elements;
        int64_t place;  // of the first element, bytes from the base
        int64_t index;  // of the first element, in the tensor
        int64_t run;
        int count;
        std::array<Dim, kMaxDims> dims;  // source_stride: elements of the tensor; destination_stride: bytes of memory
    };
    // Consecutive rows of one item size, together at most kDeltaBlock bytes.
    struct Block {
        int64_t first;
        int64_t last;
        int64_t item;
        int64_t elements;
        int64_t at;  // offset of its bytes in the message
    };

    // Chunk c consists of the rows firsts[c] <= i < firsts[c + 1]; seeds are those of the tensors (element_digest.h).
    // Throws std::invalid_argument for `firsts` that do not ascend from 0 to count, a tensor without a seed, an item
    // size that is not 1, 2, 4 or 8, a row of more than kDeltaBlock bytes, and as `read_rows`.
    DeltaTable(const int64_t* rows, int64_t count, std::vector<int64_t> firsts, const std::vector<int64_t>& seeds);

    int64_t chunks() const { return static_cast<int64_t>(firsts_.size()) - 1; }
    // Bytes of a chunk's elements. This and all that follows throw std::invalid_argument if the chunk does not exist.
    int64_t bytes(int64_t chunk) const;
    // The most bytes that a payload of the chunk takes.
    int64_t bound(int64_t chunk) const;
    const std::vector<int64_t>& firsts() const { return firsts_; }
    const Row& row(int64_t number) const { return rows_[static_cast<size_t>(number)]; }
    // Number of bases that the rows need.
    int64_t bases() const { return bases_; }
    // Throws std::invalid_argument for too few bases, and unless `null`, for null ones.
    void check_bases(const std::vector<int64_t>& bases, bool null) const;
    // Throws std::invalid_argument unless the elements of a chunk lie one after another from byte 0, as in a message.
    void check_message(int64_t chunk) const;
    // The blocks of a chunk.
    const Block* begin(int64_t chunk) const;
    const Block* end(int64_t chunk) const;

    // The sum of the terms of a chunk's elements as they lie in memory; a null base holds zeros. Throws
    // std::invalid_argument for too few bases.
    uint64_t read(int64_t chunk, const std::vector<int64_t>& bases, int threads) const;

    // What is wrong with a payload: lengths, numbers and positions are all compared with the chunk's blocks.
    std::optional<std::string> fault(int64_t chunk, const std::byte* payload, int64_t nbytes, int threads) const;

    // Returns the new terms less the old ones of the elements in a payload without a fault, the old ones as they lie
    // in memory; with `write`, writes the elements, too. Throws std::invalid_argument for too few or null bases, and
    // for a payload of which a length or position does not fit (which may then be partly written). Reads and writes
    // nothing outside payload and rows, whatever the payload; `fault` refuses more: call it first.
    uint64_t apply(int64_t chunk, const std::byte* payload, int64_t nbytes, const std::vector<int64_t>& bases,
                   bool write, int threads) const;

  private:
    void add_blocks();
    void check_chunk(int64_t chunk) const;

    std::vector<Row> rows_;
    std::vector<int64_t> firsts_;
    std::vector<Block> blocks_;
    std::vector<int64_t> first_block_;  // of every chunk, and a sentinel
    std::vector<int64_t> bytes_;
    int64_t bases_ = 0;
};

// A payload, block by block.
struct Encoded {
    struct Body {
        std::unique_ptr<std::byte[]> bytes;
        int64_t nbytes;
    };
    std::vector<std::byte> entries;
    std::vector<Body> bodies;
    uint64_t difference;  // the new terms less the old ones
    int64_t changed;      // elements
    int64_t dense;        // blocks that are sent whole

    // Bytes of the payload.
    int64_t nbytes() const;
    void write(std::byte* out) const;
};

// Compares a chunk's message, as `pack` would make it now, with what was sent before (`base`), and codes what changed.
// `table` has the rows and chunks of `pack`, with the message as the place. Takes as much memory as the payload, and
// less than 1 MiB a thread. Throws std::invalid_argument if the table has other rows, and as Program::check.
Encoded encode_delta(const DeltaTable& table, const Program& pack, int64_t chunk, const std::vector<int64_t>& sources,
                     const std::byte* base, int threads);

// Packs a chunk's message into `base` and returns the sum of the terms of its elements. Throws as `encode_delta`.
uint64_t fill_delta_base(const DeltaTable& table, const Program& pack, int64_t chunk,
                         const std::vector<int64_t>& sources, std::byte* base, int threads);

}  // namespace asyncmoe
