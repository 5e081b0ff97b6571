// Attention of an item over a part of its list that lies in plain pages.
#pragma once

#include <type_traits>

#include "parts.h"

namespace questkv::QUESTKV_ISA_NAME {

// Tokens of a part of a list: where each four of them lie.
struct Tokens {
    const char **keys, **values;
    int64_t count;
    bool in_order;  // most pages follow one another in memory
};

// The tokens of list entries [first, last). Where four tokens can be of two pages (S is no multiple of 4), they are
// copied to `copies`.
inline Tokens tokens_of(const Pages& pages, int64_t kv_head, const int64_t* table, const List& list, int64_t first,
                        int64_t last, const char** keys, const char** values, Buffer<char>& copies) {
    const int64_t key_bytes = pages.key_bytes(), value_bytes = pages.value_bytes();
    const bool copied = pages.page_size % 4 != 0;
    const int64_t room = ((last - first) * pages.page_size + 3) / 4 * 4;
    char* key_copy = copied ? copies.of(room * (key_bytes + value_bytes)) : nullptr;
    char* value_copy = copied ? key_copy + room * key_bytes : nullptr;
    int64_t n = 0, followers = 0;
    const char* expected = nullptr;
    for (int64_t e = first; e < last; ++e) {
        const bool open = e == list.selected;
        const int64_t page = table[open ? list.open : list.pages ? list.pages[e] : e];
        const Segment& segment = pages.segment_of(page);
        const int64_t slot = (kv_head * segment.pages + page - segment.start) * pages.page_size;
        const int64_t tokens = open ? list.in_open : pages.page_size;
        const char *key = segment.keys + slot * key_bytes, *value = segment.values + slot * value_bytes;
        followers += key == expected;
        expected = key + pages.page_size * key_bytes;
        if (copied) {
            std::memcpy(key_copy + n * key_bytes, key, static_cast<size_t>(tokens * key_bytes));
            std::memcpy(value_copy + n * value_bytes, value, static_cast<size_t>(tokens * value_bytes));
        } else {
            for (int64_t t = 0; t < tokens; t += 4) {
                keys[(n + t) / 4] = key + t * key_bytes;
                values[(n + t) / 4] = value + t * value_bytes;
            }
        }
        n += tokens;
    }
    if (copied)
        for (int64_t t = 0; t < n; t += 4) {
            keys[t / 4] = key_copy + t * key_bytes;
            values[t / 4] = value_copy + t * value_bytes;
        }
    return {keys, values, n, copied || 4 * followers > 3 * (last - first)};
}

// What rows of T are multiplied with: bf16 where the machine multiplies those, else floats.
template <class T>
struct Factor {
    using type = float;
};
#if defined(__AVX512BF16__)
template <>
struct Factor<bf16> {
    using type = bf16;
};
#endif

// Queries of an item [heads, padded(D)], zeros at the end; floats are in T's pair order.
template <class T>
struct Queries {
    const typename Factor<T>::type* data;
    const typename Factor<T>::type* of(int64_t head, int64_t width) const { return data + head * width; }
};

template <class T>
Queries<T> arrange_queries(const Pages& pages, const Rows& rows, const Item& item, Workspace& w) {
    const int64_t dim = pages.head_dim, width = padded(dim);
    const T* q = reinterpret_cast<const T*>(rows.q) + (item.row * rows.heads + item.first_head) * dim;
    if constexpr (std::is_same_v<typename Factor<T>::type, bf16>) {
        bf16* pairs = w.query16.of(item.heads * width);
        std::memset(pairs, 0, static_cast<size_t>(item.heads * width) * sizeof(bf16));
        for (int64_t h = 0; h < item.heads; ++h)
            std::memcpy(pairs + h * width, q + h * dim, static_cast<size_t>(dim) * sizeof(bf16));
        return {pairs};
    } else {
        float* floats = w.query.of(item.heads * width);
        float* plain = w.lo.of(dim);
        for (int64_t h = 0; h < item.heads; ++h) {
            for (int64_t d = 0; d < dim; ++d) plain[d] = to_float(q[h * dim + d]);
            arrange<T>(plain, dim, floats + h * width);
        }
        return {floats};
    }
}

template <class T>
inline void attend_plain(const Pages& pages, const Rows& rows, const Item& item, const Queries<T>& q, const List& list,
                         int64_t part, const Softmax& softmax, const Partial& out, Workspace& w) {
    const int64_t dim = pages.head_dim, width = padded(dim), a_part = pages_a_part(pages, list);
    const int64_t value_dim = pages.value_dim, value_width = padded(value_dim);
    const int64_t first = part * a_part, last = least(first + a_part, list.selected + 1);
    const int64_t* table = rows.page_table + item.row * rows.table_width;
    // Entries of the next part whose tokens are prefetched in this one.
    const int64_t soon = pages.page_size % 4 ? 0 : (kAhead + pages.page_size - 1) / pages.page_size;
    const int64_t end = least(last + soon, list.selected + 1);
    const int64_t room = ((end - first) * pages.page_size + W + kAhead) / 4 + 1;
    const Tokens next =
        tokens_of(pages, item.kv_head, table, list, last, end, w.next_keys.of(room), w.next_values.of(room), w.copies);
    const Tokens tokens =
        tokens_of(pages, item.kv_head, table, list, first, last, w.key_rows.of(room), w.value_rows.of(room), w.copies);
    // What is read next is prefetched last: behind the keys the values, behind the values the next part's keys. Keys
    // are read W tokens at a time: the last ones are read again to fill up, and left out of the softmax.
    const int64_t n = tokens.count, quads = (n + 3) / 4, stride = (n + W - 1) / W * W, read = stride / 4;
    const char **keys = tokens.keys, **values = tokens.values;
    for (int64_t i = 0; i < (W + kAhead) / 4; ++i) {
        keys[quads + i] = quads + i < read ? keys[quads - 1] : values[least(quads + i - read, quads - 1)];
        values[quads + i] = 4 * i < next.count ? next.keys[i] : values[quads - 1];
    }
    const int64_t key_bytes = pages.key_bytes(), value_bytes = pages.value_bytes();
    float* scores = w.sums.of(item.heads * stride);
    const auto run = [&]<Ahead of_keys, Ahead of_values>() {
        constexpr int64_t near = (of_keys == Ahead::twice ? kAhead / 2 : W) / 4, far = kAhead / 4;
        for (int64_t i = 0; i < n; i += W) {
            const char* const* at = keys + i / 4;
            const FourRows rows{at, key_bytes}, next[2] = {{at + near, key_bytes}, {at + far, key_bytes}};
            with_heads(item.heads, [&]<int H>(int64_t h) {
                float* to = scores + h * stride + i;
                if (h) dot_rows<T, H, Ahead::nothing>(rows, next, dim, q.of(h, width), to, stride);
                else dot_rows<T, H, of_keys>(rows, next, dim, q.of(h, width), to, stride);
            });
        }
        for (int64_t h = 0; h < item.heads; ++h) softmax_part(scores + h * stride, n, softmax, out.m + h, out.l + h);
        fill(out.acc, out.acc + item.heads * value_width, 0.0f);
        for (int64_t i = 0; i < n; i += W) {
            const char* const* at = values + i / 4;
            const FourRows rows{at, value_bytes}, next[2] = {{at + near, value_bytes}, {at + far, value_bytes}};
            const int count = static_cast<int>(least(W, n - i));
            with_heads(item.heads, [&]<int H>(int64_t h) {
                const float* weights = scores + h * stride + i;
                float* to = out.acc + h * value_width;
                if (h) add_rows<T, H, Ahead::nothing>(rows, next, count, value_dim, weights, stride, to);
                else add_rows<T, H, of_values>(rows, next, count, value_dim, weights, stride, to);
            });
        }
    };
    // Rows that more heads share are read too slowly for the hardware to guess the next.
    if (tokens.in_order && item.heads <= 2) run.template operator()<Ahead::once, Ahead::nothing>();
    else run.template operator()<Ahead::twice, Ahead::twice>();
}

}  // namespace questkv::QUESTKV_ISA_NAME
