// Attention of an item over coded pages. Keys are multiplied as they are stored: with the box's steps folded into the
// query once per page and head, q . k = q . lo + sum over d of (q[d] * step[d]) * code[d]. Values likewise, with each
// token's step folded into its weight.
#pragma once

#include "digits.h"
#include "parts.h"

namespace questkv::QUESTKV_ISA_NAME {

// Pages ahead that are prefetched, at most; a page of codes is half as long as one of 16-bit numbers.
constexpr int64_t kSealedAhead = 8;

inline SealedPage sealed_page(const Pages& pages, int64_t kv_head, int64_t page) {
    const Segment& segment = pages.segment_of(page);
    const int64_t at = kv_head * segment.pages + page - segment.start;
    const int64_t bytes = segment.coded() ? pages.page_size * pages.head_dim : pages.page_bytes();
    const int64_t box = segment.box_of_page(kv_head, page);
    return {segment.keys + at * bytes, segment.values + at * bytes,
            reinterpret_cast<const int8_t*>(segment.boxes + box * pages.box_bytes()), segment.scales[box],
            segment.coded() ? segment.value_scales + at * pages.page_size * 2 : nullptr};
}

// Keys [S, D] of a page as floats.
template <class T>
inline void decode_keys(const SealedPage& page, int64_t page_size, int64_t dim, float* out) {
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(page.keys);
    const T* plain = reinterpret_cast<const T*>(page.keys);
    for (int64_t t = 0; t < page_size; ++t)
        for (int64_t d = 0; d < dim; ++d) {
            const float lo = page.box[d], width = static_cast<float>(page.box[dim + d] - page.box[d]);
            const int64_t i = t * dim + d;
            out[i] = page.value_scales ? page.scale * (lo + static_cast<float>(codes[i]) * width / 255.0f)
                                       : to_float(plain[i]);
        }
}

// Values [S, D] of a page as floats.
template <class T>
inline void decode_values(const SealedPage& page, int64_t page_size, int64_t dim, float* out) {
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(page.values);
    const T* plain = reinterpret_cast<const T*>(page.values);
    for (int64_t t = 0; t < page_size; ++t)
        for (int64_t d = 0; d < dim; ++d) {
            const int64_t i = t * dim + d;
            out[i] = page.value_scales
                         ? page.value_scales[2 * t + 1] + page.value_scales[2 * t] * static_cast<float>(codes[i])
                         : to_float(plain[i]);
        }
}

// What a part over sealed pages is computed from: `count` pages, behind which the next part's first ones follow up to
// `known`; queries [heads, D] as floats; scores are [heads, stride] with token t of page e at e * S + t.
struct SealedPart {
    const SealedPage* pages;
    int64_t count, known, page_size, dim, heads;
    const float* queries;
    float* scores;
    int64_t stride;

    int64_t tokens() const { return count * page_size; }
};

// Any instruction set, any S and D, coded and plain pages together: page by page as floats in the first-level cache.
template <class T>
struct DecodedPages {
    static void dot(const SealedPart& part, Workspace& w) {
        const int64_t dim = part.dim, width = padded(dim), rows = (part.page_size + W - 1) / W * W;
        float* page = w.decoded.of(rows * dim);
        fill(page, page + rows * dim, 0.0f);
        float* queries = w.float_query.of(part.heads * width);
        for (int64_t h = 0; h < part.heads; ++h) arrange<float>(part.queries + h * dim, dim, queries + h * width);
        alignas(64) float block[4 * W];
        for (int64_t e = 0; e < part.count; ++e) {
            decode_keys<T>(part.pages[e], part.page_size, dim, page);
            for (int64_t t = 0; t < part.page_size; t += W) {
                const char* at[W / 4];
                for (int64_t i = 0; i < W / 4; ++i) at[i] = reinterpret_cast<const char*>(page + (t + 4 * i) * dim);
                const FourRows rows_of{at, dim * 4}, next[2] = {rows_of, rows_of};
                const size_t here = static_cast<size_t>(least(W, part.page_size - t)) * sizeof(float);
                with_heads(part.heads, [&]<int H>(int64_t h) {
                    dot_rows<float, H, Ahead::nothing>(rows_of, next, dim, queries + h * width, block, W);
                    for (int i = 0; i < H; ++i)
                        std::memcpy(part.scores + (h + i) * part.stride + e * part.page_size + t, block + i * W, here);
                });
            }
        }
    }

