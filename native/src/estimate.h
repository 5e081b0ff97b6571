// Scores of pages, read off their boxes.
#pragma once

#include "items.h"
#include "select.h"

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
        float *sum = form, *size = form + dim;
        fill(form, form + 2 * dim, 0.0f);
        for (int64_t h = from; h < to; ++h)
            for (int64_t d = 0; d < dim; ++d) {
                const float x = to_float(q[h * dim + d]) * scale;
                sum[d] += x;
                size[d] += std::fabs(x);
            }
        const float share = 1.0f / static_cast<float>(to - from);
        for (int64_t d = 0; d < dim; ++d) {
            const float middle = sum[d], width_of = optimism * size[d];
            form[d] = (middle - width_of) * share / 2;
            form[dim + d] = (middle + width_of) * share / 2;
        }
        arrange<TBox>(form, 2 * dim, weights + f * width);
    }
    return forms;
}

#if defined(__AVX512VNNI__)
// A linear form in fixed point, so that codes are multiplied as they are, 64 at a time: weight = unit * (d0 + d1 / 256
// + d2 / 65536) with three signed digits. Its error, at most 2^-24 of the largest weight, is that of a float; the sums
// are exact. Codes are multiplied as code + 128, and `start`, what a sum begins with, takes the 128 off again.
struct FixedForm {
    const int8_t* digits;  // [3, width]
    __m512i start[3];
    int64_t width;  // 2D, in whole steps of 64
    float unit;
};

// Channels that 32 bits hold the sums of. A lane adds up every 16th of n products, in dot_codes with the two upper
// digits together: a code (at most 128) times 256 d0 + d1 (at most 127 * 256 + 128) is 4177920 at most, and 514 of
// these fit.
constexpr int64_t kFixedChannels = 16 * 512;
static_assert(kFixedChannels / 16 * 128 * (127 * 256 + 128) <= std::numeric_limits<int32_t>::max());

// False where the form has too many weights, no finite ones, or all of them are 0.
inline bool fixed_form(const float* weights, int64_t n, FixedForm& form, Workspace& w) {
    if (n > kFixedChannels) return false;
    // Behind n come zeros, in whole steps of 2W.
    V top = {};
    bool finite = true;
    for (int64_t i = 0; i < n; i += W) {
        const __m512 size = _mm512_abs_ps(_mm512_loadu_ps(weights + i));
        finite &= _mm512_cmp_ps_mask(size, _mm512_set1_ps(kInfinity), _CMP_NLT_UQ) == 0;
        top = bit_cast<V>(_mm512_max_ps(size, bit_cast<__m512>(top)));
    }
    const float largest = _mm512_reduce_max_ps(bit_cast<__m512>(top));
    const float per_unit = 127.0f * 65536.0f / largest;
    if (!finite || !(per_unit < kInfinity)) return false;
    form.width = (n + 63) / 64 * 64;
    form.unit = largest / 127.0f;
    int8_t* digits = w.digits.of(3 * form.width);
    fill(digits, digits + 3 * form.width, int8_t{0});
    for (int64_t i = 0; i < n; i += W) {
        const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(weights + i), _mm512_set1_ps(per_unit));
        VI rest = bit_cast<VI>(_mm512_cvtps_epi32(scaled));
        for (int k = 2; k >= 0; --k) {
            const __m128i digit = _mm512_cvtepi32_epi8(bit_cast<__m512i>(rest));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(digits + k * form.width + i), digit);
            rest = (rest - bit_cast<VI>(_mm512_cvtepi8_epi32(digit))) >> 8;
        }
    }
    const __m512i bias = _mm512_set1_epi8(static_cast<char>(128));
    for (int k = 0; k < 3; ++k) {
        __m512i sum = _mm512_setzero_si512();
        for (int64_t c = 0; c < form.width; c += 64)
            sum = _mm512_dpbusd_epi32(sum, bias, _mm512_loadu_si512(digits + k * form.width + c));
        form.start[k] = _mm512_sub_epi32(_mm512_setzero_si512(), sum);
    }
    form.digits = digits;
    return true;
}

