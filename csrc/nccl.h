// NCCL, opened at run time: nothing links against it, and its headers are not needed. The declarations follow NVIDIA's
// nccl.h (https://github.com/NVIDIA/nccl, src/nccl.h.in), version 2.14 and later.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace asyncmoe {

constexpr int kNcclSuccess = 0, kNcclInProgress = 7;  // ncclResult_t

struct NcclLibrary;

// What ncclGetVersion says (NCCL_VERSION_CODE), and the file that the loader took it from. Throws std::runtime_error
// where the library cannot be opened or lacks a function; so does all else here.
struct NcclOrigin {
    int version;
    std::string path;
};
NcclOrigin nccl_origin(const std::string& library);

// What rank 0 makes and every rank of a communicator needs: 128 bytes.
std::string nccl_unique_id(const std::string& library);

// A peer's message in memory of the current device.
struct NcclMessage {
    int peer;
    uintptr_t address;
    int64_t nbytes;
};

// A non-blocking communicator: calls return at once, and `state` tells how far it is. On the current device. Any thread
// may end it, also while another one uses it.
class NcclCommunicator {
  public:
    // `max_ctas`: blocks of threads that a kernel of it takes at most, each of them on one multiprocessor; 0: as many
    // as NCCL likes. A library before 2.17 has no such setting.
    NcclCommunicator(const std::string& library, int rank, int world, const std::string& unique_id, int max_ctas);
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
    void* open() const;

    mutable std::mutex lock_;  // of `communicator_`
    std::shared_ptr<const NcclLibrary> library_;
    void* communicator_ = nullptr;
};

}  // namespace asyncmoe
