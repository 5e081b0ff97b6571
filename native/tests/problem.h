// Random rows over pages scattered through segments. Every tensor is a block of memory of its own without a byte to
// spare, so that AddressSanitizer sees a read past its end; what no token was written to is NaN.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "questkv/kernels.h"

namespace questkv::tests {

constexpr double kInf = std::numeric_limits<double>::infinity();

// ------------------------------------------------------------------------------------------------ numbers in memory

inline double read_number(DType type, const char* p) {
    if (type == DType::i8) return static_cast<int8_t>(*p);
    if (type == DType::f32) {
        float x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }
    uint16_t bits;
    std::memcpy(&bits, p, sizeof bits);
    if (type == DType::bf16) return std::bit_cast<float>(uint32_t{bits} << 16);
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double size = exponent == 31  ? (mantissa ? std::nan("") : kInf)
                        : exponent == 0 ? std::ldexp(mantissa, -24)
                                        : std::ldexp(1024 + mantissa, exponent - 25);
    return bits >> 15 ? -size : size;
}

// To nearest, ties to even.
inline void write_number(DType type, double x, char* p) {
    const float narrow = static_cast<float>(x);
    if (type == DType::f32) {
        std::memcpy(p, &narrow, sizeof narrow);
        return;
    }
    uint16_t bits;
    if (type == DType::bf16) {
        uint32_t wide = std::bit_cast<uint32_t>(narrow);
        if (!std::isnan(x)) wide += 0x7fff + (wide >> 16 & 1);
        bits = static_cast<uint16_t>(wide >> 16);
    } else {
        const double size = std::fabs(x);
        if (std::isnan(x)) {
            bits = 0x7e00;
        } else if (size >= 65520) {
            bits = 0x7c00;
        } else {
            const int exponent = size == 0 ? -14 : std::max(std::ilogb(size), -14);
            const int mantissa = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
            bits = static_cast<uint16_t>(((exponent + 14) << 10) + mantissa);
        }
        if (std::signbit(x)) bits |= 0x8000;
    }
    std::memcpy(p, &bits, sizeof bits);
}

// Relative spacing of the type, and its smallest step.
inline double epsilon(DType type) { return type == DType::f32 ? 0x1p-23 : type == DType::bf16 ? 0x1p-7 : 0x1p-10; }
inline double smallest(DType type) { return type == DType::f16 ? 0x1p-24 : 0x1p-120; }

// ---------------------------------------------------------------------------------------------------------- a layer

struct Shape {
    int64_t kv_heads, group, head_dim, page_size;
    DType dtype;
    bool int8_boxes;
    std::vector<int64_t> lengths;  // of every row
    int64_t value_dim = 0;         // 0: as the keys

    int64_t heads() const { return kv_heads * group; }
    int64_t dim(bool values) const { return values && value_dim ? value_dim : head_dim; }
    int64_t row_bytes(bool values) const { return dim(values) * size_of(dtype); }
    int64_t pages_of(int64_t row) const { return (lengths[row] + page_size - 1) / page_size; }
    int64_t sealed(int64_t row) const { return (lengths[row] - 1) / page_size; }
    int64_t rows() const { return static_cast<int64_t>(lengths.size()); }

