// Running units of work on threads: torch's own OpenMP pool where there is one, else a pool of our own.
#pragma once

#include <cstdint>

namespace questkv {

// Call call(context, unit) for 0 <= unit < units on up to `threads` threads, each taking the next unit when it is free.
// What a call throws is thrown here, once all threads are done: the first exception of several; other units may have
// been left out then.
void parallel_for(int threads, int64_t units, void (*call)(void*, int64_t), void* context);

}  // namespace questkv
