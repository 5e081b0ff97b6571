// Whose threads the operators run on.
#pragma once

namespace questkv {

// From now on, what this thread calls runs on threads of the core's own (true), or on libgomp's where the process has
// it (false, as from the start). Results don't depend on it.
void take_own_threads(bool own);

}  // namespace questkv