    // out [heads, D]: the sum of the values weighted with what has become of the scores.
    static void add(const SealedPart& part, float* out, Workspace& w) {
        const int64_t dim = part.dim, width = padded(dim), size = part.page_size;
        float* page = w.decoded.of((size + 3) / 4 * 4 * dim);
        float* sums = w.weights.of(part.heads * width);
        fill(sums, sums + part.heads * width, 0.0f);
        for (int64_t e = 0; e < part.count; ++e) {
            decode_values<T>(part.pages[e], size, dim, page);
            for (int64_t t = 0; t < size; t += 4) {
                const char* at = reinterpret_cast<const char*>(page + t * dim);
                const FourRows rows_of{&at, dim * 4}, next[2] = {rows_of, rows_of};
                with_heads(part.heads, [&]<int H>(int64_t h) {
                    add_rows<float, H, Ahead::nothing>(rows_of, next, static_cast<int>(least(4, size - t)), dim,
                                                       part.scores + h * part.stride + e * size + t, part.stride,
                                                       sums + h * width);
                });
            }
        }
        for (int64_t h = 0; h < part.heads; ++h)
            std::memcpy(out + h * dim, sums + h * width, static_cast<size_t>(dim) * sizeof(float));
    }
};

#if defined(__AVX512VNNI__)
// Coded pages with S a multiple of 4 and D of 64: products of codes with two signed digits, weight = unit * (256 d1 +
// d0), which adds less than a tenth of what coding itself costs. All sums are exact.
struct CodedPages {
    static constexpr int64_t kNear = kSealedAhead / 2, kFar = kSealedAhead;

    // What 32 bits hold the sums of. dot_four ends with a quarter of the channels in one lane, both digits together: a
    // code (at most 255) times 256 upper + lower (at most 127 * 256 + 128). add_pages adds up all tokens of a part,
    // each digit (at most 128) for itself.
    static constexpr int64_t kMostChannels = 1024, kMostCodedTokens = 65536;
    static_assert(kMostChannels / 4 * 255 * (127 * 256 + 128) <= std::numeric_limits<int32_t>::max());
    static_assert(kMostCodedTokens * 255 * 128 <= std::numeric_limits<int32_t>::max());

    static bool takes(const SealedPart& part) {
        if (part.page_size % 4 || part.dim % 64 || part.dim > kMostChannels) return false;
        // A part is one page at least, however many tokens that has.
        if (part.tokens() > kMostCodedTokens) return false;
        for (int64_t e = 0; e < part.count; ++e)
            if (!part.pages[e].value_scales) return false;
        return true;
    }

    // Keys or values of the page at a place; behind the last keys come the first values, behind the last values the
    // next part's first keys.
    static const char* soon(const SealedPart& part, int64_t place, bool keys) {
        if (keys)
            return place < part.count ? part.pages[place].keys
                                      : part.pages[least(place, 2 * part.count - 1) - part.count].values;
        return place < part.count ? part.pages[place].values : part.pages[least(place, part.known - 1)].keys;
    }

    // Fold a page's steps into a query: digits [2, D] of q * width, with logit = unit * (codes . digits) + base.
    // `steps` is D / W where it is known, so that what is folded stays in registers.
    template <int steps>
    static void fold(const SealedPage& page, const float* q, int64_t dim, float* spill, int8_t* digits, float* unit,
                     float* base) {
        V kept[steps ? steps : 1], sum = {}, most = {};
        const int64_t count = steps ? steps : dim / W;
#pragma GCC unroll 8
        for (int64_t i = 0; i < count; ++i) {
            const V lo = load_i8(page.box + i * W), width = load_i8(page.box + dim + i * W) - lo,
                    x = load<V>(q + i * W);
            const V f = x * width;
            if (steps) kept[i] = f;
            else store(spill + i * W, f);
            sum += x * lo;
            most = bit_cast<V>(_mm512_max_ps(_mm512_abs_ps(bit_cast<__m512>(f)), bit_cast<__m512>(most)));
        }
        const float top = _mm512_reduce_max_ps(bit_cast<__m512>(most));
        const V per_unit = set1(top > 0 ? kDigits / top : 0.0f);
#pragma GCC unroll 2
        for (int64_t i = 0; i < count; i += 4) {
            __m512i whole[4];
#pragma GCC unroll 4
            for (int64_t j = 0; j < 4; ++j) {
                const V f = steps ? kept[i + j] : load<V>(spill + (i + j) * W);
                whole[j] = _mm512_cvtps_epi32(bit_cast<__m512>(f * per_unit));
            }
            write_digits(whole, digits + i * W, dim);
        }
        // An infinite query has no digits; NaN says so, as it would without codes.
        *unit = top < kInfinity ? page.scale * top / (kDigits * 255) : kInfinity - kInfinity;
        *base = page.scale * _mm512_reduce_add_ps(bit_cast<__m512>(sum));
    }

