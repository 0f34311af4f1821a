// The parts of the CUDA runtime needed besides kernels, without its headers. Streams are cudaStream_t as integers. All
// functions throw std::runtime_error with CUDA's message, or std::bad_alloc with it if a device is out of memory.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace asyncmoe {

// Number of CUDA devices; 0 without a driver.
int cuda_device_count();

// Makes a device current for this thread and returns the previous one.
int swap_device(int device);

// Makes a thread's previous device current again, unless that would be this process's first use of that device.
void restore_device(int device);

// Free and total bytes of a device.
std::pair<int64_t, int64_t> device_memory(int device);

// The driver's name of the GPU.
std::string cuda_device_name(int device);

// A stream that does not wait for the default stream.
class DeviceStream {
  public:
    explicit DeviceStream(int device);
    ~DeviceStream();
    DeviceStream(const DeviceStream&) = delete;
    DeviceStream& operator=(const DeviceStream&) = delete;
    uintptr_t handle() const { return handle_; }

  private:
    int device_;
    uintptr_t handle_ = 0;
};

// A point in a stream.
class DeviceEvent {
  public:
    explicit DeviceEvent(int device);
    ~DeviceEvent();
    DeviceEvent(const DeviceEvent&) = delete;
    DeviceEvent& operator=(const DeviceEvent&) = delete;
    void record(uintptr_t stream);
    // Whether the device has passed the point recorded last.
    bool done() const;
    // Makes all work enqueued on the stream from now on wait for this event.
    void hold(uintptr_t stream) const;

  private:
    int device_;
    void* event_ = nullptr;
};

// Memory of a device, allocated by this process or by another process of the host.
class DeviceMemory {
  public:
    DeviceMemory(int device, int64_t nbytes);
    // Opens memory of another process by its handle. That process must keep it until this object is destroyed.
    DeviceMemory(int device, int64_t nbytes, const std::string& handle);
    ~DeviceMemory();
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
    uintptr_t address() const { return reinterpret_cast<uintptr_t>(start_); }
    int64_t nbytes() const { return nbytes_; }
    // The handle for another process of this host, kHandleBytes bytes.
    std::string handle() const;
    static constexpr int kHandleBytes = 64;

  private:
    int device_;
    int64_t nbytes_;
    bool foreign_;
    void* start_ = nullptr;
};

// cudaMemcpyAsync: within a device, or between the host and it.
void copy_plainly(int device, uintptr_t destination, uintptr_t source, int64_t nbytes, uintptr_t stream);

}  // namespace asyncmoe
