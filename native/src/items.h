// What the operators share: which heads read which pages, and the memory that a thread keeps.
//
// Nothing here may instantiate a template of the standard library that is not inlined: its code would be compiled for
// this instruction set, and the linker may keep it for all of them. Hence Buffer, least, most, fill.
#pragma once

#include <cstdlib>
#include <limits>
#include <new>
#include <type_traits>

#include "dot.h"
#include "parallel.h"
#include "questkv/kernels.h"

namespace questkv::QUESTKV_ISA_NAME {

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

template <class T>
inline void fill(T* first, T* last, T value) {
    for (; first < last; ++first) *first = value;
}

// Under sanitizers a buffer is as long as what was asked for last, so that they see any step past its end.
#if defined(QUESTKV_EXACT_BUFFERS)
constexpr bool kExactBuffers = true;
#else
constexpr bool kExactBuffers = false;
#endif

// Uninitialised memory that grows and is kept, so that nothing is allocated once it has grown.
template <class T>
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }

    // Room for n values; what was there is lost.
    T* of(int64_t n) {
        if (n > size_ || (kExactBuffers && n != size_)) {
            std::free(data_);
            data_ = static_cast<T*>(std::malloc(static_cast<size_t>(n) * sizeof(T)));
            size_ = data_ ? n : 0;
            if (!data_) throw std::bad_alloc();
        }
        return data_;
    }

    T* data() { return data_; }

  private:
    T* data_ = nullptr;
    int64_t size_ = 0;
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows ahead that are prefetched where pages are picked at random, which is beyond the hardware's guess.
constexpr int64_t kAhead = 4 * W;

// Call f(unit) for every unit below `units` on up to `threads` threads.
template <class F>
void run_units(int threads, int64_t units, F&& f) {
    using Call = std::remove_reference_t<F>;
    parallel_for(threads, units, [](void* call, int64_t unit) { (*static_cast<Call*>(call))(unit); }, &f);
}

// Call f with blocks of up to four heads, which share each row that is loaded.
template <class F>
inline void with_heads(int64_t heads, F&& f) {
    int64_t h = 0;
    for (; h + 4 <= heads; h += 4) f.template operator()<4>(h);
    if (heads - h == 3) f.template operator()<3>(h);
    if (heads - h == 2) f.template operator()<2>(h);
    if (heads - h == 1) f.template operator()<1>(h);
}

// Spans whose pages are scored where a row wants so many pages: the pages of those are four times as many.
inline int64_t spans_kept(int64_t span_pages, int64_t wanted) { return (4 * wanted + span_pages - 1) / span_pages; }

// Query heads that read the same list of pages: one row's group, or one query head alone.
struct Item {
    int64_t row, kv_head, first_head, heads;
};

inline Item item_of(int64_t index, const Pages& pages, const Rows& rows, int64_t lists) {
    const int64_t row = index / lists, list = index % lists, group = rows.heads / pages.kv_heads;
    if (lists == pages.kv_heads) return {row, list, list * group, group};
    return {row, list / group, list, 1};
}

inline int64_t sealed_pages(const Pages& pages, const Rows& rows, int64_t row) {
    return (rows.lengths[row] - 1) / pages.page_size;
}

// One sealed page of one KV head.
struct SealedPage {
    const char *keys, *values;
    const int8_t* box;          // [2, D] codes of a coded page
    float scale;                // of its box
    const float* value_scales;  // [S, 2], null for a plain page
};

// Scratch that a thread keeps between calls.
struct Workspace {
    Buffer<float> query, weights, scores, partial, sums, lo, hi;
    Buffer<uint32_t> keys;
    Buffer<bf16> query16;
    Buffer<int8_t> digits;
    Buffer<int32_t> words, totals;
    Buffer<float> decoded, plain_query, float_query, token_weights;
    Buffer<SealedPage> sealed;
    Buffer<char> copies;
    Buffer<float> span_scores, page_scores;
    Buffer<int64_t> spans, candidates;
    Buffer<const char*> key_rows, value_rows, next_keys, next_values, boxes;
};

inline Workspace& workspace() {
    static thread_local Workspace w;
    return w;
}

}  // namespace questkv::QUESTKV_ISA_NAME
