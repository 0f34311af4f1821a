// csrc/device.h on the stand-in runtime, for ctypes. 0 or a null pointer with `fake_error` says that something was
// thrown.
#include "cuda_runtime.h"
#include "device.cu"

using namespace asyncmoe;

namespace {

thread_local std::string error;
thread_local int kind = 0;

template <typename Call>
void* guarded(Call call) {
    error.clear();
    kind = 0;
    try {
        return call();
    } catch (const std::bad_alloc& thrown) {
        error = thrown.what();
        kind = 2;
    } catch (const std::exception& thrown) {
        error = thrown.what();
        kind = 1;
    }
    return nullptr;
}

}  // namespace

extern "C" {
const char* fake_error() { return error.c_str(); }
int fake_kind() { return kind; }
void fake_clear() { kind = 0; }
int fake_current() { return fake::current; }
// Bit n: this process has a context on device n.
int fake_contexts() { return fake::machine().context[0] + 2 * fake::machine().context[1]; }
void fake_reset(size_t free) {
    for (int device = 0; device < fake::kDevices; ++device) {
        fake::machine().context[device] = false;
        fake::machine().free[device] = free;
    }
}
size_t fake_free(int device) { return fake::machine().free[device]; }
int fake_swap(int device) {
    int before = -1;
    guarded([&]() -> void* { return before = swap_device(device), nullptr; });
    return before;
}
void fake_restore(int device) {
    guarded([&]() -> void* { return restore_device(device), nullptr; });
}
int64_t fake_device_memory(int device) { return device_memory(device).first; }
void* fake_memory(int device, int64_t nbytes) {
    return guarded([&] { return new DeviceMemory(device, nbytes); });
}
void* fake_open(int device, int64_t nbytes, const char* handle) {
    return guarded([&] { return new DeviceMemory(device, nbytes, std::string(handle, 64)); });
}
uintptr_t fake_address(void* memory) { return static_cast<DeviceMemory*>(memory)->address(); }
void fake_handle(void* memory, char* to) {
    const std::string handle = static_cast<DeviceMemory*>(memory)->handle();
    std::memcpy(to, handle.data(), 64);
}
void fake_memory_end(void* memory) { delete static_cast<DeviceMemory*>(memory); }
void* fake_stream(int device) {
    return guarded([&] { return new DeviceStream(device); });
}
uintptr_t fake_stream_handle(void* stream) { return static_cast<DeviceStream*>(stream)->handle(); }
void fake_stream_end(void* stream) { delete static_cast<DeviceStream*>(stream); }
void* fake_event(int device) {
    return guarded([&] { return new DeviceEvent(device); });
}
void fake_record(void* event, uintptr_t stream) {
    guarded([&]() -> void* { return static_cast<DeviceEvent*>(event)->record(stream), nullptr; });
}
int fake_done(void* event) { return static_cast<DeviceEvent*>(event)->done(); }
void fake_event_end(void* event) { delete static_cast<DeviceEvent*>(event); }
}
