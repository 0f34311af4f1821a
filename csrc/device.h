// The little of the CUDA runtime that is needed beside kernels, without its headers. Streams are cudaStream_t as
// integers. Everything throws std::runtime_error with CUDA's message, and std::bad_alloc with it where a device has no
// memory left.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace asyncmoe {

// Number of CUDA devices; 0 without a driver.
int cuda_device_count();

// Makes a device current for this thread, and returns the one before.
int swap_device(int device);

// Makes a device current for this thread that was so before, unless that would be this process's first use of it.
void restore_device(int device);

// Bytes that are free on a device, and all it has.
std::pair<int64_t, int64_t> device_memory(int device);

// As the driver names the card.
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
    // Whether the device has come past what was recorded last.
    bool done() const;
    // What is enqueued on the stream from now on waits for it.
    void hold(uintptr_t stream) const;

  private:
    int device_;
    void* event_ = nullptr;
};

// Memory of a device: this process's own, or another one's on the same host.
class DeviceMemory {
  public:
    DeviceMemory(int device, int64_t nbytes);
    // What another process allocated, by its handle. It must live there until this object is gone.
    DeviceMemory(int device, int64_t nbytes, const std::string& handle);
    ~DeviceMemory();
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
    uintptr_t address() const { return reinterpret_cast<uintptr_t>(start_); }
    int64_t nbytes() const { return nbytes_; }
    // For another process of this host: kHandleBytes bytes.
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
