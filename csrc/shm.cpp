#include "shm.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

namespace asyncmoe {

// Lies at the start of the segment. `published` and `released` count slots modulo 2^32.
struct ShmRing::Header {
    std::atomic<uint32_t> ready;
    std::atomic<uint32_t> attached;
    std::atomic<uint32_t> sender_closed;
    std::atomic<uint32_t> receiver_closed;
    int64_t slots;
    int64_t slot_bytes;
    alignas(64) std::atomic<uint32_t> published;
    alignas(64) std::atomic<uint32_t> released;
};

namespace {

static_assert(std::atomic<uint32_t>::is_always_lock_free, "a lock would not reach across processes");

constexpr int64_t kHeaderBytes = 4096;
constexpr int64_t kSlotAlignment = 4096;
constexpr int kSpins = 64;
constexpr off_t kSenderLock = 0, kReceiverLock = 1;  // the byte of the segment that each end keeps locked

constexpr const char* kOwnName = "give every exchange its own session name";

int64_t slot_stride(int64_t slot_bytes) { return (slot_bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment; }

int64_t segment_bytes(int64_t slots, int64_t slot_bytes) { return kHeaderBytes + slots * slot_stride(slot_bytes); }

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

struct flock byte_lock(off_t byte) {
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = byte;
    lock.l_len = 1;
    return lock;
}

bool take_lock(int descriptor, off_t byte) {
    auto lock = byte_lock(byte);
    return fcntl(descriptor, F_OFD_SETLK, &lock) == 0;
}

bool another_holds(int descriptor, off_t byte) {
    auto lock = byte_lock(byte);
    return fcntl(descriptor, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

class Descriptor {
  public:
    explicit Descriptor(int value) : value_(value) {}
    ~Descriptor() {
        if (value_ >= 0) close(value_);
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    int get() const { return value_; }
    int release() {
        const int value = value_;
        value_ = -1;
        return value;
    }

  private:
    int value_;
};

int create_exclusively(const std::string& name) {
    for (int attempt = 0; attempt < 3; ++attempt) {
        const int made = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
        if (made >= 0) return made;
        if (errno != EEXIST) fail("shm_open " + name);
        const Descriptor old(shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
        if (old.get() >= 0 && another_holds(old.get(), kSenderLock))
            throw std::invalid_argument("shared memory " + name + ": got a name in use, expected a free one; " +
                                        kOwnName);
        shm_unlink(name.c_str());  // left behind by a process that died
    }
    throw std::invalid_argument("shared memory " + name +
                                ": got a name that another process keeps creating, expected a free one; " + kOwnName);
}

void* map(int descriptor, int64_t bytes, const std::string& name) {
    void* start =
        mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, 0);
    if (start == MAP_FAILED) fail("mmap " + name);
    return start;
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t value, int64_t microseconds) {
    const timespec limit{static_cast<time_t>(microseconds / 1000000), static_cast<long>(microseconds % 1000000 * 1000)};
    // Ignore the result (woken, timed out, interrupted, or the value had already changed): the caller checks again.
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &limit, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

ShmRing::ShmRing(std::string name, int descriptor, Header* header, int64_t slots, int64_t slot_bytes, bool sender)
    : name_(std::move(name)),
      descriptor_(descriptor),
      header_(header),
      slots_(slots),
      slot_bytes_(slot_bytes),
      sender_(sender) {}

ShmRing* ShmRing::create(const std::string& name, int64_t slots, int64_t slot_bytes) {
    if (slots < 1 || slot_bytes < 1)
        throw std::invalid_argument("ring of shared memory: got " + std::to_string(slots) + " slots of " +
                                    std::to_string(slot_bytes) + " bytes, expected at least one of each");
    Descriptor segment(create_exclusively(name));
    const int64_t bytes = segment_bytes(slots, slot_bytes);
    if (!take_lock(segment.get(), kSenderLock)) fail("locking " + name);
    // Allocate now: with a full /dev/shm, a later copy would end in a SIGBUS that kills the process.
    if (const int reason = posix_fallocate(segment.get(), 0, bytes)) {
        shm_unlink(name.c_str());
        throw std::runtime_error("shared memory " + name + ": got " + std::generic_category().message(reason) +
                                 ", expected " + std::to_string(bytes) +
                                 " bytes of /dev/shm; enlarge it or lower bucket_bytes");
    }
    auto* header = new (map(segment.get(), bytes, name)) Header{};
    header->slots = slots;
    header->slot_bytes = slot_bytes;
    header->ready.store(1, std::memory_order_release);
    return new ShmRing(name, segment.release(), header, slots, slot_bytes, true);
}

ShmRing* ShmRing::attach(const std::string& name, int64_t slots, int64_t slot_bytes) {
    Descriptor segment(shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
    if (segment.get() < 0) {
        if (errno == ENOENT) return nullptr;
        fail("shm_open " + name);
    }
    struct stat status = {};
    if (fstat(segment.get(), &status) != 0) fail("fstat " + name);
    // A segment without a live sender was left behind; the new sender will replace it under this name.
    if (status.st_size < kHeaderBytes || !another_holds(segment.get(), kSenderLock)) return nullptr;
    void* start = map(segment.get(), status.st_size, name);
    auto* header = static_cast<Header*>(start);
    const bool ready = header->ready.load(std::memory_order_acquire) == 1;
    const bool same = ready && header->slots == slots && header->slot_bytes == slot_bytes &&
                      status.st_size == segment_bytes(slots, slot_bytes);
    if (!same || !take_lock(segment.get(), kReceiverLock)) {
        const std::string found = std::to_string(header->slots) + " slots of " + std::to_string(header->slot_bytes);
        munmap(start, static_cast<size_t>(status.st_size));
        if (!ready) return nullptr;
        if (same) throw std::invalid_argument("shared memory " + name + ": got a second receiver, expected one");
        throw std::invalid_argument("shared memory " + name + ": got " + found + " bytes, expected " +
                                    std::to_string(slots) + " slots of " + std::to_string(slot_bytes) + " bytes");
    }
    header->attached.store(1, std::memory_order_release);
    shm_unlink(name.c_str());
    return new ShmRing(name, segment.release(), header, slots, slot_bytes, false);
}

ShmRing::~ShmRing() {
    (sender_ ? header_->sender_closed : header_->receiver_closed).store(1, std::memory_order_release);
    futex_wake(sender_ ? header_->published : header_->released);
    if (sender_ && !header_->attached.load(std::memory_order_acquire)) shm_unlink(name_.c_str());
    munmap(header_, static_cast<size_t>(segment_bytes(slots_, slot_bytes_)));
    close(descriptor_);
}

std::byte* ShmRing::slot(int64_t index) const {
    if (index < 0 || index >= slots_)
        throw std::invalid_argument("slot: got " + std::to_string(index) + ", expected below " +
                                    std::to_string(slots_));
    return reinterpret_cast<std::byte*>(header_) + kHeaderBytes + index * slot_stride(slot_bytes_);
}

bool ShmRing::ready(int64_t needed) const {
    const int64_t filled = static_cast<uint32_t>(header_->published.load(std::memory_order_acquire) -
                                                 header_->released.load(std::memory_order_acquire));
    return (sender_ ? slots_ - filled : filled) >= needed;
}

bool ShmRing::gone() const {
    if (sender_) {
        if (header_->receiver_closed.load(std::memory_order_acquire)) return true;
        return header_->attached.load(std::memory_order_acquire) && !another_holds(descriptor_, kReceiverLock);
    }
    return header_->sender_closed.load(std::memory_order_acquire) || !another_holds(descriptor_, kSenderLock);
}

Arrival ShmRing::wait(int64_t microseconds, int64_t needed) const {
    for (int i = 0; i < kSpins; ++i) {
        if (ready(needed)) return Arrival::kReady;
        sched_yield();
    }
    auto& word = sender_ ? header_->released : header_->published;
    const uint32_t seen = word.load(std::memory_order_acquire);
    if (ready(needed)) return Arrival::kReady;
    if (!gone()) {
        futex_wait(word, seen, std::max<int64_t>(1, microseconds));
        if (ready(needed)) return Arrival::kReady;
        if (!gone()) return Arrival::kNotYet;
    }
    return ready(needed) ? Arrival::kReady : Arrival::kGone;  // slots handed over before the peer ended still count
}

void ShmRing::advance() {
    auto& word = sender_ ? header_->published : header_->released;
    word.fetch_add(1, std::memory_order_acq_rel);
    futex_wake(word);
}

}  // namespace asyncmoe