// out[i] = codes of row i . form for i < W.
inline void dot_codes(const EachRow& rows, const EachRow* next, int64_t n, const FixedForm& form, float* out) {
    const __m512i bias = _mm512_set1_epi8(static_cast<char>(128));
    V parts[W / 4];
    for (int quad = 0; quad < W / 4; ++quad) {
        __m512i acc[4][3];
        for (auto& row : acc)
            for (int k = 0; k < 3; ++k) row[k] = form.start[k];
        for (int64_t c = 0; c < n; c += 64) {
            const __mmask64 here = n - c < 64 ? (__mmask64{1} << (n - c)) - 1 : ~__mmask64{0};
            __m512i digit[3];
            for (int k = 0; k < 3; ++k) digit[k] = _mm512_loadu_si512(form.digits + k * form.width + c);
#pragma GCC unroll 4
            for (int t = 0; t < 4; ++t) {
                prefetch<Ahead::twice, 64>(next[0].row(4 * quad + t), next[1].row(4 * quad + t), c);
                const __m512i codes = _mm512_maskz_loadu_epi8(here, rows.row(4 * quad + t) + c);
                const __m512i shifted = _mm512_xor_si512(codes, bias);
                for (int k = 0; k < 3; ++k) acc[t][k] = _mm512_dpbusd_epi32(acc[t][k], shifted, digit[k]);
            }
        }
        V sums[4];
        for (int t = 0; t < 4; ++t) {
            const VI upper = bit_cast<VI>(acc[t][0]) * 256 + bit_cast<VI>(acc[t][1]), lower = bit_cast<VI>(acc[t][2]);
            sums[t] = __builtin_convertvector(upper, V) + __builtin_convertvector(lower, V) * 0x1p-8f;
        }
        parts[quad] = add_places(sums[0], sums[1], sums[2], sums[3]);
    }
    store(out, add_lanes(parts) * (form.unit * 0x1p-8f));
}
#endif

// A box: its segment, and its number there.
struct Box {
    const Segment& segment;
    int64_t at;
};

inline Box box_of_page(const Pages& pages, int64_t kv_head, int64_t page) {
    const Segment& segment = pages.segment_of(page);
    return {segment, segment.box_of_page(kv_head, page)};
}

inline Box box_of_span(const Pages& pages, int64_t kv_head, int64_t last_page) {
    const Segment& segment = pages.segment_of(last_page);
    return {segment, segment.box_of_span(kv_head, last_page, pages.span_pages)};
}