    std::string text() const {
        static const char* const types[] = {"f32", "bf16", "f16"};
        return "Hkv=" + std::to_string(kv_heads) + " G=" + std::to_string(group) + " D=" + std::to_string(head_dim) +
               " Dv=" + std::to_string(dim(true)) + " S=" + std::to_string(page_size) + " R=" + std::to_string(rows()) +
               " L=" + std::to_string(lengths[0]) + " " + types[static_cast<int>(dtype)] +
               (int8_boxes ? " int8 boxes" : " model boxes");
    }
};

// Pages of one layer in several segments, behind which there may be one of coded pages. Spans have boxes where
// `span_pages` isn't 0; plain segments are whole spans then.
class Layer {
  public:
    Layer(const Shape& shape, const std::vector<int64_t>& segment_pages, int64_t coded_pages = 0,
          int64_t span_pages = 0)
        : shape_(shape) {
        int64_t start = 0;
        store_.reserve(segment_pages.size() + 1);
        for (const int64_t n : segment_pages) {
            const int64_t rows = shape.kv_heads * n * shape.page_size;
            const int64_t spans = span_pages ? n / span_pages : 0;
            const size_t bounds = static_cast<size_t>(shape.kv_heads * (n + spans) * 2 * shape.head_dim);
            Store& store = store_.emplace_back();
            store.keys = poison(shape.dtype, static_cast<size_t>(rows * shape.dim(false)));
            store.values = poison(shape.dtype, static_cast<size_t>(rows * shape.dim(true)));
            store.boxes = shape.int8_boxes ? std::vector<char>(bounds, 99) : poison(shape.dtype, bounds);
            if (shape.int8_boxes) store.scales.assign(static_cast<size_t>(shape.kv_heads * (n + spans)), std::nanf(""));
            segments_.push_back({store.keys.data(), store.values.data(), store.boxes.data(),
                                 shape.int8_boxes ? store.scales.data() : nullptr, nullptr, start, n, spans});
            start += n;
        }
        if (coded_pages) {
            const size_t rows = static_cast<size_t>(shape.kv_heads * coded_pages * shape.page_size);
            Store& store = store_.emplace_back();
            store.keys.assign(rows * static_cast<size_t>(shape.dim(false)), 99);
            store.values.assign(rows * static_cast<size_t>(shape.dim(true)), 99);
            store.boxes.assign(static_cast<size_t>(shape.kv_heads * coded_pages * 2 * shape.head_dim), 99);
            store.scales.assign(static_cast<size_t>(shape.kv_heads * coded_pages), std::nanf(""));
            store.value_scales.assign(2 * rows, std::nanf(""));
            segments_.push_back({store.keys.data(), store.values.data(), store.boxes.data(), store.scales.data(),
                                 store.value_scales.data(), start, coded_pages, 0});
        }
        pages_ = {segments_.data(), static_cast<int64_t>(segments_.size()),
                  shape.kv_heads,   shape.page_size,
                  shape.dim(false), shape.dim(true),
                  shape.dtype,      coded_pages > 0,
                  span_pages};
    }
    Layer(const Layer&) = delete;

    const Pages& pages() const { return pages_; }

    // Number of a page's key (values: of its value) in a slot and channel.
    char* token(bool values, int64_t head, int64_t page, int64_t slot) {
        const Segment& s = segment(page);
        const int64_t at = (head * s.pages + page - s.start) * shape_.page_size + slot;
        return (values ? s.values : s.keys) + at * shape_.row_bytes(values);
    }

    // A coded page's code of a key or value.
    int code(bool values, int64_t head, int64_t page, int64_t slot, int64_t d) const {
        const Segment& s = segment(page);
        const int64_t at = ((head * s.pages + page - s.start) * shape_.page_size + slot) * shape_.dim(values) + d;
        return static_cast<unsigned char>((values ? s.values : s.keys)[at]);
    }

    // Step and offset of a coded page's values in one slot.
    const float* value_scale(int64_t head, int64_t page, int64_t slot) const {
        const Segment& s = segment(page);
        return s.value_scales + 2 * ((head * s.pages + page - s.start) * shape_.page_size + slot);
    }

    double bound(int64_t head, int64_t page, bool hi, int64_t d) const {
        const Segment& s = segment(page);
        return bound_at(s, s.box_of_page(head, page), hi, d);
    }

    double scale(int64_t head, int64_t page) const {
        const Segment& s = segment(page);
        return s.scales ? s.scales[s.box_of_page(head, page)] : 1.0;
    }

    // Of the span that ends with a page, times its scale.
    double span_bound(int64_t head, int64_t last, bool hi, int64_t d) const {
        const Segment& s = segment(last);
        const int64_t at = s.box_of_span(head, last, pages_.span_pages);
        return bound_at(s, at, hi, d) * (s.scales ? s.scales[at] : 1.0);
    }

    bool same_tokens(const Layer& other) const {
        for (size_t i = 0; i < store_.size(); ++i)
            if (store_[i].keys != other.store_[i].keys || store_[i].values != other.store_[i].values) return false;
        return true;
    }

  private:
    struct Store {
        std::vector<char> keys, values, boxes;
        std::vector<float> scales, value_scales;
    };

    static std::vector<char> poison(DType type, size_t numbers) {
        std::vector<char> out(numbers * static_cast<size_t>(size_of(type)));
        for (size_t i = 0; i < numbers; ++i) write_number(type, std::nan(""), out.data() + i * size_of(type));
        return out;
    }

    double bound_at(const Segment& s, int64_t box, bool hi, int64_t d) const {
        const DType type = shape_.int8_boxes ? DType::i8 : shape_.dtype;
        return read_number(type, s.boxes + ((box * 2 + hi) * shape_.head_dim + d) * size_of(type));
    }

    const Segment& segment(int64_t page) const {
        size_t i = 0;
        while (page >= segments_[i].start + segments_[i].pages) ++i;
        return segments_[i];
    }

