#include "nccl.h"

#include <dlfcn.h>

#include <cstddef>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace asyncmoe {
namespace {

constexpr size_t kIdBytes = 128;
constexpr int kUint8 = 1;  // ncclDataType_t

struct UniqueId {
    char bytes[kIdBytes];
};

// The beginning of ncclConfig_t as of versions 2.14 and 2.17. Later versions append members, and the library checks
// `size` and `version`. NCCL_CONFIG_UNDEF_INT leaves a choice to the library.
constexpr int kUndefined = std::numeric_limits<int>::min();
constexpr int kFirstWithCtas = 21700;

struct Config {
    size_t size;
    unsigned magic = 0xcafebeef;
    unsigned version;
    int blocking = 0;
    int cga_cluster_size = kUndefined;  // this and all further members exist since 2.17
    int min_ctas = kUndefined;
    int max_ctas = kUndefined;
    const char* net_name = nullptr;
};
constexpr size_t kConfigBytes214 = 24;
static_assert(offsetof(Config, blocking) == 16 && offsetof(Config, max_ctas) == 28 && sizeof(Config) == 40,
              "the layout of ncclConfig_t");

Config config_of(int version, int max_ctas) {
    Config config;
    const bool ctas = version >= kFirstWithCtas;
    config.size = ctas ? sizeof(Config) : kConfigBytes214;
    config.version = ctas ? kFirstWithCtas : 21400;
    if (max_ctas > 0) config.max_ctas = max_ctas;
    return config;
}

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
    // The library stays open, because NCCL's own threads may outlive a communicator.
    ~NcclLibrary() = default;
    NcclLibrary(const NcclLibrary&) = delete;
    NcclLibrary& operator=(const NcclLibrary&) = delete;

    template <typename Function>
    void find(Function*& function, const char* name) {
        function = reinterpret_cast<Function*>(dlsym(handle, name));
        if (!function) throw std::runtime_error(std::string("a library without ") + name);
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

namespace {

int version_of(const NcclLibrary& nccl) {
    int version = 0;
    nccl.check(nccl.get_version(&version), "ncclGetVersion");
    return version;
}

}  // namespace

NcclOrigin nccl_origin(const std::string& library) {
    const NcclLibrary nccl(library);
    Dl_info info = {};
    const bool found = dladdr(reinterpret_cast<void*>(nccl.get_version), &info) != 0 && info.dli_fname;
    return {version_of(nccl), found ? info.dli_fname : library};
}

std::string nccl_unique_id(const std::string& library) {
    const NcclLibrary nccl(library);
    UniqueId id = {};
    nccl.check(nccl.get_unique_id(&id), "ncclGetUniqueId");
    return {id.bytes, sizeof id.bytes};
}

NcclCommunicator::NcclCommunicator(const std::string& library, int rank, int world, const std::string& unique_id,
                                   int max_ctas)
    : library_(std::make_shared<const NcclLibrary>(library)) {
    if (unique_id.size() != kIdBytes)
        throw std::invalid_argument("NCCL unique ID: got " + std::to_string(unique_id.size()) +
                                    " bytes, expected 128 bytes from nccl_unique_id");
    UniqueId id;
    std::memcpy(id.bytes, unique_id.data(), kIdBytes);
    Config config = config_of(version_of(*library_), max_ctas);
    check(library_->init(&communicator_, world, id, rank, &config), "ncclCommInitRankConfig");
}

NcclCommunicator::~NcclCommunicator() { abort(); }

void NcclCommunicator::check(int code, const char* what) const { library_->check(code, what); }

// `lock_` must be held.
void* NcclCommunicator::open() const {
    if (!communicator_)
        throw std::runtime_error("NCCL communicator: got one that has ended, expected an open one; create another");
    return communicator_;
}

void NcclCommunicator::exchange(const std::vector<NcclMessage>& sends, const std::vector<NcclMessage>& receives,
                                uintptr_t stream_address) {
    const std::lock_guard<std::mutex> held(lock_);
    void* communicator = open();
    auto* stream = reinterpret_cast<void*>(stream_address);
    check(library_->group_start(), "ncclGroupStart");
    int code = kNcclSuccess;
    const auto fine = [&] { return code == kNcclSuccess || code == kNcclInProgress; };
    for (size_t i = 0; i < receives.size() && fine(); ++i)
        code = library_->recv(reinterpret_cast<void*>(receives[i].address), static_cast<size_t>(receives[i].nbytes),
                              kUint8, receives[i].peer, communicator, stream);
    for (size_t i = 0; i < sends.size() && fine(); ++i)
        code = library_->send(reinterpret_cast<const void*>(sends[i].address), static_cast<size_t>(sends[i].nbytes),
                              kUint8, sends[i].peer, communicator, stream);
    const int ended = library_->group_end();  // even after a failure: an open group would swallow later calls
    check(code, "ncclSend or ncclRecv");
    check(ended, "ncclGroupEnd");
}

int NcclCommunicator::state() const {
    const std::lock_guard<std::mutex> held(lock_);
    int state = kNcclSuccess;
    check(library_->async_error(open(), &state), "ncclCommGetAsyncError");
    return state;
}

std::string NcclCommunicator::describe(int code) const { return library_->error_string(code); }

void NcclCommunicator::abort() {
    const std::lock_guard<std::mutex> held(lock_);
    if (communicator_) library_->comm_abort(communicator_);
    communicator_ = nullptr;
}

void NcclCommunicator::destroy() {
    const std::lock_guard<std::mutex> held(lock_);
    if (communicator_) check(library_->comm_destroy(communicator_), "ncclCommDestroy");
    communicator_ = nullptr;
}

}  // namespace asyncmoe
