// Features of the current processor.
#pragma once

namespace asyncmoe {

#if defined(__x86_64__)
#define ASYNCMOE_AVX512 __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512")))

inline bool has_avx512() {
    static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
    return has;
}
#endif

}  // namespace asyncmoe
