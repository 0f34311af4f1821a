// The delta codec on a GPU; delta.h has the codec in host memory, and the contract of both.
#pragma once

#include <cstdint>
#include <vector>

#include "delta_kernels.h"

namespace asyncmoe {

// Returns a kernel's totals; throws std::invalid_argument, as DeltaTable::apply, if the payload had faults.
DeltaFound checked(const DeltaFound& found);

// Emulate the kernels for a chunk in host memory, on this thread. Slow. See DeviceDelta.
DeltaFound emulate_delta_encode(const DeltaTable& table, int64_t chunk, const std::byte* now, std::byte* base,
                                std::byte* payload);
DeltaFound emulate_delta_apply(const DeltaTable& table, int64_t chunk, const std::byte* payload, int64_t nbytes,
                               const std::vector<int64_t>& bases, bool write);
DeltaFound emulate_delta_read(const DeltaTable& table, int64_t chunk, const std::vector<int64_t>& bases,
                              std::byte* message);

#ifdef ASYNCMOE_CUDA
// A table on a GPU, in whose memory messages, payloads and storages lie too. Each call enqueues its kernels on a stream
// and returns without waiting; after a wait for the stream, `take` returns the totals of the last call. All calls must
// use one stream.
class DeviceDelta {
  public:
    // `table` must outlive this object. Throws std::runtime_error with CUDA's message.
    DeviceDelta(const DeltaTable& table, int device);
    ~DeviceDelta();
    DeviceDelta(const DeviceDelta&) = delete;
    DeviceDelta& operator=(const DeviceDelta&) = delete;

    // As `encode_delta`, for the packed message `now`.
    void encode(int64_t chunk, uintptr_t now, uintptr_t base, uintptr_t payload, uintptr_t stream);
    // As DeltaTable::apply, except that `take` reports positions that do not fit.
    void apply(int64_t chunk, uintptr_t payload, int64_t nbytes, const std::vector<int64_t>& bases, bool write,
               uintptr_t stream);
    // As DeltaTable::read.
    void read(int64_t chunk, const std::vector<int64_t>& bases, uintptr_t message, uintptr_t stream);
    DeltaFound take() const;

  private:
    struct Memory;
    DeltaView view(int64_t chunk, const std::vector<int64_t>& bases, uintptr_t message, uintptr_t stream);
    void begin(uintptr_t stream);
    void end(uintptr_t stream);

    const DeltaTable& table_;
    int device_;
    std::vector<int64_t> bases_;  // the addresses uploaded last
    Memory* memory_ = nullptr;
};
#endif

}  // namespace asyncmoe