    Shape shape_;
    std::vector<Store> store_;
    std::vector<Segment> segments_;
    Pages pages_{};
};

// --------------------------------------------------------------------------------------------------------- the rows

// Rows of tokens and queries, as they lie in memory and as doubles.
struct Problem {
    Shape shape;
    std::vector<int64_t> segment_pages, table, lengths, slots, sealed_ids;
    int64_t table_width = 0;
    std::vector<char> q, keys, values;                  // [R, Hq, D], [tokens, Hkv, D or Dv]
    std::vector<double> q_numbers;                      // [R, Hq, D]
    std::vector<std::vector<double>> key_of, value_of;  // per row [Hkv, L, D or Dv]
    float scale = 0;
    // Of coded pages: the largest scale of a box and step of a value, 0 where there are none.
    double box_scale = 0, value_step = 0;

    Problem(const Shape& s, unsigned seed) : shape(s), lengths(s.lengths), random_(seed) {
        int64_t pages = 3;  // free ones
        for (int64_t r = 0; r < s.rows(); ++r) {
            pages += s.pages_of(r);
            table_width = std::max(table_width, s.pages_of(r));
        }
        std::vector<int64_t> physical(static_cast<size_t>(pages));
        for (int64_t i = 0; i < pages; ++i) physical[i] = i;
        std::shuffle(physical.begin(), physical.end(), random_);
        segment_pages = {1, pages / 3, pages - 1 - pages / 3};
        table.assign(static_cast<size_t>(s.rows() * table_width), -1);
        size_t next = 0;
        for (int64_t r = 0; r < s.rows(); ++r) {
            for (int64_t p = 0; p < s.pages_of(r); ++p) table[r * table_width + p] = physical[next++];
            for (int64_t p = 0; p < s.sealed(r); ++p) sealed_ids.push_back(table[r * table_width + p]);
            fill_row(r);
        }
        q = numbers(s.rows() * s.heads() * s.head_dim, q_numbers);
        scale = 1 / std::sqrt(static_cast<float>(s.head_dim));
    }

    // Put the pages in order into one segment, every row's from a whole span on.
    void lay_out_in_spans(int64_t span_pages) {
        int64_t next = 0;
        slots.clear();
        sealed_ids.clear();
        for (int64_t r = 0; r < shape.rows(); ++r) {
            for (int64_t p = 0; p < shape.pages_of(r); ++p) table[r * table_width + p] = next + p;
            for (int64_t p = 0; p < shape.sealed(r); ++p) sealed_ids.push_back(next + p);
            for (int64_t t = 0; t < lengths[r]; ++t) slots.push_back(next * shape.page_size + t);
            next += (shape.pages_of(r) + span_pages - 1) / span_pages * span_pages;
        }
        segment_pages = {next};
    }

    // The token's key (or value) in a row.
    const double* token(bool value, int64_t row, int64_t head, int64_t t) const {
        return (value ? value_of : key_of)[row].data() + (head * lengths[row] + t) * shape.dim(value);
    }

    Rows rows(const int64_t* wanted = nullptr) const {
        return {shape.rows(), shape.heads(), table_width, q.data(), table.data(), lengths.data(), wanted};
    }

  private:
    void fill_row(int64_t r) {
        const int64_t length = lengths[r];
        key_of.emplace_back(static_cast<size_t>(shape.kv_heads * length * shape.dim(false)));
        value_of.emplace_back(static_cast<size_t>(shape.kv_heads * length * shape.dim(true)));
        for (int64_t t = 0; t < length; ++t) {
            slots.push_back(table[r * table_width + t / shape.page_size] * shape.page_size + t % shape.page_size);
            for (const bool value : {false, true}) {
                const int64_t dim = shape.dim(value);
                std::vector<double> token;
                const std::vector<char> raw = numbers(shape.kv_heads * dim, token);
                std::vector<char>& all = value ? values : keys;
                all.insert(all.end(), raw.begin(), raw.end());
                for (int64_t h = 0; h < shape.kv_heads; ++h)
                    std::copy_n(token.data() + h * dim, dim,
                                (value ? value_of : key_of)[r].data() + (h * length + t) * dim);
            }
        }
        keys.shrink_to_fit();
        values.shrink_to_fit();
    }

    // n random numbers in the layer's type; `wide` receives what was stored.
    std::vector<char> numbers(int64_t n, std::vector<double>& wide) {
        std::normal_distribution<double> normal;
        std::vector<char> out(static_cast<size_t>(n * size_of(shape.dtype)));
        for (int64_t i = 0; i < n; ++i) {
            char* at = out.data() + i * size_of(shape.dtype);
            write_number(shape.dtype, normal(random_), at);
            wide.push_back(read_number(shape.dtype, at));
        }
        return out;
    }

    std::mt19937 random_;
};

}  // namespace questkv::tests