// scores[f * stride + i] of box_of(i), i < count.
template <class TBox, class BoxOf>
inline void score_boxes(const Pages& pages, const BoxOf& box_of, int64_t count, const float* weights, int64_t forms,
                        float* scores, int64_t stride, Workspace& w) {
    const int64_t n = 2 * pages.head_dim, width = padded(n), bytes = pages.box_bytes();
    const char** rows = w.boxes.of(count + W + kAhead);
    float* scales = w.hi.of(count + W);
    for (int64_t i = 0; i < count; ++i) {
        const Box box = box_of(i);
        rows[i] = box.segment.boxes + box.at * bytes;
        scales[i] = box.segment.scales ? box.segment.scales[box.at] : 1.0f;
    }
    fill(rows + count, rows + count + W + kAhead, rows[count - 1]);
    fill(scales + count, scales + count + W, 1.0f);
    alignas(64) float block[4 * W];
    // Scores of W boxes from place i on, of H forms from f on, are in `block`.
    const auto keep = [&](int64_t i, int64_t f, int H) {
        for (int h = 0; h < H; ++h) {
            const V score = load<V>(block + h * W) * load<V>(scales + i);
            // A page with a NaN or infinite key gives NaN here: it must be read.
            const V shown = score == score ? score : set1(kInfinity);
            std::memcpy(scores + (f + h) * stride + i, &shown,
                        static_cast<size_t>(least(W, count - i)) * sizeof(float));
        }
    };
#if defined(__AVX512VNNI__)
    if constexpr (std::is_same_v<TBox, int8_t>) {
        FixedForm form;
        if (forms == 1 && fixed_form(weights, n, form, w)) {
            for (int64_t i = 0; i < count; i += W) {
                const EachRow at{rows + i}, next[2] = {{rows + i + kAhead / 2}, {rows + i + kAhead}};
                dot_codes(at, next, n, form, block);
                keep(i, 0, 1);
            }
            return;
        }
    }
#endif
    for (int64_t i = 0; i < count; i += W) {
        const EachRow at{rows + i}, next[2] = {{rows + i + kAhead / 2}, {rows + i + kAhead}};
        with_heads(forms, [&]<int H>(int64_t f) {
            const float* form = weights + f * width;
            if (f) dot_rows<TBox, H, Ahead::nothing>(at, next, n, form, block, W);
            else dot_rows<TBox, H, Ahead::twice>(at, next, n, form, block, W);
            keep(i, f, H);
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

// scores[i] of box_of(i), i < count, by the item's queries and rule.
template <class T, class BoxOf>
inline void score_item(const Pages& pages, const Rows& rows, const Item& item, float scale, const Scoring& scoring,
                       const BoxOf& box_of, int64_t count, float* scores) {
    if (!count) return;
    Workspace& w = workspace();
    const bool mean = scoring.group == Group::mean;
    auto run = [&]<class TBox>() {
        const int64_t forms = score_weights<T, TBox>(pages, rows, item, scale, scoring.optimism, mean, w);
        if (forms == 1) {
            score_boxes<TBox>(pages, box_of, count, w.weights.data(), 1, scores, count, w);
        } else {
            float* all = w.scores.of(forms * count);
            score_boxes<TBox>(pages, box_of, count, w.weights.data(), forms, all, count, w);
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

// scores [count] of an item's first pages.
template <class T>
inline void estimate_item(const Pages& pages, const Rows& rows, const Item& item, float scale, const Scoring& scoring,
                          int64_t count, float* scores) {
    const int64_t* table = rows.page_table + item.row * rows.table_width;
    const auto box_of = [&](int64_t i) { return box_of_page(pages, item.kv_head, table[i]); };
    score_item<T>(pages, rows, item, scale, scoring, box_of, count, scores);
}

// Whether fewer pages are scored than there are: those of the best spans, and the last ones that make no whole span.
inline bool by_spans(const Pages& pages, int64_t count, int64_t wanted) {
    return pages.span_pages && spans_kept(pages.span_pages, wanted) < count / pages.span_pages;
}

// The pages that are scored, ascending, to `candidates`, and their scores; returns how many.
template <class T>
inline int64_t estimate_spans(const Pages& pages, const Rows& rows, const Item& item, float scale,
                              const Scoring& scoring, int64_t count, int64_t wanted, int64_t* candidates,
                              float* scores) {
    Workspace& w = workspace();
    const int64_t* table = rows.page_table + item.row * rows.table_width;
    const int64_t size = pages.span_pages, spans = count / size, kept = spans_kept(size, wanted);
    float* of_spans = w.span_scores.of(spans);
    score_item<T>(
        pages, rows, item, scale, scoring,
        [&](int64_t i) { return box_of_span(pages, item.kv_head, table[(i + 1) * size - 1]); }, spans, of_spans);
    int64_t* best = w.spans.of(kept);
    select_pages(of_spans, spans, kept, 0, 0, w.keys.of(spans + W), best);
    int64_t n = 0;
    for (int64_t i = 0; i < kept; ++i)
        for (int64_t p = best[i] * size; p < (best[i] + 1) * size; ++p) candidates[n++] = p;
    for (int64_t p = spans * size; p < count; ++p) candidates[n++] = p;
    score_item<T>(
        pages, rows, item, scale, scoring,
        [&](int64_t i) { return box_of_page(pages, item.kv_head, table[candidates[i]]); }, n, scores);
    return n;
}

}  // namespace questkv::QUESTKV_ISA_NAME
