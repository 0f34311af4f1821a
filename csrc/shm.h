// Message slots in POSIX shared memory between two processes of one host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace asyncmoe {

enum class Arrival : int { kReady, kNotYet, kGone };

// A ring of `slots` buffers of `slot_bytes` each. The sender fills a slot in place and publishes it; the receiver reads
// it in place and releases it. The sender creates the ring and the receiver attaches to it; then its name is removed
// from the system. Each end notices if the other dies, because the kernel drops the lock it held on the segment.
class ShmRing {
  public:
    // The sender's end. Allocates all memory at once. Throws std::runtime_error with the system's message, and
    // std::invalid_argument if another live process uses the name.
    static ShmRing* create(const std::string& name, int64_t slots, int64_t slot_bytes);
    // The receiver's end, or null if there is no sender yet. Throws std::runtime_error with the system's message, and
    // std::invalid_argument if the ring has a different size or already has a receiver.
    static ShmRing* attach(const std::string& name, int64_t slots, int64_t slot_bytes);
    ~ShmRing();
    ShmRing(const ShmRing&) = delete;
    ShmRing& operator=(const ShmRing&) = delete;

    std::byte* slot(int64_t index) const;
    int64_t slots() const { return slots_; }
    int64_t slot_bytes() const { return slot_bytes_; }
    // Waits at most `microseconds` until `needed` slots are free (sender) or filled (receiver). The first of them is
    // slot n % slots, where n is the number of slots this end has published or released.
    Arrival wait(int64_t microseconds, int64_t needed) const;
    // Hands the next slot over to the other end.
    void advance();

  private:
    struct Header;
    ShmRing(std::string name, int descriptor, Header* header, int64_t slots, int64_t slot_bytes, bool sender);
    bool ready(int64_t needed) const;
    bool gone() const;

    std::string name_;
    int descriptor_;
    Header* header_;
    int64_t slots_;
    int64_t slot_bytes_;
    bool sender_;
};

}  // namespace asyncmoe
