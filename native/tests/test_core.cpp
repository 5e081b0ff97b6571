// The core without Python: every operator of every instruction set here against plain double loops, and bit for bit
// against itself on other threads and row by row. Given a path to libgomp, it uses its threads, else its own pool.
#include <dlfcn.h>

#include <cinttypes>
#include <cstdlib>

#include "attention.h"
#include "failures.h"
#include "linear.h"

namespace questkv::tests {
namespace {

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
        const float lowest = static_cast<float>(*std::min_element(value, value + s.dim(true)));
        const float highest = static_cast<float>(*std::max_element(value, value + s.dim(true)));
        const float step = (highest - lowest) / 255;
        const float* stored = layer.value_scale(head, page, slot);
        right = right && stored[0] == step && stored[1] == lowest;
        problem.value_step = std::max(problem.value_step, static_cast<double>(step));
        double* decoded_key = problem.key_of[row].data() + (head * problem.lengths[row] + t) * s.head_dim;
        double* decoded_value = problem.value_of[row].data() + (head * problem.lengths[row] + t) * s.dim(true);
        for (int64_t d = 0; d < s.head_dim; ++d) {
            const double lo = layer.bound(head, page, false, d) * scale, hi = layer.bound(head, page, true, d) * scale;
            const int code = layer.code(false, head, page, slot, d);
            right = right &&
                    code == (hi > lo ? std::clamp(std::nearbyint((key[d] - lo) * 255 / (hi - lo)), 0.0, 255.0) : 0);
            decoded_key[d] = lo + code * (hi - lo) / 255;
        }
        for (int64_t d = 0; d < s.dim(true); ++d) {
            const int code = layer.code(true, head, page, slot, d);
            right = right && code == (step > 0 ? std::nearbyint((value[d] - lowest) / step) : 0);
            decoded_value[d] = lowest + static_cast<double>(step) * code;
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
            kernels.select(scores.data(), rows, heads, pages, counts.data(), wanted.data(), {1.0f, Group::mean, 1, 2},
                           width, selection.data(), threads);
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

// Boxes of spans, and decoding by them: the pages that are scored have the scores that they always have.
void test_spans(const KernelTable& kernels, Problem problem, const Softmax& softmax, int64_t size) {
    const Shape& s = problem.shape;
    problem.lay_out_in_spans(size);
    Layer layer(s, problem.segment_pages, 0, size);
    write_tokens(problem, layer);
    kernels.seal(layer.pages(), static_cast<int64_t>(problem.sealed_ids.size()), problem.sealed_ids.data(), nullptr, 1);
    std::vector<int64_t> ids, wanted;
    for (int64_t r = 0; r < s.rows(); ++r) {
        for (int64_t p = 0; p < s.sealed(r) / size * size; ++p)
            ids.push_back(problem.table[r * problem.table_width + p]);
        wanted.push_back(s.sealed(r) / 9);
    }
    ids.reserve(1);
    kernels.seal_spans(layer.pages(), static_cast<int64_t>(ids.size()) / size, ids.data(), 2);
    for (size_t i = 0; i < ids.size(); i += static_cast<size_t>(size))
        for (int64_t h = 0; h < s.kv_heads; ++h) {
            bool right = true;
            double step = 0;
            for (int64_t p = 0; p < size; ++p) step = std::max(step, s.int8_boxes ? layer.scale(h, ids[i + p]) : 0.0);
            for (int64_t d = 0; d < s.head_dim; ++d)
                for (const bool hi : {false, true}) {
                    double widest = hi ? -kInf : kInf;
                    for (int64_t p = 0; p < size; ++p) {
                        const double bound = layer.bound(h, ids[i + p], hi, d) * layer.scale(h, ids[i + p]);
                        widest = hi ? std::max(widest, bound) : std::min(widest, bound);
                    }
                    const double found = layer.span_bound(h, ids[i + size - 1], hi, d);
                    const double outside = hi ? found - widest : widest - found;
                    right = right && outside >= 0 && outside <= step * (1 - 1e-9);
                }
            CHECK(right);
        }
    for (const Group group : {Group::mean, Group::per_head}) {
        const Scoring scoring{0.5f, group, 0, 0};
        const std::vector<float> every = estimate(kernels, problem, layer, scoring, 1);
        const std::vector<float> some = estimate(kernels, problem, layer, scoring, 2, wanted.data());
        const int64_t lists = group == Group::per_head ? s.heads() : s.kv_heads;
        for (int64_t i = 0; i < s.rows() * lists; ++i) {
            const int64_t row = i / lists, spans = s.sealed(row) / size;
            const int64_t kept = std::min(spans, (4 * wanted[row] + size - 1) / size);
            int64_t scored = 0;
            bool right = true;
            for (int64_t p = 0; p < problem.table_width; ++p) {
                const float score = some[i * problem.table_width + p];
                scored += score > -kInf;
                right = right && (score == -kInf || score == every[i * problem.table_width + p]);
            }
            CHECK(right && scored == kept * size + s.sealed(row) % size);
        }
    }
    for (const Group group : {Group::mean, Group::softmax_mean, Group::per_head})
        test_decode(kernels, problem, layer, softmax, {0.5f, group, 0, 1}, 9);
}

// Where whole numbers of 32 bits would overflow: as many channels, and tokens a page, as their sums hold, and more. All
// products have one sign and are as large as they can be.
void test_limits() {
    const auto ones = [](const Shape& s, std::vector<char>& numbers) {
        for (size_t i = 0; i < numbers.size(); i += size_of(s.dtype)) write_number(s.dtype, 1, numbers.data() + i);
    };
    for (const int64_t dim : {4096, 4128, 16384}) {
        Problem problem({1, 1, dim, 2, DType::f32, true, {6}}, 1);
        ones(problem.shape, problem.keys);
        ones(problem.shape, problem.q);
        std::fill(problem.q_numbers.begin(), problem.q_numbers.end(), 1.0);
        for (const KernelTable* const* table = available_kernels(); *table; ++table) {
            tally().where = std::string((*table)->name) + " limits " + problem.shape.text();
            Layer layer(problem.shape, problem.segment_pages);
            write_tokens(problem, layer);
            test_seal(**table, problem, layer, 1);
            const Scoring scoring{1.0f, Group::mean, 0, 0};
            check_scores(problem, layer, scoring, estimate(**table, problem, layer, scoring, 1));
        }
    }
    for (const int64_t page_size : {65536, 65540, 70000}) {
        Problem problem({1, 1, 64, page_size, DType::bf16, true, {page_size + 1}}, 1);
        // The same weight for every token, and codes of 255 but for one channel.
        std::fill(problem.keys.begin(), problem.keys.end(), 0);
        std::fill(problem.key_of[0].begin(), problem.key_of[0].end(), 0.0);
        ones(problem.shape, problem.values);
        for (size_t t = 0; t < problem.values.size(); t += static_cast<size_t>(problem.shape.row_bytes(true)))
            write_number(problem.shape.dtype, 0, problem.values.data() + t);
        for (size_t i = 0; i < problem.value_of[0].size(); ++i) problem.value_of[0][i] = i % 64 ? 1.0 : 0.0;
        const Softmax softmax{problem.scale, 0, nullptr};
        for (const KernelTable* const* table = available_kernels(); *table; ++table) {
            tally().where = std::string((*table)->name) + " limits " + problem.shape.text() + " coded";
            const Coded coded(**table, problem, 1);
            test_attend(**table, coded.problem, coded.layer, nullptr, softmax,
                        expected_output(coded.problem, nullptr, softmax));
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
        test_spans(kernels, problem, plain, 2);
        test_spans(kernels, problem, capped, 5);
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
        int64_t value_dim = 0;  // 0: as the keys
    } shapes[] = {
        {1, 3, 33, 16, {1610}},                     // few lists, several parts
        {1, 1, 64, 16, {1100, 16}},                 // few lists
        {3, 1, 8, 1, {9, 1, 2, 31, 17}},            // many lists
        {2, 4, 80, 17, {140, 18, 17, 53, 35, 34}},  // many lists, odd pages
        {2, 2, 128, 32, {200, 33, 32, 64, 65}},
        {1, 7, 40, 3, {100, 2, 4, 3}},
        {1, 8, 96, 64, {300, 64, 700}},
        {1, 16, 256, 8, {77, 8, 40}},
        {2, 2, 192, 16, {150, 33, 16}, 128},  // values narrower than keys
        {2, 3, 24, 16, {90, 7}, 16},
        {1, 2, 40, 3, {50, 4}, 9},
        {1, 5, 64, 4, {101, 18}, 192},  // and wider
        {2, 1, 16, 8, {70, 9}, 33},
    };
    for (const auto& s : shapes)
        for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
            for (const bool int8_boxes : {true, false})
                test_shape({s.kv_heads, s.group, s.head_dim, s.page_size, dtype, int8_boxes, s.lengths, s.value_dim},
                           seed++);
    for (const KernelTable* const* table = available_kernels(); *table; ++table) test_select(**table, seed++);
    test_limits();
    test_linear_shapes();
    test_failures();
}

}  // namespace
}  // namespace questkv::tests

// Where there is no memory malloc says so, under AddressSanitizer too.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }

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
