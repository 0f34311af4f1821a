// NCCL, loaded at run time: the extension neither links against it nor needs its headers. The declarations follow
// NVIDIA's nccl.h (https://github.com/NVIDIA/nccl, src/nccl.h.in), version 2.14 and later.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace asyncmoe {

constexpr int kNcclSuccess = 0, kNcclInProgress = 7;  // ncclResult_t

struct NcclLibrary;

// The result of ncclGetVersion (NCCL_VERSION_CODE), and the file that was loaded. Throws std::runtime_error if the
// library cannot be opened or lacks a function; so do all functions here.
struct NcclOrigin {
    int version;
    std::string path;
};
NcclOrigin nccl_origin(const std::string& library);

// A new unique ID of 128 bytes, created by rank 0 and needed by every rank of a communicator.
std::string nccl_unique_id(const std::string& library);

// A peer's message in memory of the current device.
struct NcclMessage {
    int peer;
    uintptr_t address;
    int64_t nbytes;
};

// A non-blocking communicator on the current device: calls return at once, and `state` reports its progress. Any thread
// may end it, even while another thread uses it.
class NcclCommunicator {
  public:
    // `max_ctas`: maximum number of thread blocks of its kernels, each on one multiprocessor; 0: NCCL's choice. Ignored
    // by libraries before 2.17, which have no such setting.
    NcclCommunicator(const std::string& library, int rank, int world, const std::string& unique_id, int max_ctas);
    ~NcclCommunicator();
    NcclCommunicator(const NcclCommunicator&) = delete;
    NcclCommunicator& operator=(const NcclCommunicator&) = delete;

    // Enqueues all messages as one group on a stream (a cudaStream_t as an integer). They are on the stream when
    // `state` is kNcclSuccess again.
    void exchange(const std::vector<NcclMessage>& sends, const std::vector<NcclMessage>& receives, uintptr_t stream);
    // ncclCommGetAsyncError's result: kNcclSuccess, kNcclInProgress, or an error code.
    int state() const;
    std::string describe(int code) const;
    // Ends the communicator at once, together with any messages under way.
    void abort();
    // Ends the communicator; no messages may be under way.
    void destroy();

  private:
    void check(int code, const char* what) const;
    void* open() const;

    mutable std::mutex lock_;  // protects `communicator_`
    std::shared_ptr<const NcclLibrary> library_;
    void* communicator_ = nullptr;
};

}  // namespace asyncmoe
