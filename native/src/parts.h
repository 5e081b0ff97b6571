// A list of pages is attended in parts, each with its own softmax; what parts are, and how they are merged.
#pragma once

#include "items.h"

namespace questkv::QUESTKV_ISA_NAME {

// Softmax state of an item over a part of its list: m, l [heads], acc [heads, padded(Dv)] in pair order.
struct Partial {
    float *m, *l, *acc;
};

inline Partial partial_at(float* buffer, int64_t heads) { return {buffer, buffer + heads, buffer + 2 * heads}; }
inline int64_t partial_size(int64_t heads, int64_t width) { return heads * (2 + width); }

// The pages that an item reads: a null list is the identity, and its last entry is the open page.
struct List {
    const int64_t* pages;
    int64_t selected, in_open;  // sealed pages in the list, tokens of the open page
    int64_t open;               // its logical page
};

inline int64_t pages_a_part(const Pages& pages, const List& list) {
    const int64_t quarter = (list.selected + 1) * pages.page_size / 4;
    return most(1, least(most(quarter, kFewestTokens), kMostTokens) / pages.page_size);
}

// Scores to weights: logits = scale * scores (capped), m = their maximum, p = exp(logit - m), l = sum of p.
inline void softmax_part(float* scores, int64_t n, const Softmax& softmax, float* m, float* l) {
    const V scale = set1(softmax.scale);
    V most = set1(-kInfinity);
    for (int64_t i = 0; i < n; i += W) {
        V s = load<V>(scores + i) * scale;
        if (softmax.softcap > 0) s = softmax.softcap * tanh(s / softmax.softcap);
        if (i + W > n)
            for (int64_t j = n - i; j < W; ++j) s[j] = -kInfinity;
        store(scores + i, s);
        most = vmax(most, s);
    }
    float top = most[0];
    for (int j = 1; j < W; ++j) top = most[j] > top ? most[j] : top;
    const V reference = set1(top == -kInfinity ? 0.0f : top);
    V total = {};
    for (int64_t i = 0; i < n; i += W) {
        const V p = exp(load<V>(scores + i) - reference);
        store(scores + i, p);
        total += p;
    }
    *m = top;
    *l = sum(total);
}

// Merge part into sum: the softmax over both.
inline void merge(const Partial& sum, const Partial& part, int64_t heads, int64_t width) {
    for (int64_t h = 0; h < heads; ++h) {
        const float top = part.m[h] > sum.m[h] ? part.m[h] : sum.m[h];
        const float a = sum.m[h] == -kInfinity ? 0.0f : std::exp(sum.m[h] - top);
        const float b = part.m[h] == -kInfinity ? 0.0f : std::exp(part.m[h] - top);
        sum.l[h] = sum.l[h] * a + part.l[h] * b;
        for (int64_t d = 0; d < width; ++d)
            sum.acc[h * width + d] = sum.acc[h * width + d] * a + part.acc[h * width + d] * b;
        sum.m[h] = top;
    }
}

}  // namespace questkv::QUESTKV_ISA_NAME
