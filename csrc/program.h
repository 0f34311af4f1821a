// Copies that are prepared once and run many times, cut into chunks that are messages.
#pragma once

#include <cstdint>
#include <vector>

#include "copy.h"

namespace asyncmoe {

// Which side of every copy is the message: none (a copy within a rank), the source (unpacking) or the destination
// (packing).
enum class Wire : int { kNone, kSource, kDestination };

class Program {
  public:
    // Chunk c is the rows firsts[c] <= i < firsts[c + 1]; firsts has chunks + 1 ascending entries, from 0 to count.
    // Where there is a message, the boxes of a chunk lie in it row-major, one after the other, from offset 0 of base 0
    // on. Throws std::invalid_argument where they do not, as `read_rows` does, and for a cast while unpacking.
    Program(const int64_t* rows, const int64_t* casts, int64_t count, std::vector<int64_t> firsts, Wire wire);

    int64_t chunks() const { return static_cast<int64_t>(firsts_.size()) - 1; }
    // Bytes that a chunk writes.
    int64_t bytes(int64_t chunk) const { return bytes_.at(static_cast<size_t>(chunk)); }
    Wire wire() const { return wire_; }
    const std::vector<Descriptor>& descriptors() const { return descriptors_; }
    // Chunk c is the descriptors firsts()[c] <= i < firsts()[c + 1].
    const std::vector<int64_t>& firsts() const { return firsts_; }
    // Bases that the rows name.
    int64_t sources() const { return sources_; }
    int64_t destinations() const { return destinations_; }
    // Throws std::invalid_argument for a chunk or a base that is not there.
    void check(int64_t chunk, const std::vector<int64_t>& sources, const std::vector<int64_t>& destinations) const;
    // The copies of a chunk at base addresses. Throws as `check`.
    std::vector<BoxCopy> copies(int64_t chunk, const std::vector<int64_t>& sources,
                                const std::vector<int64_t>& destinations) const;
    // Runs a chunk on up to `threads` threads, and returns the digest (digest.h) of its message, whose bytes are
    // digested while they are in the cache; 0 where there is no message. Throws as `check`.
    uint64_t run(int64_t chunk, const std::vector<int64_t>& sources, const std::vector<int64_t>& destinations,
                 int threads) const;

  private:
    void check_messages() const;

    std::vector<Descriptor> descriptors_;
    std::vector<int64_t> firsts_;
    std::vector<int64_t> bytes_;
    int64_t sources_ = 0;
    int64_t destinations_ = 0;
    Wire wire_;
};

}  // namespace asyncmoe
