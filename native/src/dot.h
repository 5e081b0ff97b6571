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

// How rows that are needed soon are prefetched, always into the second-level cache: the first has too few places for
// what is under way from memory. `next` below holds two lists of rows, the nearer first.
//   nothing: rows that are read from end to end, one after another, are guessed by the hardware, and asking for them
//   gets
//            in its way; or another block of heads has asked already.
//   once: the nearer rows.
//   twice: the farther rows and, once more, the nearer ones. Where pages are picked at random nothing but prefetching
//          fills the memory's queue, and a prefetch that finds the queue full is dropped.
enum class Ahead { nothing, once, twice };

// `count` bytes from byte `at` on of a nearer and a farther row; `at` is a multiple of `count`.
template <Ahead ahead, int count>
inline void prefetch(const char* near, const char* far, int64_t at) {
    if (ahead == Ahead::nothing || (count < 64 && at % 64)) return;
#pragma GCC unroll 8
    for (int i = 0; i < count; i += 64) {
        __builtin_prefetch(near + at + i, 0, 2);
        if (ahead == Ahead::twice) __builtin_prefetch(far + at + i, 0, 2);
    }
}

template <class T>
inline const T* row_of(const char* row) {
    return reinterpret_cast<const T*>(row);
}

// How a row of T meets a vector of Q: 2W channels of each are loaded and multiplied.
template <class T, class Q>
struct Product {
    using Row = Pair;
    using Vector = Pair;
    static Row row(const T* p) { return load2(p); }
    static Row row_part(const T* p, int64_t n) { return load2_part(p, n); }
    static Vector vector(const Q* p) { return load2(p); }
    static V add(V sum, const Row& k, const Vector& q) { return sum + k.a * q.a + k.b * q.b; }
};

#if defined(__AVX512BF16__)
// Products of pairs, summed in float32.
template <>
struct Product<bf16, bf16> {
    using Row = __m512bh;
    using Vector = __m512bh;
    static Row row(const bf16* p) { return bit_cast<__m512bh>(_mm512_loadu_si512(p)); }
    static Row row_part(const bf16* p, int64_t n) {
        return bit_cast<__m512bh>(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p));
    }
    static Vector vector(const bf16* p) { return row(p); }
    static V add(V sum, Row k, Vector q) { return bit_cast<V>(_mm512_dpbf16_ps(bit_cast<__m512>(sum), k, q)); }
};
#endif

// Where rows lie: anywhere, or in runs of four that follow one another. Pointers are of char, whatever the rows' type:
// a list of pointers can't be read as one of another type.
struct EachRow {
    const char* const* at;
    const char* row(int64_t i) const { return at[i]; }
};
struct FourRows {
    const char* const* at;
    int64_t stride;  // bytes from row to row
    const char* row(int64_t i) const { return at[i / 4] + i % 4 * stride; }
};

// Products of rows 4 * quad to 4 * quad + 3 with H vectors, added up as far as add_places goes.
template <class T, int H, Ahead ahead, class Rows, class Q>
inline void dot_quad(const Rows& rows, const Rows* next, int quad, int64_t n, const Q* vectors, V (&parts)[H][W / 4]) {
    using P = Product<T, Q>;
    constexpr int size = sizeof(T);
    const int64_t whole = n / (2 * W) * (2 * W), width = padded(n);
    const char *row[4], *near[4], *far[4];
    for (int t = 0; t < 4; ++t) {
        row[t] = rows.row(4 * quad + t);
        near[t] = next[0].row(4 * quad + t);
        far[t] = next[1].row(4 * quad + t);
    }
    V acc[4][H] = {};
#pragma GCC unroll 4
    for (int64_t c = 0; c < whole; c += 2 * W) {
        typename P::Vector q[H];
        for (int h = 0; h < H; ++h) q[h] = P::vector(vectors + h * width + c);
#pragma GCC unroll 4
        for (int t = 0; t < 4; ++t) {
            prefetch<ahead, 2 * W * size>(near[t], far[t], c * size);
            const typename P::Row k = P::row(row_of<T>(row[t]) + c);
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h) acc[t][h] = P::add(acc[t][h], k, q[h]);
        }
    }
    if (whole < n)
        for (int t = 0; t < 4; ++t) {
            prefetch<ahead, 64>(near[t], far[t], whole * size);
            const typename P::Row k = P::row_part(row_of<T>(row[t]) + whole, n - whole);
            for (int h = 0; h < H; ++h) acc[t][h] = P::add(acc[t][h], k, P::vector(vectors + h * width + whole));
        }
    for (int h = 0; h < H; ++h) parts[h][quad] = add_places(acc[0][h], acc[1][h], acc[2][h], acc[3][h]);
}

