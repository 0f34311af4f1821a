// A program on a GPU: its tables are uploaded once, and a run is one kernel launch.
#pragma once

#include <cstdint>
#include <vector>

#include "copy_table.h"
#include "program.h"

namespace asyncmoe {

// All runs of a program must be on one stream, or on streams that wait for each other.
class DeviceProgram {
  public:
    // `program` must outlive this object. Throws std::runtime_error with CUDA's message, and as CopyTable.
    DeviceProgram(const Program& program, int device);
    ~DeviceProgram();
    DeviceProgram(const DeviceProgram&) = delete;
    DeviceProgram& operator=(const DeviceProgram&) = delete;

    // Enqueues a chunk as one kernel launch on a stream (a cudaStream_t as an integer) and returns without waiting.
    // Base addresses that changed since the previous run are uploaded first. Packing writes the digest XOR `seal` after
    // the message, at the next multiple of 8 bytes; unpacking compares it with the value stored there. Throws as
    // `Program::check`, and std::runtime_error with CUDA's message.
    void run(int64_t chunk, const std::vector<int64_t>& sources, const std::vector<int64_t>& destinations,
             uint64_t seal, uintptr_t stream);
    // Returns the first chunk since the last call whose digest did not match, or -1. Wait for the stream first.
    int64_t take_mismatch();

  private:
    struct Memory;

    const Program& program_;
    Wire wire_;
    int device_;
    int64_t most_blocks_ = 0;
    std::vector<CopyTable::Chunk> chunks_;
    std::vector<int64_t> sources_, destinations_;  // the addresses uploaded last
    Memory* memory_ = nullptr;
};

}  // namespace asyncmoe
