// Polling on the host without the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace asyncmoe {

// Polls `look` and returns whether it became true in time. Releases the GIL while waiting, but takes it ten times a
// second to handle Ctrl-C. After 200 us the pause between polls is 1/64 of the time already waited, at most a
// millisecond: short messages are noticed at once, and long ones do not occupy a core.
template <typename Look>
bool wait_until(Look look, double timeout_s) {
    using Clock = std::chrono::steady_clock;
    using std::chrono::microseconds;
    constexpr microseconds kEager(200), kShortest(20), kLongest(1000), kSignals(100000);
    const auto started = Clock::now();
    const auto limit =
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::clamp(timeout_s, 0.0, 1e9)));
    for (;;) {
        {
            pybind11::gil_scoped_release released;
            for (const auto slice = Clock::now() + kSignals; Clock::now() < slice;) {
                if (look()) return true;
                const auto waited = std::chrono::duration_cast<microseconds>(Clock::now() - started);
                if (waited > limit) return false;
                if (waited > kEager)
                    std::this_thread::sleep_for(std::clamp(waited / 64, kShortest, kLongest));
                else
                    std::this_thread::yield();
            }
        }
        if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
    }
}

}  // namespace asyncmoe