// out[h * stride + i] = rows[i] . vectors[h] for i < W.
//   rows: W rows of n channels of T. next: two lists of W rows (see Ahead).
//   vectors: H of padded(n) of Q, zeros at the end; floats are in T's pair order.
template <class T, int H, Ahead ahead, class Rows, class Q>
inline void dot_rows(const Rows& rows, const Rows* next, int64_t n, const Q* vectors, float* out, int64_t stride) {
    V parts[H][W / 4];
    for (int quad = 0; quad < W / 4; ++quad) dot_quad<T, H, ahead>(rows, next, quad, n, vectors, parts);
    for (int h = 0; h < H; ++h) store(out + h * stride, add_lanes(parts[h]));
}

// One stretch of add_rows: `chunks` pairs of channels from c on, held in registers over all rows.
template <class T, int H, int chunks, Ahead ahead>
inline void add_stretch(const FourRows& rows, const FourRows* next, int count, int64_t c, const float* weights,
                        int64_t stride, int64_t width, float* acc) {
    constexpr int size = sizeof(T);
    Pair sums[H][chunks];
    for (int h = 0; h < H; ++h)
        for (int k = 0; k < chunks; ++k) sums[h][k] = load2(acc + h * width + c + k * 2 * W);
    const auto add = [&](const char* row, const char* near, const char* far, int i) {
        prefetch<ahead, chunks * 2 * W * size>(near, far, c * size);
        Pair v[chunks];
#pragma GCC unroll 4
        for (int k = 0; k < chunks; ++k) v[k] = load2(row_of<T>(row) + c + k * 2 * W);
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
            const float weight = weights[h * stride + i];
#pragma GCC unroll 4
            for (int k = 0; k < chunks; ++k) {
                sums[h][k].a += v[k].a * weight;
                sums[h][k].b += v[k].b * weight;
            }
        }
    };
    for (int i = 0; i < count; i += 4) {
        const char *row = rows.row(i), *near = next[0].row(i), *far = next[1].row(i);
        const int here = count - i < 4 ? count - i : 4;
        for (int t = 0; t < here; ++t) add(row + t * rows.stride, near + t * rows.stride, far + t * rows.stride, i + t);
    }
    for (int h = 0; h < H; ++h)
        for (int k = 0; k < chunks; ++k) {
            store(acc + h * width + c + k * 2 * W, sums[h][k].a);
            store(acc + h * width + c + k * 2 * W + W, sums[h][k].b);
        }
}

// acc[h * padded(n) ...] += sum over i < count of weights[h * stride + i] * rows[i], in T's pair order.
template <class T, int H, Ahead ahead>
inline void add_rows(const FourRows& rows, const FourRows* next, int count, int64_t n, const float* weights,
                     int64_t stride, float* acc) {
    const int64_t whole = n / (2 * W) * (2 * W), width = padded(n);
    int64_t c = 0;
    if constexpr (W == 16 && H <= 2)
        for (; c + 8 * W <= whole; c += 8 * W)
            add_stretch<T, H, 4, ahead>(rows, next, count, c, weights, stride, width, acc);
    if constexpr (W == 16 || H <= 2)
        for (; c + 4 * W <= whole; c += 4 * W)
            add_stretch<T, H, 2, ahead>(rows, next, count, c, weights, stride, width, acc);
    for (; c < whole; c += 2 * W) add_stretch<T, H, 1, ahead>(rows, next, count, c, weights, stride, width, acc);
    if (whole < n)
        for (int h = 0; h < H; ++h) {
            Pair s = load2(acc + h * width + whole);
            for (int i = 0; i < count; ++i) {
                const Pair v = load2_part(row_of<T>(rows.row(i)) + whole, n - whole);
                const float weight = weights[h * stride + i];
                s.a += v.a * weight;
                s.b += v.b * weight;
            }
            store(acc + h * width + whole, s.a);
            store(acc + h * width + whole + W, s.b);
        }
}

}  // namespace questkv::QUESTKV_ISA_NAME
