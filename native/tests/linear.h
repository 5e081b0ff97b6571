// linear against double loops, row by row and on every number of threads the same.
#pragma once

#include "check.h"
#include "problem.h"

namespace questkv::tests {

inline void test_linear(const KernelTable& kernels, DType dtype, int64_t rows, int64_t outputs, int64_t channels,
                        unsigned seed, bool coded) {
    tally().where = std::string(kernels.name) + " linear " + std::to_string(static_cast<int>(dtype)) + " " +
                    std::to_string(rows) + "x" + std::to_string(outputs) + "x" + std::to_string(channels);
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    const auto draw = [&](int64_t count) {
        std::vector<char> numbers(static_cast<size_t>(count * size_of(dtype)));
        for (int64_t i = 0; i < count; ++i) write_number(dtype, normal(random), numbers.data() + i * size_of(dtype));
        return numbers;
    };
    const auto x = draw(rows * channels), bias = draw(outputs), steps = draw(outputs);
    std::vector<char> weight = draw(outputs * channels);
    if (coded) {
        std::uniform_int_distribution<int> code(-128, 127);
        weight.resize(static_cast<size_t>(outputs * channels));
        for (char& of : weight) of = static_cast<char>(code(random));
    }
    const char* scales = coded ? steps.data() : nullptr;
    const auto at = [&](const std::vector<char>& of, int64_t i) {
        return read_number(dtype, of.data() + i * size_of(dtype));
    };
    std::vector<char> first;
    for (const int threads : {1, 2, 3}) {
        std::vector<char> out(static_cast<size_t>(rows * outputs * size_of(dtype)));
        kernels.linear(dtype, rows, outputs, channels, x.data(), weight.data(), scales, bias.data(), out.data(),
                       threads);
        if (first.empty()) first = out;
        CHECK(out == first);
    }
    for (int64_t r = 0; r < rows; ++r) {
        std::vector<char> alone(static_cast<size_t>(outputs * size_of(dtype)));
        kernels.linear(dtype, 1, outputs, channels, x.data() + r * channels * size_of(dtype), weight.data(), scales,
                       bias.data(), alone.data(), 1);
        CHECK(!std::memcmp(alone.data(), first.data() + r * outputs * size_of(dtype), alone.size()));
        for (int64_t n = 0; n < outputs; ++n) {
            double sum = at(bias, n), size = std::fabs(sum);
            for (int64_t c = 0; c < channels; ++c) {
                const int64_t place = n * channels + c;
                const double w = coded ? at(steps, n) * static_cast<signed char>(weight[static_cast<size_t>(place)])
                                       : at(weight, place);
                const double product = at(x, r * channels + c) * w;
                sum += product;
                size += std::fabs(product);
            }
            // Float32 sums in any order, then one rounding.
            const double eps = dtype == DType::f32 ? 0x1p-23 : dtype == DType::bf16 ? 0x1p-8 : 0x1p-10;
            const double allowed = size * (2 * static_cast<double>(channels + 2) * 0x1p-23 + eps);
            CHECK(std::fabs(at(first, r * outputs + n) - sum) <= allowed);
        }
    }
}

inline void test_linear_shapes() {
    unsigned seed = 100;
    for (const KernelTable* const* table = available_kernels(); *table; ++table)
        for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
            for (const bool coded : {false, true}) {
                test_linear(**table, dtype, 1, 1, 1, seed++, coded);
                test_linear(**table, dtype, 5, 33, 37, seed++, coded);
                test_linear(**table, dtype, 3, 600, 96, seed++, coded);
                test_linear(**table, dtype, 8, 16, 130, seed++, coded);
            }
}

}  // namespace questkv::tests
