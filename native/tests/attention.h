// Estimate, attend and decode as the tests call them, and what their results must be.
#pragma once

#include "check.h"
#include "formulas.h"
#include "problem.h"

namespace questkv::tests {

inline constexpr int kThreads[] = {1, 2, 3};

// What a layer holds after append, written token by token.
inline void write_tokens(const Problem& problem, Layer& layer) {
    const Shape& s = problem.shape;
    const char *key = problem.keys.data(), *value = problem.values.data();
    for (const int64_t slot : problem.slots)
        for (int64_t h = 0; h < s.kv_heads; ++h, key += s.row_bytes(false), value += s.row_bytes(true)) {
            std::memcpy(layer.token(false, h, slot / s.page_size, slot % s.page_size), key, s.row_bytes(false));
            std::memcpy(layer.token(true, h, slot / s.page_size, slot % s.page_size), value, s.row_bytes(true));
        }
}

inline std::vector<float> estimate(const KernelTable& kernels, const Problem& problem, const Layer& layer,
                                   const Scoring& scoring, int threads, const int64_t* wanted = nullptr) {
    const Shape& s = problem.shape;
    const int64_t lists = scoring.group == Group::per_head ? s.heads() : s.kv_heads;
    std::vector<float> scores(static_cast<size_t>(s.rows() * lists * problem.table_width), std::nanf(""));
    kernels.estimate(layer.pages(), problem.rows(wanted), problem.scale, scoring, scores.data(), threads);
    return scores;
}

inline void check_scores(const Problem& problem, const Layer& layer, const Scoring& scoring,
                         const std::vector<float>& scores) {
    const float* at = scores.data();
    for (int64_t row = 0; row < problem.shape.rows(); ++row)
        for (const auto& list : scores_of(problem, layer, row, scoring)) {
            bool right = true;
            for (int64_t p = 0; p < problem.table_width; ++p, ++at)
                right = right && (p < problem.shape.sealed(row) ? list[p].holds(*at) : *at == -kInf);
            CHECK(right);
        }
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || !std::memcmp(a.data(), b.data(), a.size() * sizeof(T)));
}

// Every third page of a row, others in each list; as lists and as the operator's array.
struct Selection {
    int64_t lists, width = 0;
    std::vector<std::vector<int64_t>> pages;  // [R * lists]
    std::vector<int64_t> array;

    Selection(const Shape& s, bool per_head) : lists(per_head ? s.heads() : s.kv_heads) {
        for (int64_t row = 0; row < s.rows(); ++row)
            for (int64_t list = 0; list < lists; ++list) {
                auto& own = pages.emplace_back();
                for (int64_t i = 0; i < s.sealed(row) / 3; ++i) own.push_back(3 * i + list % 3);
                width = std::max(width, static_cast<int64_t>(own.size()));
            }
        for (auto own : pages) {
            own.resize(static_cast<size_t>(width), -1);
            array.insert(array.end(), own.begin(), own.end());
        }
        array.reserve(1);  // an empty selection has an address: null stands for everything
    }
};

using Expected = std::vector<std::vector<Close>>;  // [R * Hq] of Dv

inline Expected expected_output(const Problem& problem, const Selection* selection, const Softmax& softmax) {
    Expected out;
    for (int64_t row = 0; row < problem.shape.rows(); ++row)
        for (int64_t head = 0; head < problem.shape.heads(); ++head) {
            std::vector<int64_t> pages(static_cast<size_t>(problem.shape.sealed(row)));
            std::iota(pages.begin(), pages.end(), 0);
            if (selection)
                pages = selection->pages[row * selection->lists + head * selection->lists / problem.shape.heads()];
            out.push_back(attention(problem, row, head, pages, softmax));
        }
    return out;
}

inline std::vector<char> empty_output(const Problem& problem, int64_t rows) {
    std::vector<char> out(static_cast<size_t>(rows * problem.shape.heads() * problem.shape.row_bytes(true)));
    for (size_t i = 0; i < out.size(); i += size_of(problem.shape.dtype))
        write_number(problem.shape.dtype, std::nan(""), out.data() + i);
    return out;
}

inline std::vector<char> attend(const KernelTable& kernels, const Problem& problem, const Layer& layer,
                                const Selection* selection, const Softmax& softmax, int threads) {
    std::vector<char> out = empty_output(problem, problem.shape.rows());
    kernels.attend(layer.pages(), problem.rows(), selection ? selection->array.data() : nullptr,
                   selection ? selection->lists : problem.shape.kv_heads, selection ? selection->width : 0, softmax,
                   out.data(), threads);
    return out;
}

