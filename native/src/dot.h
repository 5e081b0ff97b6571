// The two inner loops of everything: rows times vectors, and weighted sums of rows.
#pragma once

#include "simd.h"

namespace questkv::QUESTKV_ISA_NAME {

// Floats that a vector of n channels takes in pair order, zeros at the end included.
inline int64_t padded(int64_t n) { return (n + 2 * W - 1) / (2 * W) * (2 * W); }

// Put n floats into the pair order of T, zero-padded to padded(n).
template <class T>
void arrange(const float* in, int64_t n, float* out) {
    for (int64_t c = 0; c < padded(n); c += 2 * W)
        for (int i = 0; i < W; ++i)
            for (int b = 0; b < 2; ++b) {
                const int64_t at = c + channel<T>(i, b);
                out[c + b * W + i] = at < n ? in[at] : 0.0f;
            }
}

// Into the second-level cache: the first has too few places for what is under way from memory.
inline void prefetch_row(const char* row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

// Lists of rows hold char pointers, whatever the rows' type: a list of pointers can't be read as one of another type.
template <class T>
inline const T* row_of(const char* row) {
    return reinterpret_cast<const T*>(row);
}

// out[h * stride + i] = rows[i] . vectors[h] for i < W.
//   rows: W pointers to n channels of T. vectors: H of padded(n) floats in T's pair order.
//   next: W pointers to rows that are needed soon, or null.
template <class T, int H>
inline void dot_rows(const char* const* rows, int64_t n, const float* vectors, const char* const* next, float* out,
                     int64_t stride) {
    constexpr int block = W == 16 ? (H >= 2 ? 4 : 8) : (H >= 2 ? 2 : 4);
    const int64_t whole = n / (2 * W) * (2 * W), width = padded(n), row_bytes = n * static_cast<int64_t>(sizeof(T));
    V sums[H][W];
    for (int first = 0; first < W; first += block) {
        V acc[block][H] = {};
        if (next)
            for (int t = 0; t < block; ++t) prefetch_row(next[first + t], row_bytes);
        for (int64_t c = 0; c < whole; c += 2 * W) {
            Pair q[H];
            for (int h = 0; h < H; ++h) q[h] = load2(vectors + h * width + c);
#pragma GCC unroll 8
            for (int t = 0; t < block; ++t) {
                const Pair k = load2(row_of<T>(rows[first + t]) + c);
#pragma GCC unroll 4
                for (int h = 0; h < H; ++h) acc[t][h] += k.a * q[h].a + k.b * q[h].b;
            }
        }
        if (whole < n)
            for (int t = 0; t < block; ++t) {
                const Pair k = load2_part(row_of<T>(rows[first + t]) + whole, n - whole);
                for (int h = 0; h < H; ++h) {
                    const Pair q = load2(vectors + h * width + whole);
                    acc[t][h] += k.a * q.a + k.b * q.b;
                }
            }
        for (int t = 0; t < block; ++t)
            for (int h = 0; h < H; ++h) sums[h][first + t] = acc[t][h];
    }
    for (int h = 0; h < H; ++h) store(out + h * stride, sum_rows(sums[h]));
}

#if defined(__AVX512BF16__)
// The same for bf16 rows and vectors that are bf16 themselves: products of pairs, summed in float32.
//   vectors: H of padded(n) bf16, zeros at the end.
template <int H>
inline void dot_rows_bf16(const char* const* rows, int64_t n, const bf16* vectors, const char* const* next, float* out,
                          int64_t stride) {
    constexpr int block = H >= 3 ? 4 : 8;
    const int64_t whole = n / (2 * W) * (2 * W), width = padded(n), row_bytes = n * 2;
    const __mmask32 rest = static_cast<__mmask32>((uint64_t{1} << (n - whole)) - 1);
    V sums[H][W];
    for (int first = 0; first < W; first += block) {
        __m512 acc[block][H];
        for (auto& row : acc)
            for (auto& a : row) a = _mm512_setzero_ps();
        if (next)
            for (int t = 0; t < block; ++t) prefetch_row(next[first + t], row_bytes);
        for (int64_t c = 0; c < n; c += 2 * W) {
            __m512bh q[H];
            for (int h = 0; h < H; ++h) q[h] = bit_cast<__m512bh>(_mm512_loadu_si512(vectors + h * width + c));
#pragma GCC unroll 8
            for (int t = 0; t < block; ++t) {
                const bf16* row = row_of<bf16>(rows[first + t]) + c;
                const __m512i k = c < whole ? _mm512_loadu_si512(row) : _mm512_maskz_loadu_epi16(rest, row);
#pragma GCC unroll 4
                for (int h = 0; h < H; ++h) acc[t][h] = _mm512_dpbf16_ps(acc[t][h], bit_cast<__m512bh>(k), q[h]);
            }
        }
        for (int t = 0; t < block; ++t)
            for (int h = 0; h < H; ++h) sums[h][first + t] = bit_cast<V>(acc[t][h]);
    }
    for (int h = 0; h < H; ++h) store(out + h * stride, sum_rows(sums[h]));
}
#endif

// One stretch of add_rows: `chunks` pairs of channels from c on, held in registers over all rows.
template <class T, int H, int chunks>
inline void add_stretch(const char* const* rows, int count, int64_t c, const float* weights, int64_t stride,
                        int64_t width, float* acc) {
    Pair sums[H][chunks];
    for (int h = 0; h < H; ++h)
        for (int k = 0; k < chunks; ++k) sums[h][k] = load2(acc + h * width + c + k * 2 * W);
    for (int i = 0; i < count; ++i) {
        Pair v[chunks];
#pragma GCC unroll 4
        for (int k = 0; k < chunks; ++k) v[k] = load2(row_of<T>(rows[i]) + c + k * 2 * W);
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
            const float weight = weights[h * stride + i];
#pragma GCC unroll 4
            for (int k = 0; k < chunks; ++k) {
                sums[h][k].a += v[k].a * weight;
                sums[h][k].b += v[k].b * weight;
            }
        }
    }
    for (int h = 0; h < H; ++h)
        for (int k = 0; k < chunks; ++k) {
            store(acc + h * width + c + k * 2 * W, sums[h][k].a);
            store(acc + h * width + c + k * 2 * W + W, sums[h][k].b);
        }
}

// acc[h * padded(n) ...] += sum over i < count of weights[h * stride + i] * rows[i], in T's pair order.
template <class T, int H>
inline void add_rows(const char* const* rows, int count, int64_t n, const float* weights, int64_t stride,
                     const char* const* next, float* acc) {
    const int64_t whole = n / (2 * W) * (2 * W), width = padded(n), row_bytes = n * static_cast<int64_t>(sizeof(T));
    if (next)
        for (int i = 0; i < count; ++i) prefetch_row(next[i], row_bytes);
    int64_t c = 0;
    if constexpr (W == 16 && H <= 2)
        for (; c + 8 * W <= whole; c += 8 * W) add_stretch<T, H, 4>(rows, count, c, weights, stride, width, acc);
    if constexpr (W == 16 || H <= 2)
        for (; c + 4 * W <= whole; c += 4 * W) add_stretch<T, H, 2>(rows, count, c, weights, stride, width, acc);
    for (; c < whole; c += 2 * W) add_stretch<T, H, 1>(rows, count, c, weights, stride, width, acc);
    if (whole < n)
        for (int h = 0; h < H; ++h) {
            Pair s = load2(acc + h * width + whole);
            for (int i = 0; i < count; ++i) {
                const Pair v = load2_part(row_of<T>(rows[i]) + whole, n - whole);
                const float weight = weights[h * stride + i];
                s.a += v.a * weight;
                s.b += v.b * weight;
            }
            store(acc + h * width + whole, s.a);
            store(acc + h * width + whole + W, s.b);
        }
}

}  // namespace questkv::QUESTKV_ISA_NAME
