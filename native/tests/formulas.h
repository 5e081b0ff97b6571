// The operators as plain loops over doubles, each number with a bound on what float arithmetic may differ from it; the
// bounds are derived in tests/kernels/formulas.py.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "problem.h"

namespace questkv::tests {

constexpr double kU = 0x1p-24, kTiny = 0x1p-120;

struct Close {
    double value = 0, bound = 0;

    bool holds(double x) const {
        return std::isnan(value) ? std::isnan(x) : std::isinf(value) ? x == value : std::fabs(x - value) <= bound;
    }
};

// Score of one query head for one page, from the box as it is stored.
inline Close head_score(const Problem& problem, const Layer& layer, int64_t row, int64_t head, int64_t page,
                        double optimism) {
    const Shape& s = problem.shape;
    const int64_t kv_head = head / s.group, physical = problem.table[row * problem.table_width + page];
    const double scale = layer.scale(kv_head, physical);
    const double* q = problem.q_numbers.data() + (row * s.heads() + head) * s.head_dim;
    Close score;
    double size = 0;
    for (int64_t d = 0; d < s.head_dim; ++d) {
        const double lo = layer.bound(kv_head, physical, false, d) * scale;
        const double hi = layer.bound(kv_head, physical, true, d) * scale;
        if (!std::isfinite(lo) || !std::isfinite(hi)) return {kInf, 0};  // a page with a NaN or infinite key
        score.value += problem.scale * (q[d] * (hi + lo) / 2 + optimism * std::fabs(q[d]) * (hi - lo) / 2);
        size += problem.scale * (1 + optimism) / 2 * (std::fabs(lo) + std::fabs(hi)) * std::fabs(q[d]);
    }
    const double terms = static_cast<double>(2 * s.head_dim + 8 + std::max<int64_t>(8, s.group));
    score.bound = 1.01 * terms * kU * size + kTiny;
    return score;
}

// [lists, sealed pages] of one row.
inline std::vector<std::vector<Close>> scores_of(const Problem& problem, const Layer& layer, int64_t row,
                                                 const Scoring& scoring) {
    const Shape& s = problem.shape;
    const int64_t sealed = s.sealed(row);
    std::vector<std::vector<Close>> heads(static_cast<size_t>(s.heads()));
    for (int64_t h = 0; h < s.heads(); ++h)
        for (int64_t p = 0; p < sealed; ++p)
            heads[h].push_back(head_score(problem, layer, row, h, p, scoring.optimism));
    if (scoring.group == Group::per_head) return heads;
    std::vector<std::vector<Close>> lists(static_cast<size_t>(s.kv_heads), std::vector<Close>(sealed));
    for (int64_t h = 0; h < s.heads(); ++h) {
        double most = -kInf, least = kInf, error = 0, total = 0;
        for (const Close& c : heads[h]) {
            if (c.value == kInf) continue;
            most = std::max(most, c.value);
            least = std::min(least, c.value);
            error = std::max(error, c.bound);
        }
        for (const Close& c : heads[h])
            if (c.value != kInf) total += std::exp(c.value - most);
        const double relative = std::expm1(2 * error) + (static_cast<double>(sealed) + most - least + 20) * kU;
        for (int64_t p = 0; p < sealed; ++p) {
            Close c = heads[h][p];
            if (scoring.group == Group::softmax_mean && c.value != kInf) {
                c.value = std::exp(c.value - most) / total;
                c.bound = 1.01 * relative * c.value + kTiny;
            }
            lists[h / s.group][p].value += c.value / static_cast<double>(s.group);
            lists[h / s.group][p].bound += c.bound / static_cast<double>(s.group);
        }
    }
    return lists;
}

// The selected pages of one list, by a stable sort.
inline std::vector<int64_t> pages_by_sort(const float* scores, int64_t pages, int64_t wanted, int64_t sink,
                                          int64_t recent) {
    std::vector<int64_t> chosen(static_cast<size_t>(pages));
    std::iota(chosen.begin(), chosen.end(), 0);
    if (wanted >= pages) return chosen;
    const auto forced = [&](int64_t p) { return p < sink || p >= pages - recent; };
    std::stable_sort(chosen.begin(), chosen.end(), [&](int64_t a, int64_t b) {
        if (forced(a) != forced(b)) return forced(a);
        return !forced(a) && scores[a] > scores[b];
    });
    chosen.resize(static_cast<size_t>(wanted));
    std::sort(chosen.begin(), chosen.end());
    return chosen;
}

// Attention of one query head over the tokens of the given pages and of the open page: Dv numbers.
inline std::vector<Close> attention(const Problem& problem, int64_t row, int64_t head,
                                    const std::vector<int64_t>& pages, const Softmax& softmax) {
    const Shape& s = problem.shape;
    const int64_t kv_head = head / s.group, dim = s.head_dim;
    std::vector<int64_t> tokens;
    for (const int64_t page : pages)
        for (int64_t i = 0; i < s.page_size; ++i) tokens.push_back(page * s.page_size + i);
    for (int64_t t = s.sealed(row) * s.page_size; t < problem.lengths[row]; ++t) tokens.push_back(t);

    const double* q = problem.q_numbers.data() + (row * s.heads() + head) * dim;
    std::vector<double> logits;
    double size = 0, largest = 0, most = -kInf, least = kInf;
    for (const int64_t t : tokens) {
        const double* k = problem.token(false, row, kv_head, t);
        double sum = 0, sizes = 0;
        for (int64_t d = 0; d < dim; ++d) {
            sum += q[d] * k[d] * softmax.scale;
            sizes += std::fabs(q[d] * k[d]) * softmax.scale;
        }
        size = std::max(size, sizes);
        largest = std::max(largest, std::fabs(sum));
        logits.push_back(softmax.softcap > 0 ? softmax.softcap * std::tanh(sum / softmax.softcap) : sum);
    }
    double error = static_cast<double>(dim + 2) * kU * size + (softmax.softcap > 0 ? 10 * kU * largest : 0);
    // Coded keys: decoding in float, and folded queries in steps of 1 / (127 * 256) of the largest; like those of the
    // weights below, the roundings are independent and even, so six standard deviations bound their sum.
    double widest = 0;
    for (int64_t d = 0; d < dim; ++d)
        widest = std::max(widest, std::fabs(q[d]) * 254 * problem.box_scale * softmax.scale);
    const double rounding = 6 / std::sqrt(12.0) / (127 * 256);
    error += (8 * static_cast<double>(dim) * kU + rounding * std::sqrt(static_cast<double>(dim))) * widest;
    if (softmax.sinks) logits.push_back(softmax.sinks[head]);
    for (const double x : logits) most = std::max(most, x), least = std::min(least, x);
    double total = 0;
    for (const double x : logits) total += std::exp(x - most);
    const double relative = std::expm1(2 * error) + (2 * static_cast<double>(tokens.size()) + most - least + 10) * kU;
    std::vector<Close> out(static_cast<size_t>(s.dim(true)));
    for (int64_t d = 0; d < s.dim(true); ++d) {
        double sizes = 0;
        for (size_t i = 0; i < tokens.size(); ++i) {
            const double part = std::exp(logits[i] - most) / total * problem.token(true, row, kv_head, tokens[i])[d];
            out[d].value += part;
            sizes += std::fabs(part);
        }
        out[d].bound = 1.01 * relative * sizes + kTiny;
        out[d].bound += rounding * std::sqrt(static_cast<double>(tokens.size())) * 255 * problem.value_step;
        if (s.dtype != DType::f32)
            out[d].bound += (std::fabs(out[d].value) + out[d].bound) * epsilon(s.dtype) / 2 + smallest(s.dtype);
    }
    return out;
}

}  // namespace questkv::tests