    static void dot(const SealedPart& part, Workspace& w) {
        if (part.dim == 128) dot_pages<8>(part, w);
        else if (part.dim == 64) dot_pages<4>(part, w);
        else dot_pages<0>(part, w);
    }

    // Products of rows t to t + 3 of a page with the digits, added up as far as add_places goes.
    template <Ahead ahead>
    static V dot_four(const char* rows, int64_t dim, const int8_t* digits, const char* near, const char* far) {
        __m512i acc[4][2] = {};
#pragma GCC unroll 2
        for (int64_t d = 0; d < dim; d += 64) {
            const __m512i upper = _mm512_loadu_si512(digits + d), lower = _mm512_loadu_si512(digits + dim + d);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                prefetch<ahead, 64>(near, far, i * dim + d);
                const __m512i codes = _mm512_loadu_si512(rows + i * dim + d);
                acc[i][0] = _mm512_dpbusd_epi32(acc[i][0], codes, upper);
                acc[i][1] = _mm512_dpbusd_epi32(acc[i][1], codes, lower);
            }
        }
        VI sums[4];
        for (int i = 0; i < 4; ++i) sums[i] = bit_cast<VI>(acc[i][0]) * 256 + bit_cast<VI>(acc[i][1]);
        return __builtin_convertvector(add_places(sums[0], sums[1], sums[2], sums[3]), V);
    }

    template <Ahead ahead>
    static void dot_page(const char* keys, int64_t size, int64_t dim, const int8_t* digits, const char* near,
                         const char* far, float unit, float base, float* to) {
        for (int64_t t = 0; t < size; t += W) {
            V quads[W / 4] = {};
            for (int64_t i = 0; i < W / 4 && t + 4 * i < size; ++i) {
                const int64_t at = (t + 4 * i) * dim;
                quads[i] = dot_four<ahead>(keys + at, dim, digits, near + at, far + at);
            }
            const V logits = add_lanes(quads) * unit + base;
            _mm512_mask_storeu_ps(to + t, mask_of(size - t), bit_cast<__m512>(logits));
        }
    }

    template <int steps>
    static void dot_pages(const SealedPart& part, Workspace& w) {
        const int64_t dim = steps ? steps * W : part.dim, size = part.page_size;
        float* spill = w.lo.of(dim);
        int8_t* buffer = w.digits.of(4 * dim);
        int8_t *digits = buffer, *next_digits = buffer + 2 * dim;
        float unit, base, next_unit, next_base;
        fold<steps>(part.pages[0], part.queries, dim, spill, digits, &unit, &base);
        for (int64_t e = 0; e < part.count; ++e) {
            const SealedPage& page = part.pages[e];
            const SealedPage& next = part.pages[least(e + kNear, part.count - 1)];
            for (int64_t i = 0; i < 2 * dim; i += 64) __builtin_prefetch(next.box + i, 0, 2);
            for (int64_t i = 0; i < 2 * size; i += 16) __builtin_prefetch(next.value_scales + i, 0, 2);
            const char *near = soon(part, e + kNear, true), *far = soon(part, e + kFar, true);
            for (int64_t h = 0; h < part.heads; ++h) {
                // A fold is a long chain of steps: the next one starts before the products, which don't need it.
                const int64_t then = h + 1 < part.heads ? h + 1 : 0;
                const SealedPage& folded = part.pages[then ? e : least(e + 1, part.count - 1)];
                fold<steps>(folded, part.queries + then * dim, dim, spill, next_digits, &next_unit, &next_base);
                float* to = part.scores + h * part.stride + e * size;
                if (h) dot_page<Ahead::nothing>(page.keys, size, dim, digits, near, far, unit, base, to);
                else dot_page<Ahead::twice>(page.keys, size, dim, digits, near, far, unit, base, to);
                int8_t* const done = digits;
                digits = next_digits;
                next_digits = done;
                unit = next_unit;
                base = next_base;
            }
        }
    }

    static __mmask16 mask_of(int64_t n) { return static_cast<__mmask16>(n <= 0 ? 0 : n < W ? (1u << n) - 1 : 0xffffu); }

