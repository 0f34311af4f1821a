// Waiting on the host for what only looking can tell, without the interpreter's lock.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace asyncmoe {

// Whether `look` became true in time. The interpreter's lock is given back for as long as this waits, but for ten times
// a second, so that Ctrl-C is seen. Pauses between looks grow with the time already waited, to 1/64 of it and at most a
// millisecond: short messages are noticed at once, and long ones cost no core.
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