inline void test_attend(const KernelTable& kernels, const Problem& problem, const Layer& layer,
                        const Selection* selection, const Softmax& softmax, const Expected& expected) {
    const std::vector<char> out = attend(kernels, problem, layer, selection, softmax, 1);
    const char* at = out.data();
    for (const auto& head : expected) {
        bool right = true;
        for (const Close& c : head) {
            right = right && c.holds(read_number(problem.shape.dtype, at));
            at += size_of(problem.shape.dtype);
        }
        CHECK(right);
    }
    for (const int threads : kThreads)
        CHECK(same_bits(attend(kernels, problem, layer, selection, softmax, threads), out));
}

struct Decoded {
    std::vector<char> out;
    std::vector<int64_t> pages_read;
};

inline Decoded decode(const KernelTable& kernels, const Problem& problem, const Layer& layer, const Rows& rows,
                      const Softmax& softmax, const Scoring& scoring, int threads) {
    Decoded result{empty_output(problem, rows.count), std::vector<int64_t>(static_cast<size_t>(rows.count), -7)};
    kernels.decode(layer.pages(), rows, softmax, scoring, result.out.data(), result.pages_read.data(), threads);
    return result;
}

// Estimate, select and attend in one call give the bits of three calls; a row that may read everything those of dense.
// Rows may read one page in `share`.
inline void test_decode(const KernelTable& kernels, const Problem& problem, const Layer& layer, const Softmax& softmax,
                        const Scoring& scoring, int64_t share = 2) {
    const Shape& s = problem.shape;
    const std::vector<float> every = estimate(kernels, problem, layer, scoring, 1);
    check_scores(problem, layer, scoring, every);
    for (const int threads : kThreads) CHECK(same_bits(estimate(kernels, problem, layer, scoring, threads), every));

    std::vector<int64_t> wanted(s.lengths.size());
    for (int64_t r = 0; r < s.rows(); ++r)
        wanted[r] =
            r % 3 == 2 ? s.sealed(r) + 1 : std::max(scoring.sink_pages + scoring.recent_pages, s.sealed(r) / share);
    const std::vector<float> scores = estimate(kernels, problem, layer, scoring, 1, wanted.data());
    Selection chosen(s, scoring.group == Group::per_head);
    chosen.width = 0;
    std::vector<int64_t> read(s.lengths.size());
    for (int64_t r = 0; r < s.rows(); ++r) {
        std::vector<std::vector<bool>> seen(s.kv_heads, std::vector<bool>(problem.table_width));
        for (int64_t l = 0; l < chosen.lists; ++l) {
            auto& own = chosen.pages[r * chosen.lists + l];
            own = pages_by_sort(scores.data() + (r * chosen.lists + l) * problem.table_width, s.sealed(r), wanted[r],
                                scoring.sink_pages, scoring.recent_pages);
            chosen.width = std::max(chosen.width, static_cast<int64_t>(own.size()));
            for (const int64_t page : own) seen[l * s.kv_heads / chosen.lists][page] = true;
        }
        for (const auto& pages : seen) read[r] += 1 + std::count(pages.begin(), pages.end(), true);
    }
    chosen.array.clear();
    for (auto own : chosen.pages) {
        own.resize(static_cast<size_t>(chosen.width), -1);
        chosen.array.insert(chosen.array.end(), own.begin(), own.end());
    }
    chosen.array.reserve(1);
    const std::vector<char> expected = attend(kernels, problem, layer, &chosen, softmax, 1);
    for (const int threads : kThreads) {
        const Decoded together =
            decode(kernels, problem, layer, problem.rows(wanted.data()), softmax, scoring, threads);
        CHECK(same_bits(together.out, expected));
        CHECK(together.pages_read == read);
        for (int64_t r = 0; r < s.rows(); ++r) {
            const int64_t bytes = s.heads() * s.row_bytes(true);
            const Rows alone{1,
                             s.heads(),
                             problem.table_width,
                             problem.q.data() + r * s.heads() * s.row_bytes(false),
                             problem.table.data() + r * problem.table_width,
                             problem.lengths.data() + r,
                             wanted.data() + r};
            const Decoded one = decode(kernels, problem, layer, alone, softmax, scoring, threads);
            CHECK(!std::memcmp(one.out.data(), expected.data() + r * bytes, static_cast<size_t>(bytes)));
            CHECK(one.pages_read[0] == read[r]);
        }
    }
}

}  // namespace questkv::tests
