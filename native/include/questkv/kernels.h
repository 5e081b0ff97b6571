// The operators. Every function of a KernelTable is compiled once per instruction set; `kernels()` picks a table.
#pragma once

#include "questkv/types.h"

namespace questkv {

// A row's list of pages is read in parts, each with its own softmax, merged in order: a quarter of its tokens, but no
// fewer than kFewestTokens (what each part costs besides) and no more than kMostTokens (its scores stay in the cache).
// The parts depend on the list only, so a row's result depends neither on the batch nor on the threads.
constexpr int64_t kFewestTokens = 512, kMostTokens = 2048;

struct KernelTable {
    const char* name;

    // Write n tokens: keys [n, Hkv, D] and values [n, Hkv, Dv] to slots [n] (physical page * S + slot).
    void (*append)(const Pages&, int64_t n, const int64_t* slots, const char* keys, const char* values, int threads);

    // Write the boxes of n full plain pages. Reads S * D keys a page and head, writes 2 * D codes and a scale. Where
    // `into` is not null, box and content of page_ids[i] are coded into the coded page into[i] instead.
    void (*seal)(const Pages&, int64_t n, const int64_t* page_ids, const int64_t* into, int threads);

    // Write the boxes of n spans around those of their pages: page_ids [n, span_pages], sealed.
    void (*seal_spans)(const Pages&, int64_t n, const int64_t* page_ids, int threads);

    // scores [R, H, P] float32, H = Hq under per_head, else Hkv; -inf behind a row's sealed pages. Where the rows have
    // a K and spans have boxes, also -inf for pages outside the spans that score best.
    void (*estimate)(const Pages&, const Rows&, float scale, const Scoring&, float* scores, int threads);

    // selection [R, H, width] int64, -1 at the end; reads scores [R, H, P] of the first num_pages[r] pages.
    void (*select)(const float* scores, int64_t rows, int64_t heads, int64_t pages, const int64_t* num_pages,
                   const int64_t* num_selected, const Scoring&, int64_t width, int64_t* selection, int threads);

    // out [R, Hq, Dv] over selection [R, H, width] and the open page; selection null: over everything.
    void (*attend)(const Pages&, const Rows&, const int64_t* selection, int64_t heads, int64_t width, const Softmax&,
                   char* out, int threads);

    // estimate, select and attend, for rows with a K; pages_read [R] or null.
    void (*decode)(const Pages&, const Rows&, const Softmax&, const Scoring&, char* out, int64_t* pages_read,
                   int threads);

    // out [rows, outputs] = x [rows, channels] times weight [outputs, channels] transposed, plus bias [outputs] or
    // null, all of one type; with scales [outputs] the weights are int8 codes, and a row's products are multiplied by
    // its scale. Reads every weight once. For few rows: arithmetic grows with them, bytes don't.
    void (*linear)(DType, int64_t rows, int64_t outputs, int64_t channels, const char* x, const char* weight,
                   const char* scales, const char* bias, char* out, int threads);
};

// The tables that this machine can run, best first; ends with a null name.
const KernelTable* const* available_kernels();

// The table that QUESTKV_ISA names, or the best one. Null if it names one that is not available.
const KernelTable* kernels(const char* name);

}  // namespace questkv
