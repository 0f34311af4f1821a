// Sparse deltas of messages on a GPU (delta.h has those in host memory, and says what they are).
#pragma once

#include <cstdint>
#include <vector>

#include "delta_unit.h"

namespace asyncmoe {

// A table in the form that the kernels read.
struct DeltaJobs {
    explicit DeltaJobs(const DeltaTable& table);

    std::vector<DeltaRow> rows;
    std::vector<DeltaTable::Block> blocks;
    std::vector<int64_t> first_block;  // of every chunk, and a sentinel
    int64_t most_blocks;               // of a chunk
};

// What a kernel found; throws std::invalid_argument, as DeltaTable::apply, if the payload had faults.
DeltaFound checked(const DeltaFound& found);

// Emulate the kernels for a chunk in host memory, on this thread. Slow. `now` and `old` are a message as it would be
// sent, and as it was sent before; `payload` has room for `table.bound(chunk)` bytes.
DeltaFound emulate_delta_encode(const DeltaTable& table, int64_t chunk, const std::byte* now, const std::byte* old,
                                std::byte* payload);
DeltaFound emulate_delta_apply(const DeltaTable& table, int64_t chunk, const std::byte* payload, int64_t nbytes,
                               const std::vector<int64_t>& bases, bool write);
DeltaFound emulate_delta_read(const DeltaTable& table, int64_t chunk, const std::vector<int64_t>& bases);

#ifdef ASYNCMOE_CUDA
// A table on a GPU, where messages, payloads and bases are, too. Each call enqueues its kernels on a stream and returns
// without waiting; after waiting for the stream, `take` says what the last call found. All calls are on one stream.
class DeviceDelta {
  public:
    // `table` must outlive this object. Throws std::runtime_error with CUDA's message.
    DeviceDelta(const DeltaTable& table, int device);
    ~DeviceDelta();
    DeviceDelta(const DeviceDelta&) = delete;
    DeviceDelta& operator=(const DeviceDelta&) = delete;

    // As `encode_delta`, but of a packed message. Throws as DeltaTable::check_message.
    void encode(int64_t chunk, uintptr_t now, uintptr_t old, uintptr_t payload, uintptr_t stream);
    // As DeltaTable::apply, except that a position that does not fit is found by `take`.
    void apply(int64_t chunk, uintptr_t payload, int64_t nbytes, const std::vector<int64_t>& bases, bool write,
               uintptr_t stream);
    // As DeltaTable::read.
    void read(int64_t chunk, const std::vector<int64_t>& bases, uintptr_t stream);
    DeltaFound take() const;

  private:
    struct Memory;
    DeltaView view(int64_t chunk, const std::vector<int64_t>& bases, uintptr_t stream);
    void begin(uintptr_t stream);
    void end(uintptr_t stream);

    const DeltaTable& table_;
    int device_;
    std::vector<int64_t> first_block_, bases_;  // bases as uploaded
    Memory* memory_ = nullptr;
};
#endif

}  // namespace asyncmoe
