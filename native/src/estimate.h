// Scores of pages, read off their boxes.
#pragma once

#include "items.h"

namespace questkv::QUESTKV_ISA_NAME {

// Weights [forms, 2D] of the linear forms that score a box (lo first): one for the group's mean, or one per head.
template <class T, class TBox>
inline int64_t score_weights(const Pages& pages, const Rows& rows, const Item& item, float scale, float optimism,
                             bool mean, Workspace& w) {
    const int64_t dim = pages.head_dim, forms = mean ? 1 : item.heads, width = padded(2 * dim);
    float* weights = w.weights.of(forms * width);
    float* form = w.lo.of(2 * dim);
    const T* q = reinterpret_cast<const T*>(rows.q) + (item.row * rows.heads + item.first_head) * dim;
    for (int64_t f = 0; f < forms; ++f) {
        const int64_t from = mean ? 0 : f, to = mean ? item.heads : f + 1;
        for (int64_t d = 0; d < dim; ++d) {
            float sum = 0, size = 0;
            for (int64_t h = from; h < to; ++h) {
                const float x = to_float(q[h * dim + d]) * scale;
                sum += x;
                size += std::fabs(x);
            }
            const float share = 1.0f / static_cast<float>(to - from);
            form[d] = (sum - optimism * size) * share / 2;
            form[dim + d] = (sum + optimism * size) * share / 2;
        }
        arrange<TBox>(form, 2 * dim, weights + f * width);
    }
    return forms;
}

// scores[f * stride + i] of logical pages first + i, i < count.
template <class TBox>
inline void score_pages(const Pages& pages, int64_t kv_head, const int64_t* table, int64_t first, int64_t count,
                        const float* weights, int64_t forms, float* scores, int64_t stride, Workspace& w) {
    const int64_t n = 2 * pages.head_dim, width = padded(n), bytes = pages.box_bytes();
    const char** rows = w.box_rows.of(count + W + kAhead);
    float* scales = w.hi.of(count + W);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t page = table[first + i];
        const Segment& segment = pages.segment_of(page);
        const int64_t at = kv_head * segment.pages + page - segment.start;
        rows[i] = segment.boxes + at * bytes;
        scales[i] = segment.scales ? segment.scales[at] : 1.0f;
    }
    fill(rows + count, rows + count + W + kAhead, rows[count - 1]);
    fill(scales + count, scales + count + W, 1.0f);
    alignas(64) float block[4 * W];
    for (int64_t i = 0; i < count; i += W) {
        const char* const* at = rows + i;
        const size_t here = static_cast<size_t>(least(W, count - i)) * sizeof(float);
        with_heads(forms, [&]<int H>(int64_t f) {
            dot_rows<TBox, H>(at, n, weights + f * width, rows + i + kAhead, block, W);
            for (int h = 0; h < H; ++h) {
                const V score = load<V>(block + h * W) * load<V>(scales + i);
                // A page with a NaN or infinite key gives NaN here: it must be read.
                const V shown = score == score ? score : set1(kInfinity);
                std::memcpy(scores + (f + h) * stride + i, &shown, here);
            }
        });
    }
}

// Turn per-head scores [heads, count] into the mean of each head's shares, in row 0; +inf stays +inf.
inline void mean_of_shares(float* scores, int64_t heads, int64_t stride, int64_t count, Workspace& w) {
    for (int64_t i = 0; i < count; ++i)
        for (int64_t h = 1; h < heads; ++h)
            if (scores[h * stride + i] == kInfinity) scores[i] = kInfinity;
    float* top = w.sums.of(2 * heads);
    float* total = top + heads;
    for (int64_t h = 0; h < heads; ++h) {
        top[h] = -kInfinity;
        total[h] = 0;
        for (int64_t i = 0; i < count; ++i)
            if (scores[i] != kInfinity && scores[h * stride + i] > top[h]) top[h] = scores[h * stride + i];
        for (int64_t i = 0; i < count; ++i)
            if (scores[i] != kInfinity) total[h] += std::exp(scores[h * stride + i] - top[h]);
        // A head whose logits all overflow to -inf has nothing to share out.
        if (top[h] == -kInfinity) top[h] = total[h] = kInfinity;
    }
    for (int64_t i = 0; i < count; ++i) {
        if (scores[i] == kInfinity) continue;
        float share = 0;
        for (int64_t h = 0; h < heads; ++h) share += std::exp(scores[h * stride + i] - top[h]) / total[h];
        scores[i] = share / static_cast<float>(heads);
    }
}

template <class T>
inline void estimate_item(const Pages& pages, const Rows& rows, const Item& item, float scale, const Scoring& scoring,
                          int64_t count, float* scores) {
    Workspace& w = workspace();
    const int64_t* table = rows.page_table + item.row * rows.table_width;
    const bool mean = scoring.group == Group::mean;
    auto run = [&]<class TBox>() {
        const int64_t forms = score_weights<T, TBox>(pages, rows, item, scale, scoring.optimism, mean, w);
        if (forms == 1) {
            score_pages<TBox>(pages, item.kv_head, table, 0, count, w.weights.data(), 1, scores, count, w);
        } else {
            float* all = w.scores.of(forms * count);
            score_pages<TBox>(pages, item.kv_head, table, 0, count, w.weights.data(), forms, all, count, w);
        }
        if (scoring.group == Group::softmax_mean) {
            float* all = forms == 1 ? scores : w.scores.data();
            mean_of_shares(all, forms, count, count, w);
            if (forms > 1) std::memcpy(scores, all, static_cast<size_t>(count) * sizeof(float));
        }
    };
    if (pages.box_dtype() == DType::i8) run.template operator()<int8_t>();
    else run.template operator()<T>();
}

}  // namespace questkv::QUESTKV_ISA_NAME
