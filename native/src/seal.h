// Boxes, the lowest and highest value of every key channel of a page, and codes, a page's content in eight bits.
#pragma once

#include <cmath>
#include <limits>

#include "simd.h"

namespace questkv::QUESTKV_ISA_NAME {

// Code [lo, hi] in steps, rounded outward; in float64 a code times its step is exact.
inline void code_outward(double lo, double hi, double step, int8_t* code_lo, int8_t* code_hi) {
    double below = std::floor(lo / step), above = std::ceil(hi / step);
    below -= below * step > lo;
    above += above * step < hi;
    *code_lo = static_cast<int8_t>(below);
    *code_hi = static_cast<int8_t>(above);
}

// Write one page's box in one KV head. Int8 codes are rounded outward in float64, where code * scale is exact.
//   keys: [S, D]. lo, hi: scratch of [D]. boxes: [2, D]. scale: null for boxes in the keys' type.
template <class T>
void seal_page(const T* keys, int64_t page_size, int64_t head_dim, float* lo, float* hi, void* boxes, float* scale) {
    bool hidden = false;
    for (int64_t d = 0; d < head_dim; ++d) lo[d] = hi[d] = to_float(keys[d]);
    for (int64_t t = 0; t < page_size; ++t)
        for (int64_t d = 0; d < head_dim; ++d) {
            const float k = to_float(keys[t * head_dim + d]);
            lo[d] = k < lo[d] ? k : lo[d];
            hi[d] = k > hi[d] ? k : hi[d];
            hidden |= !(std::fabs(k) <= std::numeric_limits<float>::max());
        }
    constexpr float infinity = std::numeric_limits<float>::infinity();
    if (!scale) {
        T* out = static_cast<T*>(boxes);
        for (int64_t d = 0; d < head_dim; ++d) {
            from_float(hidden ? -infinity : lo[d], out + d);
            from_float(hidden ? infinity : hi[d], out + head_dim + d);
        }
        return;
    }
    int8_t* codes = static_cast<int8_t*>(boxes);
    if (hidden) {
        std::memset(codes, 0, static_cast<size_t>(2 * head_dim));
        *scale = infinity;
        return;
    }
    // Compared and not std::fmax: GCC 12 fails on the vectors of such a loop for ARM.
    double largest = 0;
    for (int64_t d = 0; d < head_dim; ++d) {
        const double below = std::fabs(lo[d]), above = std::fabs(hi[d]), size = below > above ? below : above;
        largest = size > largest ? size : largest;
    }
    // 127 * scale must reach the largest value although the division rounds; a scale is never subnormal.
    const float s = std::fmax(static_cast<float>(largest / 127 * (1 + 0x1p-22)), std::numeric_limits<float>::min());
    const double step = s;
    for (int64_t d = 0; d < head_dim; ++d) code_outward(lo[d], hi[d], step, codes + d, codes + head_dim + d);
    *scale = s;
}

// A page's box as it is stored; scale is 1 for boxes in the keys' type.
struct BoxView {
    const char* codes;
    float scale;
};

// The box around `count` pages' boxes, page(i), in the keys' type.
template <class T, class PageBox>
void join_boxes(int64_t count, int64_t head_dim, const PageBox& page, T* box) {
    for (int64_t d = 0; d < head_dim; ++d) {
        float lo = to_float(reinterpret_cast<const T*>(page(0).codes)[d]);
        float hi = to_float(reinterpret_cast<const T*>(page(0).codes)[head_dim + d]);
        for (int64_t i = 1; i < count; ++i) {
            const T* other = reinterpret_cast<const T*>(page(i).codes);
            const float below = to_float(other[d]), above = to_float(other[head_dim + d]);
            lo = below < lo ? below : lo;
            hi = above > hi ? above : hi;
        }
        from_float(lo, box + d);
        from_float(hi, box + head_dim + d);
    }
}

// The same in int8 codes of the largest scale, rounded outward in float64, where code * scale is exact.
template <class PageBox>
void join_boxes(int64_t count, int64_t head_dim, const PageBox& page, int8_t* box, float* scale) {
    float s = 0;
    for (int64_t i = 0; i < count; ++i) s = page(i).scale > s ? page(i).scale : s;
    *scale = s;
    if (!(s <= std::numeric_limits<float>::max())) {
        std::memset(box, 0, static_cast<size_t>(2 * head_dim));
        return;
    }
    const double step = s;
    for (int64_t d = 0; d < head_dim; ++d) {
        double lo = std::numeric_limits<double>::infinity(), hi = -lo;
        for (int64_t i = 0; i < count; ++i) {
            const BoxView other = page(i);
            const int8_t* codes = reinterpret_cast<const int8_t*>(other.codes);
            const double below = double{other.scale} * codes[d], above = double{other.scale} * codes[head_dim + d];
            lo = below < lo ? below : lo;
            hi = above > hi ? above : hi;
        }
        code_outward(lo, hi, step, box + d, box + head_dim + d);
    }
}

inline uint8_t code_of(double place) {
    const double code = std::nearbyint(place);
    return static_cast<uint8_t>(code < 0 ? 0 : code > 255 ? 255 : code);
}

// Code keys [S, D] as places inside their box, 0 at lo and 255 at hi: 0 where the box has no width or hides a page.
template <class T>
void code_keys(const T* keys, int64_t page_size, int64_t head_dim, const int8_t* box, float scale, uint8_t* codes) {
    const bool shown = scale <= std::numeric_limits<float>::max();
    for (int64_t d = 0; d < head_dim; ++d) {
        const double lo = double{scale} * box[d], width = double{scale} * (box[head_dim + d] - box[d]);
        for (int64_t t = 0; t < page_size; ++t) {
            const int64_t i = t * head_dim + d;
            codes[i] = shown && width > 0 ? code_of((double{to_float(keys[i])} - lo) * 255 / width) : uint8_t{0};
        }
    }
}

// Code values [S, Dv], each token between its own extremes; scales [S, 2] take step and offset, NaN for a token that
// holds a NaN or infinite value.
template <class T>
void code_values(const T* values, int64_t page_size, int64_t value_dim, float* scales, uint8_t* codes) {
    for (int64_t t = 0; t < page_size; ++t) {
        const T* row = values + t * value_dim;
        float lo = to_float(row[0]), hi = lo;
        bool finite = true;
        for (int64_t d = 0; d < value_dim; ++d) {
            const float v = to_float(row[d]);
            lo = v < lo ? v : lo;
            hi = v > hi ? v : hi;
            finite &= std::fabs(v) <= std::numeric_limits<float>::max();
        }
        const float step = (hi - lo) / 255;
        finite &= step <= std::numeric_limits<float>::max();
        scales[2 * t] = finite ? step : std::numeric_limits<float>::quiet_NaN();
        scales[2 * t + 1] = finite ? lo : std::numeric_limits<float>::quiet_NaN();
        for (int64_t d = 0; d < value_dim; ++d) {
            const bool coded = finite && step > 0;
            codes[t * value_dim + d] = coded ? code_of((double{to_float(row[d])} - lo) / step) : uint8_t{0};
        }
    }
}

}  // namespace questkv::QUESTKV_ISA_NAME