    // Digits of weight * step for each four tokens, as one word of four bytes: words [2, tokens / 4].
    static float weigh(const SealedPart& part, int64_t h, float* weights, int32_t* words, float* offset) {
        const int64_t size = part.page_size, n = part.tokens();
        const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        const int64_t lines = size * part.dim / 64;
        V most = {}, sum = {};
        for (int64_t e = 0; e < part.count; ++e) {
            // The memory has nothing to do meanwhile: values beyond those that were prefetched with the last keys.
            for (int64_t i = 4 * e; h == 0 && i < 4 * e + 4; ++i)
                __builtin_prefetch(soon(part, least(kFar + i / lines, part.count - 1), false) + i % lines * 64, 0, 2);
            for (int64_t t = 0; t < size; t += W) {
                const int64_t left = 2 * (size - t);
                const __mmask16 here = mask_of(size - t), first = mask_of(left), second = mask_of(left - W);
                const float* scales = part.pages[e].value_scales + 2 * t;
                const __m512 a = _mm512_maskz_loadu_ps(first, scales), b = _mm512_maskz_loadu_ps(second, scales + W);
                const V step = bit_cast<V>(_mm512_permutex2var_ps(a, even, b));
                const V p = bit_cast<V>(_mm512_maskz_loadu_ps(here, part.scores + h * part.stride + e * size + t));
                sum += p * bit_cast<V>(_mm512_permutex2var_ps(a, odd, b));
                const V weight = p * step;
                // A NaN is in the offset too.
                const V finite = weight == weight ? weight : V{};
                _mm512_mask_storeu_ps(weights + e * size + t, here, bit_cast<__m512>(finite));
                most = vmax(finite, most);
            }
        }
        const float top = _mm512_reduce_max_ps(bit_cast<__m512>(most));
        const float per_unit = top > 0 ? kDigits / top : 0.0f;
        int8_t* bytes = reinterpret_cast<int8_t*>(words);
        for (int64_t i = 0; i < n; i += W) {
            const __mmask16 here = mask_of(n - i);
            const __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(here, weights + i), _mm512_set1_ps(per_unit));
            const __m512i whole = _mm512_cvtps_epi32(scaled);
            const __m512i upper = bit_cast<__m512i>((bit_cast<VI>(whole) + 128) >> 8);
            _mm512_mask_cvtepi32_storeu_epi8(bytes + i, here, upper);
            _mm512_mask_cvtepi32_storeu_epi8(bytes + n + i, here, whole);
        }
        *offset = _mm512_reduce_add_ps(bit_cast<__m512>(sum));
        return top / kDigits;
    }

    // totals [H, 2, D] += codes of pages [first, last) times the words of H heads. Places are those of unpacked
    // vectors.
    template <int H, Ahead ahead>
    static void add_pages(const SealedPart& part, int64_t first, int64_t last, const int32_t* words, int64_t a_head,
                          int32_t* totals) {
        const int64_t dim = part.dim, quads = part.page_size / 4, half = part.tokens() / 4;
        for (int64_t d = 0; d < dim; d += 64) {
            __m512i acc[H][2][4];
            for (int h = 0; h < H; ++h)
                for (int k = 0; k < 2; ++k)
                    for (int j = 0; j < 4; ++j)
                        acc[h][k][j] = _mm512_loadu_si512(totals + (2 * h + k) * dim + d + 16 * j);
            for (int64_t e = first; e < last; ++e) {
                const char *near = soon(part, e + kNear, false) + d, *far = soon(part, e + kFar, false) + d;
                for (int64_t quad = 0; quad < quads; ++quad) {
                    const char* row = part.pages[e].values + 4 * quad * dim + d;
                    for (int i = 0; i < 4; ++i) prefetch<ahead, 64>(near, far, (4 * quad + i) * dim);
                    const __m512i a = _mm512_loadu_si512(row), b = _mm512_loadu_si512(row + dim);
                    const __m512i c = _mm512_loadu_si512(row + 2 * dim), f = _mm512_loadu_si512(row + 3 * dim);
                    const __m512i ab[2] = {_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b)};
                    const __m512i cf[2] = {_mm512_unpacklo_epi8(c, f), _mm512_unpackhi_epi8(c, f)};
                    const __m512i four[4] = {_mm512_unpacklo_epi16(ab[0], cf[0]), _mm512_unpackhi_epi16(ab[0], cf[0]),
                                             _mm512_unpacklo_epi16(ab[1], cf[1]), _mm512_unpackhi_epi16(ab[1], cf[1])};
#pragma GCC unroll 2
                    for (int h = 0; h < H; ++h)
#pragma GCC unroll 2
                        for (int k = 0; k < 2; ++k) {
                            const int32_t word = words[h * a_head + k * half + e * quads + quad];
#pragma GCC unroll 4
                            for (int j = 0; j < 4; ++j)
                                acc[h][k][j] = _mm512_dpbusd_epi32(acc[h][k][j], four[j], _mm512_set1_epi32(word));
                        }
                }
            }
            for (int h = 0; h < H; ++h)
                for (int k = 0; k < 2; ++k)
                    for (int j = 0; j < 4; ++j)
                        _mm512_storeu_si512(totals + (2 * h + k) * dim + d + 16 * j, acc[h][k][j]);
        }
    }

    static void add(const SealedPart& part, float* out, Workspace& w) {
        const int64_t dim = part.dim, a_head = part.tokens() / 2;
        const int64_t room = most(part.tokens(), dim);
        float* weights = w.token_weights.of(room + 2 * part.heads);
        float* units = weights + room;
        int32_t* words = w.words.of(part.heads * a_head);
        int32_t* totals = w.totals.of(part.heads * 2 * dim);
        fill(totals, totals + part.heads * 2 * dim, 0);
        for (int64_t h = 0; h < part.heads; ++h)
            units[2 * h] = weigh(part, h, weights, words + h * a_head, units + 2 * h + 1);
        // A few pages at a time, which stay in the first-level cache while the heads take turns.
        for (int64_t e = 0; e < part.count; e += 4)
            for (int64_t h = 0; h < part.heads; h += 2) {
                const int64_t last = least(e + 4, part.count);
                const int32_t* of_head = words + h * a_head;
                int32_t* to = totals + h * 2 * dim;
                const bool two = h + 2 <= part.heads;
                if (two && h) add_pages<2, Ahead::nothing>(part, e, last, of_head, a_head, to);
                else if (two) add_pages<2, Ahead::twice>(part, e, last, of_head, a_head, to);
                else if (h) add_pages<1, Ahead::nothing>(part, e, last, of_head, a_head, to);
                else add_pages<1, Ahead::twice>(part, e, last, of_head, a_head, to);
            }
        for (int64_t h = 0; h < part.heads; ++h) {
            const int32_t *upper = totals + 2 * h * dim, *lower = upper + dim;
            const float unit = units[2 * h], offset = units[2 * h + 1];
            for (int64_t i = 0; i < dim; ++i)
                weights[i] = unit * (static_cast<float>(upper[i]) * 256.0f + static_cast<float>(lower[i])) + offset;
            // Channels 16 l + 4 j and three more of each 64 are in vector j, lane l.
            for (int64_t c = 0; c < dim; c += 64)
                for (int l = 0; l < 4; ++l)
                    for (int j = 0; j < 4; ++j)
                        std::memcpy(out + h * dim + c + 16 * l + 4 * j, weights + c + 16 * j + 4 * l, 16);
        }
    }
};
#endif

