// The K pages of highest score, by bisection on the scores' bits: each step is one pass of vector comparisons.
#pragma once

#include <limits>

#include "simd.h"

namespace questkv::QUESTKV_ISA_NAME {

// Order-preserving bits of a score; a NaN counts as +inf, and -0 as +0.
inline uint32_t sortable(float score) {
    if (score != score) score = std::numeric_limits<float>::infinity();
    const uint32_t bits = bit_cast<uint32_t>(score + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

inline int64_t count_at_least(const uint32_t* keys, int64_t n, uint32_t threshold) {
    uint32_t count = 0;
    for (int64_t i = 0; i < n; ++i) count += keys[i] >= threshold;
    return count;
}

// Bit i: whether keys[i] >= threshold, for i < W.
inline uint32_t places_at_least(const uint32_t* keys, uint32_t threshold) {
#if defined(__AVX512F__)
    return _mm512_cmpge_epu32_mask(_mm512_loadu_si512(keys), _mm512_set1_epi32(static_cast<int32_t>(threshold)));
#else
    uint32_t places = 0;
    for (int i = 0; i < W; ++i) places |= static_cast<uint32_t>(keys[i] >= threshold) << i;
    return places;
#endif
}

// Write the selected logical pages, ascending, to list; returns their number, min(pages, wanted).
//   scores: [pages]. keys: scratch of [pages + W].
inline int64_t select_pages(const float* scores, int64_t pages, int64_t wanted, int64_t sink, int64_t recent,
                            uint32_t* keys, int64_t* list) {
    if (wanted >= pages) {
        for (int64_t p = 0; p < pages; ++p) list[p] = p;
        return pages;
    }
    const int64_t first = sink, last = pages - recent, best = wanted - sink - recent, n = last - first;
    for (int64_t i = 0; i < n; ++i) keys[i] = sortable(scores[first + i]);
    // The highest threshold that at least `best` keys reach. It lies between the extremes, often a small part of all
    // numbers.
    uint32_t low = 0xffffffffu, high = 0;
    for (int64_t i = 0; i < n; ++i) {
        low = keys[i] < low ? keys[i] : low;
        high = keys[i] > high ? keys[i] : high;
    }
    int64_t reaching_low = n;
    while (low < high && reaching_low > best) {
        const uint32_t middle = low + (high - low) / 2 + 1;
        const int64_t reaching = count_at_least(keys, n, middle);
        if (reaching >= best) {
            low = middle;
            reaching_low = reaching;
        } else {
            high = middle - 1;
        }
    }
    // Of the keys at the threshold itself, the lower pages win; where too many reach it, that is the only tie.
    int64_t ties = best;
    if (reaching_low > best)
        for (int64_t i = 0; i < n; ++i) ties -= keys[i] > low;
    int64_t out = 0;
    for (int64_t p = 0; p < sink; ++p) list[out++] = p;
    for (int64_t i = 0; i < n; i += W)
        for (uint32_t found = places_at_least(keys + i, low); found; found &= found - 1) {
            const int64_t at = i + __builtin_ctz(found);
            if (at >= n || (keys[at] == low && --ties < 0)) continue;
            list[out++] = first + at;
        }
    for (int64_t p = last; p < pages; ++p) list[out++] = p;
    return out;
}

// The same where only some pages have scores, which must be enough: `candidates` [n], ascending. All others are taken
// to score -inf.
//   keys, all: scratch of [pages + W] and [pages].
inline int64_t select_candidates(const int64_t* candidates, const float* scores, int64_t n, int64_t pages,
                                 int64_t wanted, int64_t sink, int64_t recent, uint32_t* keys, float* all,
                                 int64_t* list) {
    constexpr float lowest = -std::numeric_limits<float>::infinity();
    int64_t from = 0, to = n, shown = 0;
    while (from < n && candidates[from] < sink) ++from;
    while (to > from && candidates[to - 1] >= pages - recent) --to;
    for (int64_t i = from; i < to; ++i) shown += scores[i] > lowest;
    const int64_t best = wanted - sink - recent;
    if (shown < best) {
        // Lower pages without a score win against those that score -inf.
        for (int64_t p = 0; p < pages; ++p) all[p] = lowest;
        for (int64_t i = 0; i < n; ++i) all[candidates[i]] = scores[i];
        return select_pages(all, pages, wanted, sink, recent, keys, list);
    }
    for (int64_t p = 0; p < sink; ++p) list[p] = p;
    int64_t* middle = list + sink;
    select_pages(scores + from, to - from, best, 0, 0, keys, middle);
    for (int64_t i = 0; i < best; ++i) middle[i] = candidates[from + middle[i]];
    for (int64_t i = 0; i < recent; ++i) middle[best + i] = pages - recent + i;
    return wanted;
}

}  // namespace questkv::QUESTKV_ISA_NAME
