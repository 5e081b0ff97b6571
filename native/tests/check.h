// Counting checks: CHECK(condition) says where one failed, and in which case.
#pragma once

#include <cstdio>
#include <string>

namespace questkv::tests {

struct Tally {
    long passed = 0, failed = 0;
    std::string where;  // the case that runs
};

inline Tally& tally() {
    static Tally counts;
    return counts;
}

inline void check(bool holds, const char* what, const char* file, int line) {
    if (holds) {
        ++tally().passed;
        return;
    }
    // A fault shows in many checks: the first ones say enough.
    if (++tally().failed <= 20)
        std::fprintf(stderr, "%s:%d: failed: %s\n    in %s\n", file, line, what, tally().where.c_str());
}

}  // namespace questkv::tests

#define CHECK(condition) ::questkv::tests::check((condition), #condition, __FILE__, __LINE__)
