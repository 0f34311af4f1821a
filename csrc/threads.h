// Work shared among a few threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace asyncmoe {

constexpr int kMostThreads = 4;

// Number of threads worth starting to copy `bytes`, at most `asked` (0: as many as the machine has, at most 4).
inline int threads_for(int asked, int64_t bytes) {
    constexpr int64_t kWorthAThread = int64_t{1} << 20;
    if (asked <= 0) asked = std::min<int>(kMostThreads, std::max(1u, std::thread::hardware_concurrency()));
    return static_cast<int>(std::clamp<int64_t>(bytes / kWorthAThread, 1, asked));
}

// Calls task(0) ... task(tasks - 1) on up to `threads` threads, including the caller's, or on fewer if the system
// cannot start more. The first exception of a task is rethrown when all threads have ended; tasks that had not begun
// are skipped.
template <typename Task>
void run_on_threads(int threads, int64_t tasks, const Task& task) {
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error;
    auto work = [&] {
        try {
            for (int64_t i = next.fetch_add(1); i < tasks && !failed; i = next.fetch_add(1)) task(i);
        } catch (...) {
            if (!failed.exchange(true)) error = std::current_exception();
        }
    };
    std::vector<std::thread> others;
    others.reserve(static_cast<size_t>(std::max(threads - 1, 0)));  // nothing may throw while threads run
    try {
        for (int t = 1; t < threads; ++t) others.emplace_back(work);
    } catch (const std::exception&) {
        // Those that did start share the tasks.
    }
    work();
    for (auto& thread : others) thread.join();
    if (error) std::rethrow_exception(error);
}

}  // namespace asyncmoe
