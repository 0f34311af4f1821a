#include "nccl.h"

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>

namespace asyncmoe {
namespace {

constexpr size_t kIdBytes = 128;
constexpr int kUint8 = 1;  // ncclDataType_t

struct UniqueId {
    char bytes[kIdBytes];
};

// The first members of ncclConfig_t, as they were in version 2.14: later ones are appended, and the library goes by
// `size` and `version`.
struct Config {
    size_t size = sizeof(Config);
    unsigned magic = 0xcafebeef;
    unsigned version = 21400;
    int blocking = 0;
};

}  // namespace

struct NcclLibrary {
    explicit NcclLibrary(const std::string& path) : handle(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
        if (!handle) throw std::runtime_error(dlerror());
        find(get_version, "ncclGetVersion");
        find(get_unique_id, "ncclGetUniqueId");
        find(init, "ncclCommInitRankConfig");
        find(group_start, "ncclGroupStart");
        find(group_end, "ncclGroupEnd");
        find(send, "ncclSend");
        find(recv, "ncclRecv");
        find(async_error, "ncclCommGetAsyncError");
        find(comm_abort, "ncclCommAbort");
        find(comm_destroy, "ncclCommDestroy");
        find(error_string, "ncclGetErrorString");
    }
    // It stays open: NCCL's own threads may outlive a communicator.
    ~NcclLibrary() = default;
    NcclLibrary(const NcclLibrary&) = delete;
    NcclLibrary& operator=(const NcclLibrary&) = delete;

    template <typename Function>
    void find(Function*& function, const char* name) {
        function = reinterpret_cast<Function*>(dlsym(handle, name));
        if (!function) throw std::runtime_error(std::string("it has no ") + name);
    }

    void check(int code, const char* what) const {
        if (code != kNcclSuccess && code != kNcclInProgress)
            throw std::runtime_error(std::string(what) + ": " + error_string(code));
    }

    void* handle;
    int (*get_version)(int*);
    int (*get_unique_id)(UniqueId*);
    int (*init)(void**, int, UniqueId, int, Config*);
    int (*group_start)();
    int (*group_end)();
    int (*send)(const void*, size_t, int, int, void*, void*);
    int (*recv)(void*, size_t, int, int, void*, void*);
    int (*async_error)(void*, int*);
    int (*comm_abort)(void*);
    int (*comm_destroy)(void*);
    const char* (*error_string)(int);
};

int nccl_version(const std::string& library) {
    const NcclLibrary nccl(library);
    int version = 0;
    nccl.check(nccl.get_version(&version), "ncclGetVersion");
    return version;
}

std::string nccl_unique_id(const std::string& library) {
    const NcclLibrary nccl(library);
    UniqueId id = {};
    nccl.check(nccl.get_unique_id(&id), "ncclGetUniqueId");
    return {id.bytes, sizeof id.bytes};
}

NcclCommunicator::NcclCommunicator(const std::string& library, int rank, int world, const std::string& unique_id)
    : library_(std::make_shared<const NcclLibrary>(library)) {
    if (unique_id.size() != kIdBytes) throw std::invalid_argument("a unique id has 128 bytes");
    UniqueId id;
    std::memcpy(id.bytes, unique_id.data(), kIdBytes);
    Config config;
    check(library_->init(&communicator_, world, id, rank, &config), "ncclCommInitRankConfig");
}

NcclCommunicator::~NcclCommunicator() { abort(); }

void NcclCommunicator::check(int code, const char* what) const { library_->check(code, what); }

void NcclCommunicator::exchange(const std::vector<NcclMessage>& sends, const std::vector<NcclMessage>& receives,
                                uintptr_t stream_address) {
    if (!communicator_) throw std::runtime_error("a communicator that was ended is used");
    auto* stream = reinterpret_cast<void*>(stream_address);
    check(library_->group_start(), "ncclGroupStart");
    int code = kNcclSuccess;
    const auto fine = [&] { return code == kNcclSuccess || code == kNcclInProgress; };
    for (size_t i = 0; i < receives.size() && fine(); ++i)
        code = library_->recv(reinterpret_cast<void*>(receives[i].address), static_cast<size_t>(receives[i].nbytes),
                              kUint8, receives[i].peer, communicator_, stream);
    for (size_t i = 0; i < sends.size() && fine(); ++i)
        code = library_->send(reinterpret_cast<const void*>(sends[i].address), static_cast<size_t>(sends[i].nbytes),
                              kUint8, sends[i].peer, communicator_, stream);
    const int ended = library_->group_end();  // also after a failure: a group left open would swallow later calls
    check(code, "ncclSend or ncclRecv");
    check(ended, "ncclGroupEnd");
}

int NcclCommunicator::state() const {
    if (!communicator_) throw std::runtime_error("a communicator that was ended is used");
    int state = kNcclSuccess;
    check(library_->async_error(communicator_, &state), "ncclCommGetAsyncError");
    return state;
}

std::string NcclCommunicator::describe(int code) const { return library_->error_string(code); }

void NcclCommunicator::abort() {
    if (communicator_) library_->comm_abort(communicator_);
    communicator_ = nullptr;
}

void NcclCommunicator::destroy() {
    if (communicator_) check(library_->comm_destroy(communicator_), "ncclCommDestroy");
    communicator_ = nullptr;
}

}  // namespace asyncmoe
