// The core without Python: every operator of every instruction set here against plain double loops, and bit for bit
// against itself on other threads and row by row. Given a path to libgomp, it uses its threads, else its own pool.
#include <dlfcn.h>

#include <cinttypes>
#include <cstdlib>

#include "check.h"
#include "formulas.h"
#include "linear.h"
#include "problem.h"

namespace questkv::tests {
namespace {

constexpr int kThreads[] = {1, 2, 3};

// What a layer holds after append, written token by token.
void write_tokens(const Problem& problem, Layer& layer) {
    const Shape& s = problem.shape;
    const char *key = problem.keys.data(), *value = problem.values.data();
    for (const int64_t slot : problem.slots)
        for (int64_t h = 0; h < s.kv_heads; ++h, key += s.row_bytes(), value += s.row_bytes()) {
            std::memcpy(layer.token(false, h, slot / s.page_size, slot % s.page_size), key, s.row_bytes());
            std::memcpy(layer.token(true, h, slot / s.page_size, slot % s.page_size), value, s.row_bytes());
        }
}

void test_append(const KernelTable& kernels, const Problem& problem, Layer& layer, int threads) {
    Layer expected(problem.shape, problem.segment_pages);
    write_tokens(problem, expected);
    kernels.append(layer.pages(), static_cast<int64_t>(problem.slots.size()), problem.slots.data(), problem.keys.data(),
                   problem.values.data(), threads);
    CHECK(layer.same_tokens(expected));
}

// Lowest and highest key of every channel, rounded outward to int8 in double, where code * scale is exact.
void check_box(const Shape& s, Layer& layer, int64_t head, int64_t page) {
    std::vector<double> lo(s.head_dim, kInf), hi(s.head_dim, -kInf);
    double largest = 0;
    for (int64_t t = 0; t < s.page_size; ++t)
        for (int64_t d = 0; d < s.head_dim; ++d) {
            const double k = read_number(s.dtype, layer.token(false, head, page, t) + d * size_of(s.dtype));
            lo[d] = std::min(lo[d], k);
            hi[d] = std::max(hi[d], k);
            largest = std::max(largest, std::fabs(k));
        }
    const double step = layer.scale(head, page);
    bool right = true;
    if (s.int8_boxes)
        right = step == std::max(static_cast<float>(largest / 127 * (1 + 0x1p-22)), std::numeric_limits<float>::min());
    for (int64_t d = 0; d < s.head_dim; ++d) {
        const double below = layer.bound(head, page, false, d), above = layer.bound(head, page, true, d);
        right = right && below * step <= lo[d] && hi[d] <= above * step;
        if (s.int8_boxes) right = right && (below + 1) * step > lo[d] && (above - 1) * step < hi[d];
        else right = right && below == lo[d] && above == hi[d];
    }
    CHECK(right);
}

void test_seal(const KernelTable& kernels, const Problem& problem, Layer& layer, int threads) {
    kernels.seal(layer.pages(), static_cast<int64_t>(problem.sealed_ids.size()), problem.sealed_ids.data(), nullptr,
                 threads);
    std::vector<bool> sealed(
        static_cast<size_t>(problem.segment_pages[0] + problem.segment_pages[1] + problem.segment_pages[2]));
    for (const int64_t page : problem.sealed_ids) sealed[page] = true;
    for (int64_t head = 0; head < problem.shape.kv_heads; ++head)
        for (int64_t page = 0; page < static_cast<int64_t>(sealed.size()); ++page)
            if (sealed[page]) check_box(problem.shape, layer, head, page);
            else if (problem.shape.int8_boxes) CHECK(std::isnan(layer.scale(head, page)));
            else CHECK(std::isnan(layer.bound(head, page, true, 0)));
}

std::vector<float> estimate(const KernelTable& kernels, const Problem& problem, const Layer& layer,
                            const Scoring& scoring, int threads) {
    const Shape& s = problem.shape;
    const int64_t lists = scoring.group == Group::per_head ? s.heads() : s.kv_heads;
    std::vector<float> scores(static_cast<size_t>(s.rows() * lists * problem.table_width), std::nanf(""));
    kernels.estimate(layer.pages(), problem.rows(), problem.scale, scoring, scores.data(), threads);
    return scores;
}

void check_scores(const Problem& problem, const Layer& layer, const Scoring& scoring,
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

// A page with an infinite key is read whatever the others score, in the KV head that holds the key.
void test_bad_key(const KernelTable& kernels, const Problem& problem) {
    if (problem.sealed_ids.empty()) return;
    Layer layer(problem.shape, problem.segment_pages);
    write_tokens(problem, layer);
    char* key = layer.token(false, 0, problem.sealed_ids[0], problem.shape.page_size - 1);
    write_number(problem.shape.dtype, kInf, key + (problem.shape.head_dim - 1) * size_of(problem.shape.dtype));
    kernels.seal(layer.pages(), static_cast<int64_t>(problem.sealed_ids.size()), problem.sealed_ids.data(), nullptr, 1);
    for (const Group group : {Group::mean, Group::softmax_mean, Group::per_head}) {
        const Scoring scoring{1.0f, group, 0, 0};
        check_scores(problem, layer, scoring, estimate(kernels, problem, layer, scoring, 1));
    }
}

// Codes of one page in one KV head, as they must be; what they decode to goes into the problem.
void check_codes(Problem& problem, const Problem& plain, const Layer& layer, int64_t row, int64_t head, int64_t p) {
    const Shape& s = problem.shape;
    const int64_t page = problem.table[row * problem.table_width + p];
    const double scale = layer.scale(head, page);
    problem.box_scale = std::max(problem.box_scale, scale);
    bool right = true;
    for (int64_t slot = 0; slot < s.page_size; ++slot) {
        const int64_t t = p * s.page_size + slot;
        const double *key = plain.token(false, row, head, t), *value = plain.token(true, row, head, t);
        const float lowest = static_cast<float>(*std::min_element(value, value + s.head_dim));
        const float highest = static_cast<float>(*std::max_element(value, value + s.head_dim));
        const float step = (highest - lowest) / 255;
        const float* stored = layer.value_scale(head, page, slot);
        right = right && stored[0] == step && stored[1] == lowest;
        problem.value_step = std::max(problem.value_step, static_cast<double>(step));
        double* decoded_key = problem.key_of[row].data() + (head * problem.lengths[row] + t) * s.head_dim;
        double* decoded_value = problem.value_of[row].data() + (head * problem.lengths[row] + t) * s.head_dim;
        for (int64_t d = 0; d < s.head_dim; ++d) {
            const double lo = layer.bound(head, page, false, d) * scale, hi = layer.bound(head, page, true, d) * scale;
            const int code = layer.code(false, head, page, slot, d), of_value = layer.code(true, head, page, slot, d);
            right = right &&
                    code == (hi > lo ? std::clamp(std::nearbyint((key[d] - lo) * 255 / (hi - lo)), 0.0, 255.0) : 0);
            right = right && of_value == (step > 0 ? std::nearbyint((value[d] - lowest) / step) : 0);
            decoded_key[d] = lo + code * (hi - lo) / 255;
            decoded_value[d] = lowest + static_cast<double>(step) * of_value;
        }
    }
    CHECK(right);
}

// The same tokens with their sealed pages in eight bits: attention over what the codes say.
struct Coded {
    Problem problem;
    Layer layer;

    Coded(const KernelTable& kernels, const Problem& plain, int threads)
        : problem(plain), layer(plain.shape, plain.segment_pages, static_cast<int64_t>(plain.sealed_ids.size())) {
        int64_t next = plain.segment_pages[0] + plain.segment_pages[1] + plain.segment_pages[2];
        std::vector<int64_t> into;
        for (int64_t r = 0; r < plain.shape.rows(); ++r)
            for (int64_t p = 0; p < plain.shape.sealed(r); ++p) {
                into.push_back(next);
                problem.table[r * plain.table_width + p] = next++;
            }
        write_tokens(plain, layer);
        kernels.seal(layer.pages(), static_cast<int64_t>(into.size()), plain.sealed_ids.data(), into.data(), threads);
        for (int64_t r = 0; r < plain.shape.rows(); ++r)
            for (int64_t h = 0; h < plain.shape.kv_heads; ++h)
                for (int64_t p = 0; p < plain.shape.sealed(r); ++p) check_codes(problem, plain, layer, r, h, p);
    }
};

void test_select(const KernelTable& kernels, unsigned seed) {
    tally().where = std::string(kernels.name) + " select";
    std::mt19937 random(seed);
    static const float few[] = {NAN, INFINITY, -INFINITY, -1.0f, -0.0f, 0.0f, 0.5f, 3e38f};
    for (const int64_t pages : {1, 5, 64, 1003}) {
        const int64_t rows = 3, heads = 2;
        std::vector<float> scores(static_cast<size_t>(rows * heads * pages));
        for (float& x : scores) x = random() % 2 ? few[random() % 8] : static_cast<float>(random() % 1000);
        std::vector<int64_t> counts(rows), wanted(rows);
        for (int64_t r = 0; r < rows; ++r) {
            counts[r] = r ? 1 + static_cast<int64_t>(random() % pages) : pages;
            wanted[r] = 3 + static_cast<int64_t>(random() % pages);
        }
        int64_t width = 0;
        for (int64_t r = 0; r < rows; ++r) width = std::max(width, std::min(counts[r], wanted[r]));
        for (const int threads : kThreads) {
            std::vector<int64_t> selection(static_cast<size_t>(rows * heads * width), -7);
            kernels.select(scores.data(), rows, heads, pages, counts.data(), wanted.data(), 1, 2, width,
                           selection.data(), threads);
            for (int64_t i = 0; i < rows * heads; ++i) {
                std::vector<float> own(scores.begin() + i * pages, scores.begin() + (i + 1) * pages);
                for (float& x : own) x = std::isnan(x) ? INFINITY : x;
                std::vector<int64_t> expected = pages_by_sort(own.data(), counts[i / heads], wanted[i / heads], 1, 2);
                expected.resize(static_cast<size_t>(width), -1);
                CHECK(std::equal(expected.begin(), expected.end(), selection.begin() + i * width));
            }
        }
    }
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

using Expected = std::vector<std::vector<Close>>;  // [R * Hq] of D

Expected expected_output(const Problem& problem, const Selection* selection, const Softmax& softmax) {
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

std::vector<char> empty_output(const Problem& problem, int64_t rows) {
    std::vector<char> out(static_cast<size_t>(rows * problem.shape.heads() * problem.shape.row_bytes()));
    for (size_t i = 0; i < out.size(); i += size_of(problem.shape.dtype))
        write_number(problem.shape.dtype, std::nan(""), out.data() + i);
    return out;
}

std::vector<char> attend(const KernelTable& kernels, const Problem& problem, const Layer& layer,
                         const Selection* selection, const Softmax& softmax, int threads) {
    std::vector<char> out = empty_output(problem, problem.shape.rows());
    kernels.attend(layer.pages(), problem.rows(), selection ? selection->array.data() : nullptr,
                   selection ? selection->lists : problem.shape.kv_heads, selection ? selection->width : 0, softmax,
                   out.data(), threads);
    return out;
}

void test_attend(const KernelTable& kernels, const Problem& problem, const Layer& layer, const Selection* selection,
                 const Softmax& softmax, const Expected& expected) {
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

Decoded decode(const KernelTable& kernels, const Problem& problem, const Layer& layer, const Rows& rows,
               const int64_t* wanted, const Softmax& softmax, const Scoring& scoring, int threads) {
    Decoded result{empty_output(problem, rows.count), std::vector<int64_t>(static_cast<size_t>(rows.count), -7)};
    kernels.decode(layer.pages(), rows, wanted, softmax, scoring, result.out.data(), result.pages_read.data(), threads);
    return result;
}

// Estimate, select and attend in one call give the bits of three calls; a row that may read everything those of dense.
void test_decode(const KernelTable& kernels, const Problem& problem, const Layer& layer, const Softmax& softmax,
                 const Scoring& scoring) {
    const Shape& s = problem.shape;
    const std::vector<float> scores = estimate(kernels, problem, layer, scoring, 1);
    check_scores(problem, layer, scoring, scores);
    for (const int threads : kThreads) CHECK(same_bits(estimate(kernels, problem, layer, scoring, threads), scores));

    std::vector<int64_t> wanted(s.lengths.size());
    for (int64_t r = 0; r < s.rows(); ++r)
        wanted[r] = r % 3 == 2 ? s.sealed(r) + 1 : std::max(scoring.sink_pages + scoring.recent_pages, s.sealed(r) / 2);
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
            decode(kernels, problem, layer, problem.rows(), wanted.data(), softmax, scoring, threads);
        CHECK(same_bits(together.out, expected));
        CHECK(together.pages_read == read);
        for (int64_t r = 0; r < s.rows(); ++r) {
            const int64_t bytes = s.heads() * s.row_bytes();
            const Rows alone{1,
                             s.heads(),
                             problem.table_width,
                             problem.q.data() + r * bytes,
                             problem.table.data() + r * problem.table_width,
                             problem.lengths.data() + r};
            const Decoded one = decode(kernels, problem, layer, alone, wanted.data() + r, softmax, scoring, threads);
            CHECK(!std::memcmp(one.out.data(), expected.data() + r * bytes, static_cast<size_t>(bytes)));
            CHECK(one.pages_read[0] == read[r]);
        }
    }
}

void test_shape(const Shape& shape, unsigned seed) {
    const Problem problem(shape, seed);
    std::vector<float> sinks(static_cast<size_t>(shape.heads()));
    for (size_t i = 0; i < sinks.size(); ++i) sinks[i] = static_cast<float>(i % 5) - 2;
    const Softmax plain{problem.scale, 0, nullptr}, capped{problem.scale, 1000, sinks.data()};
    const Selection shared(shape, false), own(shape, true);
    const Expected all = expected_output(problem, nullptr, plain),
                   all_capped = expected_output(problem, nullptr, capped);
    const Expected some = expected_output(problem, &shared, plain), some_own = expected_output(problem, &own, capped);
    for (const KernelTable* const* table = available_kernels(); *table; ++table) {
        const KernelTable& kernels = **table;
        tally().where = std::string(kernels.name) + " " + shape.text();
        Layer layer(shape, problem.segment_pages);
        test_append(kernels, problem, layer, 2);
        test_seal(kernels, problem, layer, 2);
        test_bad_key(kernels, problem);
        test_attend(kernels, problem, layer, nullptr, plain, all);
        test_attend(kernels, problem, layer, nullptr, capped, all_capped);
        test_attend(kernels, problem, layer, &shared, plain, some);
        test_attend(kernels, problem, layer, &own, capped, some_own);
        for (const Group group : {Group::mean, Group::softmax_mean, Group::per_head})
            test_decode(kernels, problem, layer, group == Group::mean ? plain : capped, {0.5f, group, 1, 1});
        if (!shape.int8_boxes || problem.sealed_ids.empty()) continue;
        const Coded coded(kernels, problem, 2);
        tally().where += " coded";
        test_attend(kernels, coded.problem, coded.layer, nullptr, plain,
                    expected_output(coded.problem, nullptr, plain));
        test_attend(kernels, coded.problem, coded.layer, &own, capped, expected_output(coded.problem, &own, capped));
        test_decode(kernels, coded.problem, coded.layer, plain, {0.5f, Group::mean, 1, 1});
        test_decode(kernels, coded.problem, coded.layer, capped, {0.5f, Group::per_head, 1, 1});
    }
}

void test_all() {
    unsigned seed = 0;
    const struct {
        int64_t kv_heads, group, head_dim, page_size;
        std::vector<int64_t> lengths;
    } shapes[] = {
        {1, 3, 33, 16, {1610}},                     // few lists, several parts
        {1, 1, 64, 16, {1100, 16}},                 // few lists
        {3, 1, 8, 1, {9, 1, 2, 31, 17}},            // many lists
        {2, 4, 80, 17, {140, 18, 17, 53, 35, 34}},  // many lists, odd pages
        {2, 2, 128, 32, {200, 33, 32, 64, 65}},
        {1, 7, 40, 3, {100, 2, 4, 3}},
        {1, 8, 96, 64, {300, 64, 700}},
        {1, 16, 256, 8, {77, 8, 40}},
    };
    for (const auto& s : shapes)
        for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
            for (const bool int8_boxes : {true, false})
                test_shape({s.kv_heads, s.group, s.head_dim, s.page_size, dtype, int8_boxes, s.lengths}, seed++);
    for (const KernelTable* const* table = available_kernels(); *table; ++table) test_select(**table, seed++);
    test_linear_shapes();
}

}  // namespace
}  // namespace questkv::tests

int main(int argc, char** argv) {
    using questkv::tests::tally;
    if (argc > 1 && !dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL)) return std::fprintf(stderr, "%s\n", dlerror()), 2;
    const char* pool = dlsym(RTLD_DEFAULT, "GOMP_parallel") ? "libgomp's threads" : "threads of its own";
    std::string names;
    for (const auto* const* t = questkv::available_kernels(); *t; ++t) names += std::string(" ") + (*t)->name;
    questkv::tests::test_all();
    std::printf("native tests:%s, %s: %ld passed, %ld failed\n", names.c_str(), pool, tally().passed, tally().failed);
    return tally().failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
