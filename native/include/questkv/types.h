// What the core reads and writes. It knows neither Python nor torch; letters as in docs/layout.md.
#pragma once

#include <cstddef>
#include <cstdint>

namespace questkv {

enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2, i8 = 3 };

constexpr int64_t size_of(DType type) { return type == DType::f32 ? 4 : type == DType::i8 ? 1 : 2; }

enum class Group : int32_t { mean = 0, softmax_mean = 1, per_head = 2 };

// N physical pages of one layer with one storage: plain pages in the model's type, or coded pages in eight bits.
struct Segment {
    char* keys;           // [Hkv, N, S, D]; codes are uint8
    char* values;         // [Hkv, N, S, Dv]
    char* boxes;          // [Hkv, N + M, 2, D] int8 or the keys' type; index 0 lo, 1 hi; a page's, then a span's
    float* scales;        // [Hkv, N + M], null for boxes in the keys' type
    float* value_scales;  // [Hkv, N, S, 2] step and offset of every token's codes; null for plain pages
    int64_t start;        // physical page of its first page
    int64_t pages;        // N
    int64_t spans;        // M

    bool coded() const { return value_scales != nullptr; }
    int64_t box_of_page(int64_t kv_head, int64_t page) const { return kv_head * (pages + spans) + page - start; }
    // A span's box has the number of its last page, divided by the pages a span.
    int64_t box_of_span(int64_t kv_head, int64_t last, int64_t span_pages) const {
        return kv_head * (pages + spans) + pages + (last - start) / span_pages;
    }
};

// All pages of one layer; physical page ids number the segments' pages one after another.
struct Pages {
    const Segment* segments;
    int64_t num_segments;
    int64_t kv_heads;    // Hkv
    int64_t page_size;   // S
    int64_t head_dim;    // D, channels of queries and keys
    int64_t value_dim;   // Dv, channels of values and outputs
    DType dtype;         // of plain keys and values, and of queries
    bool coded;          // whether some segment is
    int64_t span_pages;  // pages a span, 0 where spans have no boxes

    // Of one token's key and value in a plain page.
    int64_t key_bytes() const { return head_dim * size_of(dtype); }
    int64_t value_bytes() const { return value_dim * size_of(dtype); }
    DType box_dtype() const { return segments[0].scales ? DType::i8 : dtype; }
    int64_t box_bytes() const { return 2 * head_dim * size_of(box_dtype()); }

    // The segment of a physical page: few segments, the largest last.
    const Segment& segment_of(int64_t page) const {
        int64_t i = num_segments - 1;
        while (page < segments[i].start) --i;
        return segments[i];
    }
};

// How logits become weights.
struct Softmax {
    float scale;
    float softcap;       // 0: none
    const float* sinks;  // [Hq], or null
};

// How pages are scored and chosen.
struct Scoring {
    float optimism;
    Group group;
    int64_t sink_pages;
    int64_t recent_pages;
};

// Rows: one query token of one sequence each.
struct Rows {
    int64_t count;                          // R
    int64_t heads;                          // Hq
    int64_t table_width;                    // P
    const char* q;                          // [R, Hq, D]
    const int64_t* page_table;              // [R, P] physical pages
    const int64_t* lengths;                 // [R] tokens visible, the row's own included
    const int64_t* num_selected = nullptr;  // [R] K, sealed pages that the row may read; null where it is not asked for
};

}  // namespace questkv
