// Every operator, compiled once per instruction set: QUESTKV_ISA_NAME and the flags differ, the source does not.
#include "questkv/kernels.h"

#include "attend.h"
#include "estimate.h"
#include "linear.h"
#include "seal.h"
#include "select.h"

namespace questkv::QUESTKV_ISA_NAME {
namespace {

template <class F>
void with_dtype(DType dtype, F&& f) {
    if (dtype == DType::f32) f.template operator()<float>();
    else if (dtype == DType::bf16) f.template operator()<bf16>();
    else f.template operator()<f16>();
}

void append(const Pages& pages, int64_t n, const int64_t* slots, const char* keys, const char* values, int threads) {
    const int64_t key_bytes = pages.key_bytes(), value_bytes = pages.value_bytes();
    const int64_t block = 64;
    run_units(n * pages.kv_heads * (key_bytes + value_bytes) < 1 << 19 ? 1 : threads, (n + block - 1) / block,
              [&](int64_t unit) {
                  for (int64_t t = unit * block; t < least(n, (unit + 1) * block); ++t) {
                      const int64_t page = slots[t] / pages.page_size, slot = slots[t] % pages.page_size;
                      const Segment& segment = pages.segment_of(page);
                      for (int64_t h = 0; h < pages.kv_heads; ++h) {
                          const int64_t to = (h * segment.pages + page - segment.start) * pages.page_size + slot;
                          const int64_t from = t * pages.kv_heads + h;
                          std::memcpy(segment.keys + to * key_bytes, keys + from * key_bytes,
                                      static_cast<size_t>(key_bytes));
                          std::memcpy(segment.values + to * value_bytes, values + from * value_bytes,
                                      static_cast<size_t>(value_bytes));
                      }
                  }
              });
}

void seal(const Pages& pages, int64_t n, const int64_t* page_ids, const int64_t* into, int threads) {
    with_dtype(pages.dtype, [&]<class T>() {
        run_units(n * pages.kv_heads < 64 ? 1 : threads, n, [&](int64_t i) {
            Workspace& w = workspace();
            float* lo = w.lo.of(pages.head_dim);
            float* hi = w.hi.of(pages.head_dim);
            const int64_t target = into ? into[i] : page_ids[i];
            const Segment &from = pages.segment_of(page_ids[i]), &to = pages.segment_of(target);
            for (int64_t h = 0; h < pages.kv_heads; ++h) {
                const int64_t source = (h * from.pages + page_ids[i] - from.start) * pages.page_size;
                const int64_t at = (h * to.pages + target - to.start) * pages.page_size;
                const int64_t of_box = to.box_of_page(h, target);
                const T* keys = reinterpret_cast<const T*>(from.keys + source * pages.key_bytes());
                char* box = to.boxes + of_box * pages.box_bytes();
                float* scale = to.scales ? to.scales + of_box : nullptr;
                seal_page(keys, pages.page_size, pages.head_dim, lo, hi, box, scale);
                if (!to.coded()) continue;
                code_keys(keys, pages.page_size, pages.head_dim, reinterpret_cast<const int8_t*>(box), *scale,
                          reinterpret_cast<uint8_t*>(to.keys + at * pages.head_dim));
                code_values(reinterpret_cast<const T*>(from.values + source * pages.value_bytes()), pages.page_size,
                            pages.value_dim, to.value_scales + at * 2,
                            reinterpret_cast<uint8_t*>(to.values + at * pages.value_dim));
            }
        });
    });
}

void seal_spans(const Pages& pages, int64_t n, const int64_t* page_ids, int threads) {
    with_dtype(pages.dtype, [&]<class T>() {
        run_units(n * pages.kv_heads < 64 ? 1 : threads, n, [&](int64_t i) {
            const int64_t* of_span = page_ids + i * pages.span_pages;
            const int64_t last = of_span[pages.span_pages - 1];
            const Segment& to = pages.segment_of(last);
            for (int64_t h = 0; h < pages.kv_heads; ++h) {
                const int64_t at = to.box_of_span(h, last, pages.span_pages);
                char* box = to.boxes + at * pages.box_bytes();
                const auto page = [&](int64_t p) {
                    const Box source = box_of_page(pages, h, of_span[p]);
                    return BoxView{source.segment.boxes + source.at * pages.box_bytes(),
                                   source.segment.scales ? source.segment.scales[source.at] : 1.0f};
                };
                if (to.scales) {
                    join_boxes(pages.span_pages, pages.head_dim, page, reinterpret_cast<int8_t*>(box), to.scales + at);
                } else {
                    join_boxes(pages.span_pages, pages.head_dim, page, reinterpret_cast<T*>(box));
                }
            }
        });
    });
}

void estimate(const Pages& pages, const Rows& rows, float scale, const Scoring& scoring, float* scores, int threads) {
    const int64_t lists = scoring.group == Group::per_head ? rows.heads : pages.kv_heads;
    with_dtype(pages.dtype, [&]<class T>() {
        run_units(threads, rows.count * lists, [&](int64_t i) {
            const Item item = item_of(i, pages, rows, lists);
            const int64_t sealed = sealed_pages(pages, rows, item.row);
            float* row = scores + i * rows.table_width;
            if (rows.num_selected && by_spans(pages, sealed, rows.num_selected[item.row])) {
                Workspace& w = workspace();
                int64_t* candidates = w.candidates.of(sealed);
                float* found = w.page_scores.of(sealed);
                const int64_t n = estimate_spans<T>(pages, rows, item, scale, scoring, sealed,
                                                    rows.num_selected[item.row], candidates, found);
                fill(row, row + rows.table_width, -kInfinity);
                for (int64_t c = 0; c < n; ++c) row[candidates[c]] = found[c];
                return;
            }
            estimate_item<T>(pages, rows, item, scale, scoring, sealed, row);
            fill(row + sealed, row + rows.table_width, -kInfinity);
        });
    });
}

void select(const float* scores, int64_t rows, int64_t heads, int64_t pages, const int64_t* num_pages,
            const int64_t* num_selected, const Scoring& scoring, int64_t width, int64_t* selection, int threads) {
    run_units(threads, rows * heads, [&](int64_t i) {
        const int64_t row = i / heads;
        int64_t* list = selection + i * width;
        const int64_t chosen = select_pages(scores + i * pages, num_pages[row], num_selected[row], scoring.sink_pages,
                                            scoring.recent_pages, workspace().keys.of(pages + W), list);
        fill(list + chosen, list + width, int64_t{-1});
    });
}

void attend(const Pages& pages, const Rows& rows, const int64_t* selection, int64_t heads, int64_t width,
            const Softmax& softmax, char* out, int threads) {
    with_dtype(pages.dtype, [&]<class T>() {
        attend_items<T>(
            pages, rows, heads,
            [&](int64_t i) {
                List list = everything(pages, rows, i / heads);
                if (selection) {
                    list.pages = selection + i * width;
                    list.selected = 0;
                    while (list.selected < width && list.pages[list.selected] >= 0) ++list.selected;
                }
                return list;
            },
            softmax, out, threads);
    });
}

// Pages that a row's lists hold, those that several heads of a group share counted once, open pages included.
int64_t count_read(const Pages& pages, const Rows& rows, const List* lists, int64_t row, int64_t a_row) {
    const int64_t group = a_row / pages.kv_heads;
    int64_t read = 0;
    static thread_local Buffer<char> flags;
    for (int64_t head = 0; head < pages.kv_heads; ++head) {
        const List* first = lists + row * a_row + head * group;
        if (group == 1 || !first->pages) {
            read += first->selected + 1;
            continue;
        }
        const int64_t sealed = sealed_pages(pages, rows, row);
        char* seen = flags.of(sealed);
        fill(seen, seen + sealed, char{0});
        for (int64_t h = 0; h < group; ++h)
            for (int64_t e = 0; e < first[h].selected; ++e) {
                read += !seen[first[h].pages[e]];
                seen[first[h].pages[e]] = 1;
            }
        ++read;
    }
    return read;
}

void decode(const Pages& pages, const Rows& rows, const Softmax& softmax, const Scoring& scoring, char* out,
            int64_t* pages_read, int threads) {
    const int64_t lists = scoring.group == Group::per_head ? rows.heads : pages.kv_heads, items = rows.count * lists;
    const int64_t* num_selected = rows.num_selected;
    int64_t width = 0;
    for (int64_t r = 0; r < rows.count; ++r)
        if (num_selected[r] < sealed_pages(pages, rows, r)) width = most(width, num_selected[r]);
    static thread_local Buffer<int64_t> chosen;
    static thread_local Buffer<List> found;
    int64_t* selection = chosen.of(items * width);
    List* all = found.of(items);
    with_dtype(pages.dtype, [&]<class T>() {
        const bool fused = threads <= 1 || items >= 4 * threads;
        // One (row, KV head) after another: its scores and its list stay in the cache until they are used.
        run_units(threads, items, [&](int64_t i) {
            const Item item = item_of(i, pages, rows, lists);
            List list = everything(pages, rows, item.row);
            if (num_selected[item.row] < list.selected) {
                Workspace& w = workspace();
                const int64_t sealed = list.selected, wanted = num_selected[item.row];
                float* scores = w.page_scores.of(2 * sealed);
                int64_t* chosen_here = selection + i * width;
                list.pages = chosen_here;
                if (by_spans(pages, sealed, wanted)) {
                    int64_t* candidates = w.candidates.of(sealed);
                    const int64_t n = estimate_spans<T>(pages, rows, item, softmax.scale, scoring, sealed, wanted,
                                                        candidates, scores);
                    list.selected =
                        select_candidates(candidates, scores, n, sealed, wanted, scoring.sink_pages,
                                          scoring.recent_pages, w.keys.of(sealed + W), scores + sealed, chosen_here);
                } else {
                    estimate_item<T>(pages, rows, item, softmax.scale, scoring, sealed, scores);
                    list.selected = select_pages(scores, sealed, wanted, scoring.sink_pages, scoring.recent_pages,
                                                 w.keys.of(sealed + W), chosen_here);
                }
            }
            all[i] = list;
            if (fused) attend_item<T>(pages, rows, item, list, softmax, out);
        });
        if (!fused) attend_items<T>(pages, rows, lists, [&](int64_t i) { return all[i]; }, softmax, out, threads);
    });
    if (pages_read)
        for (int64_t r = 0; r < rows.count; ++r) pages_read[r] = count_read(pages, rows, all, r, lists);
}

void linear(DType dtype, int64_t rows, int64_t outputs, int64_t channels, const char* x, const char* weight,
            const char* scales, const char* bias, char* out, int threads) {
    with_dtype(dtype, [&]<class T>() {
        const auto run = [&]<class TWeight>() {
            linear_rows<TWeight>(rows, outputs, channels, reinterpret_cast<const T*>(x), weight,
                                 reinterpret_cast<const T*>(scales), reinterpret_cast<const T*>(bias),
                                 reinterpret_cast<T*>(out), threads);
        };
        if (scales) run.template operator()<int8_t>();
        else run.template operator()<T>();
    });
}

}  // namespace

extern const KernelTable table;
const KernelTable table = {QUESTKV_ISA_TEXT, append, seal, seal_spans, estimate, select, attend, decode, linear};

}  // namespace questkv::QUESTKV_ISA_NAME