// A part of a list, over sealed pages only.
template <class T>
inline void attend_sealed(const Pages& pages, const Rows& rows, const Item& item, const List& list, int64_t part,
                          const Softmax& softmax, const Partial& out, Workspace& w) {
    const int64_t dim = pages.head_dim, width = padded(dim), a_part = pages_a_part(pages, list);
    const int64_t first = part * a_part, last = least(first + a_part, list.selected);
    const int64_t* table = rows.page_table + item.row * rows.table_width;
    const int64_t known = least(last + kSealedAhead, list.selected);
    SealedPage* sealed = w.sealed.of(known - first);
    for (int64_t e = first; e < known; ++e)
        sealed[e - first] = sealed_page(pages, item.kv_head, table[list.pages ? list.pages[e] : e]);
    const int64_t tokens = (last - first) * pages.page_size, stride = (tokens + W - 1) / W * W;
    float* queries = w.plain_query.of(item.heads * dim);
    const T* q = reinterpret_cast<const T*>(rows.q) + (item.row * rows.heads + item.first_head) * dim;
    for (int64_t i = 0; i < item.heads * dim; ++i) queries[i] = to_float(q[i]);
    float* scores = w.sums.of(item.heads * stride);
    const SealedPart work{sealed,     last - first, known - first, pages.page_size, dim,
                          item.heads, queries,      scores,        stride};
    const auto run = [&]<class How>() {
        How::dot(work, w);
        for (int64_t h = 0; h < item.heads; ++h)
            softmax_part(scores + h * stride, tokens, softmax, out.m + h, out.l + h);
        float* sums = w.scores.of(item.heads * dim);
        How::add(work, sums, w);
        for (int64_t h = 0; h < item.heads; ++h) arrange<T>(sums + h * dim, dim, out.acc + h * width);
    };
#if defined(__AVX512VNNI__)
    if (CodedPages::takes(work)) {
        run.template operator()<CodedPages>();
        return;
    }
#endif
    run.template operator()<DecodedPages<T>>();
}

}  // namespace questkv::QUESTKV_ISA_NAME
