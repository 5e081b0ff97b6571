// Vectors of floats in the compiler's own vector extension: one source for every instruction set, whose width follows
// from the flags that the file is compiled with. Intrinsics appear only where the extension has no word for the thing.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace questkv::QUESTKV_ISA_NAME {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float V __attribute__((vector_size(W * 4)));
typedef int32_t VI __attribute__((vector_size(W * 4)));
typedef uint32_t VU __attribute__((vector_size(W * 4)));

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

template <class To, class From>
inline To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class T>
inline T load(const void* p) {
    T v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float* p, V v) { std::memcpy(p, &v, sizeof v); }
inline V set1(float x) { return x - V{}; }

// A pair of vectors holds 2W channels. Which channel lies in which lane depends on the type (bf16 takes the even ones
// and the odd ones, which costs no shuffle); queries, keys, values and outputs all use the same order.
struct Pair {
    V a, b;
};

inline Pair load2(const float* p) { return {load<V>(p), load<V>(p + W)}; }

inline Pair load2(const bf16* p) {
    const VU two = load<VU>(p);
    return {bit_cast<V>(two << 16), bit_cast<V>(two & 0xffff0000u)};
}

// The extension's own int8 -> float goes lane by lane on some compilers.
inline V load_i8(const int8_t* p) {
#if defined(__AVX512F__)
    return bit_cast<V>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(p))));
#elif defined(__AVX2__)
    return bit_cast<V>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))));
#elif defined(__ARM_NEON)
    const int8x8_t codes = bit_cast<int8x8_t>(uint64_t{load<uint32_t>(p)});
    return bit_cast<V>(vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(codes)))));
#else
    V v;
    for (int i = 0; i < W; ++i) v[i] = p[i];
    return v;
#endif
}

inline Pair load2(const int8_t* p) { return {load_i8(p), load_i8(p + W)}; }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bit_cast<float>(uint32_t{x.bits} << 16); }
inline float to_float(int8_t x) { return x; }
inline float to_float(f16 x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#elif defined(__ARM_NEON)
    return static_cast<float>(bit_cast<__fp16>(x.bits));
#else
    const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, exponent = (x.bits >> 10) & 31, mantissa = x.bits & 1023u;
    if (exponent == 31) return bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(mantissa) * 0x1p-24f;
    return bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
#endif
}

inline Pair load2(const f16* p) {
#if defined(__AVX512F__)
    return {bit_cast<V>(_mm512_cvtph_ps(load<__m256i>(p))), bit_cast<V>(_mm512_cvtph_ps(load<__m256i>(p + W)))};
#elif defined(__F16C__)
    return {bit_cast<V>(_mm256_cvtph_ps(load<__m128i>(p))), bit_cast<V>(_mm256_cvtph_ps(load<__m128i>(p + W)))};
#else
    Pair pair;
    for (int i = 0; i < W; ++i) {
        pair.a[i] = to_float(p[i]);
        pair.b[i] = to_float(p[W + i]);
    }
    return pair;
#endif
}

// The last n < 2W channels of a row; the rest of the pair is zero.
template <class T>
inline Pair load2_part(const T* p, int64_t n) {
    alignas(64) T whole[2 * W] = {};
    std::memcpy(whole, p, static_cast<size_t>(n) * sizeof(T));
    return load2(whole);
}

