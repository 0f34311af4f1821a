// Copies prepared once and run many times, divided into chunks; each chunk is one message.
#pragma once

#include <cstdint>
#include <vector>

#include "copy.h"

namespace asyncmoe {

// The side of every copy that is the message: none (a copy within a rank), the source (unpacking) or the destination
// (packing).
enum class Wire : int { kNone, kSource, kDestination };

class Program {
  public:
    // Chunk c consists of the rows firsts[c] <= i < firsts[c + 1]; firsts has chunks + 1 ascending entries, from 0 to
    // count. In a message, the boxes of the chunk lie row-major, one after another, starting at offset 0 of base 0.
    // Throws std::invalid_argument if they do not, for a cast while unpacking, and as `read_rows`.
    Program(const int64_t* rows, const int64_t* casts, int64_t count, std::vector<int64_t> firsts, Wire wire);

    int64_t chunks() const { return static_cast<int64_t>(firsts_.size()) - 1; }
    // Bytes written by a chunk. Throws std::invalid_argument if it does not exist.
    int64_t bytes(int64_t chunk) const;
    Wire wire() const { return wire_; }
    const std::vector<Descriptor>& descriptors() const { return descriptors_; }
    // Chunk c consists of the descriptors firsts()[c] <= i < firsts()[c + 1].
    const std::vector<int64_t>& firsts() const { return firsts_; }
    // Number of bases that the rows need.
    int64_t sources() const { return sources_; }
    int64_t destinations() const { return destinations_; }
    // Throws std::invalid_argument if the chunk or a base does not exist.
    void check(int64_t chunk, const std::vector<int64_t>& sources, const std::vector<int64_t>& destinations) const;
    // The copies of a chunk at base addresses. Throws as `check`.
    std::vector<BoxCopy> copies(int64_t chunk, const std::vector<int64_t>& sources,
                                const std::vector<int64_t>& destinations) const;
    // Runs a chunk on up to `threads` threads and returns the digest (digest.h) of its message, or 0 if there is no
    // message. The bytes are digested while they are in the cache. Throws as `check`.
    uint64_t run(int64_t chunk, const std::vector<int64_t>& sources, const std::vector<int64_t>& destinations,
                 int threads) const;

  private:
    void check_messages() const;
    void check_chunk(int64_t chunk) const;

    std::vector<Descriptor> descriptors_;
    std::vector<int64_t> firsts_;
    std::vector<int64_t> bytes_;
    int64_t sources_ = 0;
    int64_t destinations_ = 0;
    Wire wire_;
};

}  // namespace asyncmoe
