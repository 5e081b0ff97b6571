// Which instruction set runs: the best that this machine has, or the one that is asked for by name.
#include <cstring>

#include "questkv/kernels.h"

namespace questkv {

#define QUESTKV_DECLARE(name)       \
    namespace name {                \
    extern const KernelTable table; \
    }
#if defined(__x86_64__)
QUESTKV_DECLARE(avx512bf16)
QUESTKV_DECLARE(avx512)
QUESTKV_DECLARE(avx2)
#elif defined(__aarch64__)
QUESTKV_DECLARE(neon)
#endif
QUESTKV_DECLARE(plain)

namespace {

struct Available {
    const KernelTable* tables[5] = {};  // the last one stays null

    Available() {
        int n = 0;
#if defined(__x86_64__)
        __builtin_cpu_init();
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
        const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512cd");
        if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))
            tables[n++] = &avx512bf16::table;
        if (avx512) tables[n++] = &avx512::table;
        if (avx2) tables[n++] = &avx2::table;
#elif defined(__aarch64__)
        tables[n++] = &neon::table;
#endif
        tables[n] = &plain::table;
    }
};

}  // namespace

const KernelTable* const* available_kernels() {
    static const Available available;
    return available.tables;
}

const KernelTable* kernels(const char* name) {
    const KernelTable* const* tables = available_kernels();
    if (!name || !*name) return tables[0];
    for (; *tables; ++tables)
        if (!std::strcmp((*tables)->name, name)) return *tables;
    return nullptr;
}

}  // namespace questkv