inline void from_float(float x, float* p) { *p = x; }
inline void from_float(float x, bf16* p) {
    uint32_t bits = bit_cast<uint32_t>(x);
    // Round to nearest even; a NaN stays a NaN.
    if (x != x) bits |= 0x00400000u;
    else bits += 0x7fffu + ((bits >> 16) & 1u);
    p->bits = static_cast<uint16_t>(bits >> 16);
}
inline void from_float(float x, f16* p) {
#if defined(__F16C__)
    p->bits = static_cast<uint16_t>(_cvtss_sh(x, 0));
#elif defined(__ARM_NEON)
    p->bits = bit_cast<uint16_t>(static_cast<__fp16>(x));
#else
    const uint32_t bits = bit_cast<uint32_t>(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    uint32_t out;
    if (magnitude > 0x7f800000u) out = 0x7e00u;
    else if (magnitude >= 0x477ff000u) out = 0x7c00u;  // rounds to infinity
    else if (magnitude < 0x38800000u) {                // subnormal half: scale to units of 2^-24
        out = static_cast<uint32_t>(std::nearbyint(bit_cast<float>(magnitude) * 0x1p24f));
    } else {
        out = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    }
    p->bits = static_cast<uint16_t>(sign | out);
#endif
}

// Channel of lane i of a pair's first (b = false) or second vector.
template <class T>
inline int channel(int i, bool b) {
    return b ? W + i : i;
}
template <>
inline int channel<bf16>(int i, bool b) {
    return 2 * i + b;
}

// Shuffles that stay within lanes of 128 bits, or move whole lanes: they cost less than those that move floats across.
namespace detail {
using Places = std::make_integer_sequence<int, W>;

// Within each lane: with N = 1, a and b by turns, with N = 2, two of a and two of b; their lower or their upper half.
template <int N, bool upper, class T, int... I>
inline T unpack(T a, T b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(
        a, b, (I / 4 * 4 + (N == 1 ? I % 4 / 2 : I % 2) + (upper ? 2 : 0) + (I / N % 2 ? W : 0))...);
}

template <int N, class T>
inline T add_unpacked(T a, T b) {
    return unpack<N, false>(a, b, Places{}) + unpack<N, true>(a, b, Places{});
}

// The even or the odd lanes of a, then those of b.
template <bool odd, int... I>
inline V lanes(V a, V b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I / 4 * 8 + I % 4 + (odd ? 4 : 0))...);
}
}  // namespace detail

// Four vectors of floats or of whole numbers to one: place i of each 128-bit lane becomes the sum of that lane of v[i].
template <class T>
inline T add_places(T a, T b, T c, T d) {
    return detail::add_unpacked<2>(detail::add_unpacked<1>(a, b), detail::add_unpacked<1>(c, d));
}

// Lane i of the result: the sum of all lanes of vector i, from W / 4 vectors of add_places; overwrites v.
inline V add_lanes(V (&v)[W / 4]) {
    for (int n = W / 4; n > 1; n /= 2)
        for (int i = 0; i < n / 2; ++i)
            v[i] = detail::lanes<false>(v[2 * i], v[2 * i + 1], detail::Places{}) +
                   detail::lanes<true>(v[2 * i], v[2 * i + 1], detail::Places{});
    return v[0];
}

inline float sum(V v) {
    float s = 0;
    for (int i = 0; i < W; ++i) s += v[i];
    return s;
}

inline V vmax(V a, V b) { return a > b ? a : b; }  // b where either is NaN

// exp(x) to about 1e-7 relative for x <= 88; exactly 0 below -87.3 and NaN for NaN.
inline V exp(V x) {
    const V low = set1(-87.3f);
    const V clamped = x < low ? low : x;
    // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
    const V magic = set1(12582912.0f);
    const V shifted = clamped * 1.44269504088896341f + magic;
    const V n = shifted - magic;
    const V r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
    V p = set1(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const VU exponent = (bit_cast<VU>(shifted) << 23) + 0x3f800000u;
    const V result = p * bit_cast<V>(exponent);
    return x < low ? V{} : result;
}

// tanh(x) to a few units in the last place: near 0, where (e - 1) / (e + 1) would cancel, its series.
inline V tanh(V x) {
    const VU sign = bit_cast<VU>(x) & 0x80000000u;
    const V size = bit_cast<V>(bit_cast<VU>(x) ^ sign), two = size * 2.0f;
    const V e = exp(two > set1(60.0f) ? set1(60.0f) : two);
    const V far = (e - 1.0f) / (e + 1.0f), y = size * size;
    V p = set1(-8.8632355e-3f);
    p = p * y + 2.1869488e-2f;
    p = p * y - 5.3968254e-2f;
    p = p * y + 1.3333333e-1f;
    p = p * y - 3.3333333e-1f;
    const V near = size + size * y * p;
    return bit_cast<V>(bit_cast<VU>(size < set1(0.3f) ? near : far) | sign);
}

}  // namespace questkv::QUESTKV_ISA_NAME
