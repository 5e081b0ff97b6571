// Whole numbers as two signed digits, which codes are multiplied with: 256 upper + lower.
#pragma once

#include "simd.h"

namespace questkv::QUESTKV_ISA_NAME {

#if defined(__AVX512VNNI__)
// The largest number that has them.
constexpr float kDigits = 127 * 256;

// The digits of 64 whole numbers of at most kDigits: the upper ones at to, the lower ones at to + dim.
inline void write_digits(const __m512i* whole, int8_t* to, int64_t dim) {
    // Packing leaves four channels of each vector by turns.
    const __m512i places = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    __m512i upper[2], lower[2];
    for (int i = 0; i < 2; ++i) {
        const __m512i both = _mm512_packs_epi32(whole[2 * i], whole[2 * i + 1]);
        upper[i] = _mm512_srai_epi16(_mm512_add_epi16(both, _mm512_set1_epi16(128)), 8);
        lower[i] = _mm512_sub_epi16(both, _mm512_slli_epi16(upper[i], 8));
    }
    const __m512i high = _mm512_packs_epi16(upper[0], upper[1]), low = _mm512_packs_epi16(lower[0], lower[1]);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(places, high));
    _mm512_storeu_si512(to + dim, _mm512_permutexvar_epi32(places, low));
}
#endif

}  // namespace questkv::QUESTKV_ISA_NAME
