// NCCL, opened at run time: nothing links against it, and its headers are not needed. The declarations follow NVIDIA's
// nccl.h (https://github.com/NVIDIA/nccl, src/nccl.h.in), version 2.14 and later.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace asyncmoe {

constexpr int kNcclSuccess = 0, kNcclInProgress = 7;  // ncclResult_t

struct NcclLibrary;

// Throws std::runtime_error where the library cannot be opened or lacks a function; so does all else here.
int nccl_version(const std::string& library);

// What rank 0 makes and every rank of a communicator needs: 128 bytes.
std::string nccl_unique_id(const std::string& library);

// A peer's message in memory of the current device.
struct NcclMessage {
    int peer;
    uintptr_t address;
    int64_t nbytes;
};

// A non-blocking communicator: calls return at once, and `state` tells how far it is. On the current device.
class NcclCommunicator {
  public:
    NcclCommunicator(const std::string& library, int rank, int world, const std::string& unique_id);
    ~NcclCommunicator();
    NcclCommunicator(const NcclCommunicator&) = delete;
    NcclCommunicator& operator=(const NcclCommunicator&) = delete;

    // Enqueues all messages as one group on a stream (a cudaStream_t as an integer). They are on the stream when
    // `state` is kNcclSuccess again.
    void exchange(const std::vector<NcclMessage>& sends, const std::vector<NcclMessage>& receives, uintptr_t stream);
    // ncclCommGetAsyncError's result: kNcclSuccess, kNcclInProgress, or what went wrong.
    int state() const;
    std::string describe(int code) const;
    // Ends it at once, with what is still under way.
    void abort();
    // Ends it when nothing is under way.
    void destroy();

  private:
    void check(int code, const char* what) const;

    std::shared_ptr<const NcclLibrary> library_;
    void* communicator_ = nullptr;
};

}  // namespace asyncmoe
