// A linear layer for a few rows, as fast as its weights can be read.
#pragma once

#include "plain.h"

namespace questkv::QUESTKV_ISA_NAME {

// Weights are prefetched so far ahead of what is multiplied, in bytes. They are read from end to end, but a layer of a
// small model is too short for the hardware to learn it: without, 576 channels were read at 60 % of the memory's speed.
constexpr int64_t kWeightsAhead = 16384;

// What rows of weights TWeight are multiplied with: [rows, padded(channels)], zeros at the end; floats are in TWeight's
// pair order.
template <class TWeight, class T>
inline const typename Factor<TWeight>::type* arrange_rows(const T* x, int64_t rows, int64_t channels) {
    using Q = typename Factor<TWeight>::type;
    static thread_local Buffer<Q> arranged;
    static thread_local Buffer<float> floats;
    const int64_t width = padded(channels);
    Q* out = arranged.of(rows * width);
    for (int64_t r = 0; r < rows; ++r, x += channels) {
        if constexpr (std::is_same_v<Q, bf16>) {
            std::memcpy(out + r * width, x, static_cast<size_t>(channels) * sizeof(bf16));
            std::memset(out + r * width + channels, 0, static_cast<size_t>(width - channels) * sizeof(bf16));
        } else {
            float* plain = floats.of(channels);
            for (int64_t c = 0; c < channels; ++c) plain[c] = to_float(x[c]);
            arrange<TWeight>(plain, channels, out + r * width);
        }
    }
    return out;
}

// out[r, n] = x[r] . weight[n] * scales[n] + bias[n], summed in float32. x [rows, channels], weight [outputs,
// channels], scales and bias [outputs] or null, out [rows, outputs]. Reads every weight once.
template <class TWeight, class T>
void linear_rows(int64_t rows, int64_t outputs, int64_t channels, const T* x, const char* weight, const T* scales,
                 const T* bias, T* out, int threads) {
    const int64_t width = padded(channels), row_bytes = channels * static_cast<int64_t>(sizeof(TWeight));
    const auto* vectors = arrange_rows<TWeight>(x, rows, channels);
    // Four units a thread: enough that one which was held up doesn't hold up all.
    const int64_t blocks = (outputs + W - 1) / W, a_unit = most(1, blocks / (4 * most(1, threads)));
    const char* end = weight + outputs * row_bytes;
    run_units(outputs * row_bytes < 1 << 15 ? 1 : threads, (blocks + a_unit - 1) / a_unit, [&](int64_t unit) {
        alignas(64) float sums[4 * W];
        for (int64_t block = unit * a_unit; block < least(blocks, (unit + 1) * a_unit); ++block) {
            const int64_t first = block * W, here = least(W, outputs - first);
            const char *at[W], *ahead[W];
            for (int64_t i = 0; i < W; ++i) {
                // Rows past the last are the last again; what they give is not written.
                at[i] = weight + least(first + i, outputs - 1) * row_bytes;
                ahead[i] = end - at[i] > kWeightsAhead + row_bytes ? at[i] + kWeightsAhead : at[i];
            }
            const EachRow here_rows{at}, next[2] = {{ahead}, {ahead}};
            with_heads(rows, [&]<int H>(int64_t r) {
                dot_rows<TWeight, H, Ahead::once>(here_rows, next, channels, vectors + r * width, sums, W);
                for (int64_t h = 0; h < H; ++h)
                    for (int64_t i = 0; i < here; ++i)
                        from_float(sums[h * W + i] * (scales ? to_float(scales[first + i]) : 1.0f) +
                                       (bias ? to_float(bias[first + i]) : 0.0f),
                                   out + (r + h) * outputs + first + i);
            });
        }
    });
}

}  // namespace questkv::QUESTKV_ISA_NAME
