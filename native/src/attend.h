// Attention of items over their lists of pages, part by part.
#pragma once

#include "codes.h"
#include "plain.h"

namespace questkv::QUESTKV_ISA_NAME {

inline int64_t parts_of(const Pages& pages, const List& list) {
    const int64_t a_part = pages_a_part(pages, list);
    // The open page is never coded: where others are, it is a part of its own.
    if (pages.coded) return (list.selected + a_part - 1) / a_part + 1;
    return (list.selected + 1 + a_part - 1) / a_part;
}

template <class T>
inline void attend_part(const Pages& pages, const Rows& rows, const Item& item, const Queries<T>& q, const List& list,
                        int64_t part, const Softmax& softmax, const Partial& out, Workspace& w) {
    if (!pages.coded) attend_plain<T>(pages, rows, item, q, list, part, softmax, out, w);
    else if (part < parts_of(pages, list) - 1) attend_sealed<T>(pages, rows, item, list, part, softmax, out, w);
    else attend_plain<T>(pages, rows, item, q, {nullptr, 0, list.in_open, list.open}, 0, softmax, out, w);
}

template <class T>
inline void write_out(const Pages& pages, const Rows& rows, const Item& item, const Partial& sum,
                      const Softmax& softmax, char* out) {
    const int64_t dim = pages.value_dim, width = padded(dim);
    for (int64_t h = 0; h < item.heads; ++h) {
        float share = 1.0f;
        float total = sum.l[h];
        if (softmax.sinks) {
            const float sink = softmax.sinks[item.first_head + h];
            const float top = sink > sum.m[h] ? sink : sum.m[h];
            share = std::exp(sum.m[h] - top);
            total = total * share + std::exp(sink - top);
        }
        T* row = reinterpret_cast<T*>(out) + (item.row * rows.heads + item.first_head + h) * dim;
        for (int64_t c = 0; c < width; c += 2 * W)
            for (int b = 0; b < 2; ++b)
                for (int i = 0; i < W; ++i) {
                    const int64_t d = c + channel<T>(i, b);
                    if (d < dim) from_float(sum.acc[h * width + c + b * W + i] * share / total, row + d);
                }
    }
}

template <class T>
inline void attend_item(const Pages& pages, const Rows& rows, const Item& item, const List& list,
                        const Softmax& softmax, char* out) {
    Workspace& w = workspace();
    const int64_t width = padded(pages.value_dim), size = partial_size(item.heads, width);
    const Queries<T> q = arrange_queries<T>(pages, rows, item, w);
    float* buffer = w.partial.of(2 * size);
    const Partial sum = partial_at(buffer, item.heads), part = partial_at(buffer + size, item.heads);
    attend_part<T>(pages, rows, item, q, list, 0, softmax, sum, w);
    for (int64_t p = 1; p < parts_of(pages, list); ++p) {
        attend_part<T>(pages, rows, item, q, list, p, softmax, part, w);
        merge(sum, part, item.heads, width);
    }
    write_out<T>(pages, rows, item, sum, softmax, out);
}

// Attend items whose lists are known. Few items: their parts are spread over the threads and merged afterwards.
template <class T, class ListOf>
inline void attend_items(const Pages& pages, const Rows& rows, int64_t lists, const ListOf& list_of,
                         const Softmax& softmax, char* out, int threads) {
    const int64_t items = rows.count * lists;
    if (threads <= 1 || items >= 4 * threads) {
        run_units(threads, items, [&](int64_t i) {
            const Item item = item_of(i, pages, rows, lists);
            attend_item<T>(pages, rows, item, list_of(i), softmax, out);
        });
        return;
    }
    // Parts of item i are the units from start[i] on; owner[unit] is the item.
    static thread_local Buffer<int64_t> starts, owners;
    int64_t* start = starts.of(items + 1);
    start[0] = 0;
    for (int64_t i = 0; i < items; ++i) start[i + 1] = start[i] + parts_of(pages, list_of(i));
    int64_t* owner = owners.of(start[items]);
    for (int64_t i = 0; i < items; ++i) fill(owner + start[i], owner + start[i + 1], i);
    const int64_t heads = item_of(0, pages, rows, lists).heads, width = padded(pages.value_dim);
    const int64_t size = partial_size(heads, width);
    static thread_local Buffer<float> partials;
    float* buffer = partials.of(start[items] * size);
    run_units(threads, start[items], [&](int64_t unit) {
        const int64_t i = owner[unit];
        const Item item = item_of(i, pages, rows, lists);
        Workspace& w = workspace();
        const Queries<T> q = arrange_queries<T>(pages, rows, item, w);
        attend_part<T>(pages, rows, item, q, list_of(i), unit - start[i], softmax,
                       partial_at(buffer + unit * size, heads), w);
    });
    for (int64_t i = 0; i < items; ++i) {
        const Partial sum = partial_at(buffer + start[i] * size, heads);
        for (int64_t p = start[i] + 1; p < start[i + 1]; ++p)
            merge(sum, partial_at(buffer + p * size, heads), heads, width);
        write_out<T>(pages, rows, item_of(i, pages, rows, lists), sum, softmax, out);
    }
}

inline List everything(const Pages& pages, const Rows& rows, int64_t row) {
    const int64_t sealed = sealed_pages(pages, rows, row);
    return {nullptr, sealed, rows.lengths[row] - sealed * pages.page_size, sealed};
}

}  // namespace questkv::QUESTKV_ISA_NAME
