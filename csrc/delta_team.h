// A thread block that works in steps: every thread does its part of a step, and none begins the next before all are
// done. On the host one thread does all parts of a step, so that the kernels' bodies can be tested without a GPU.
#pragma once

#include <cstdint>

#include "digest.h"

namespace asyncmoe {

constexpr int kTeam = 256;

// Calls part(thread) for every thread of the team. All threads of a block call it, with equal arguments.
template <typename Part>
ASYNCMOE_BOTH inline void step(const Part& part) {
#ifdef __CUDA_ARCH__
    part(static_cast<int>(threadIdx.x));
    __syncthreads();
#else
    for (int thread = 0; thread < kTeam; ++thread) part(thread);
#endif
}

// One value per thread, and room for a scan of them.
template <typename T>
struct OfTeam {
    T now[kTeam];
    T next[kTeam];

    // The combined value of the threads before `thread`, after `scan`.
    ASYNCMOE_BOTH T before(int thread) const { return thread ? now[thread - 1] : T{0}; }
    ASYNCMOE_BOTH T total() const { return now[kTeam - 1]; }
};

// Replaces each value by its combination with those of all threads before it (Hillis, Steele: Data parallel
// algorithms, 1986).
template <typename T, typename Combine>
ASYNCMOE_BOTH inline void scan(OfTeam<T>& values, const Combine& combine) {
    static_assert(kTeam == 1 << 8, "the result must be in `now` again after an even number of steps");
    for (int apart = 1; apart < kTeam; apart *= 4) {
        step(
            [&](int i) { values.next[i] = i < apart ? values.now[i] : combine(values.now[i - apart], values.now[i]); });
        const int twice = 2 * apart;
        step([&](int i) {
            values.now[i] = i < twice ? values.next[i] : combine(values.next[i - twice], values.next[i]);
        });
    }
}

template <typename T>
ASYNCMOE_BOTH inline void scan_sums(OfTeam<T>& values) {
    scan(values, [](T a, T b) { return a + b; });
}

template <typename T>
ASYNCMOE_BOTH inline void scan_largest(OfTeam<T>& values) {
    scan(values, [](T a, T b) { return a > b ? a : b; });
}

// Returns the sum of the threads' values to all threads, which may write new ones at once.
ASYNCMOE_BOTH inline uint64_t sum_of_team(OfTeam<uint64_t>& values) {
    scan_sums(values);
    const uint64_t sum = values.total();
#ifdef __CUDA_ARCH__
    __syncthreads();
#endif
    return sum;
}

}  // namespace asyncmoe
