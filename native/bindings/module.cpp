// The Python module: tensors come in by DLPack, the GIL is released while the core works. Shapes and dtypes have been
// checked by questkv.kernels; here only what would be a wild pointer is. Tensors that are written are never converted:
// the result would be in a copy that nobody sees.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "questkv/kernels.h"
#include "questkv/threads.h"

namespace nb = nanobind;
using namespace questkv;

namespace {

using Tensor = nb::ndarray<nb::device::cpu, nb::c_contig>;
using Indices = nb::ndarray<int64_t, nb::device::cpu, nb::c_contig>;
using Floats = nb::ndarray<float, nb::device::cpu, nb::c_contig>;

// The structs of questkv.kernels. They hold their tensors, so that these outlive them.
struct BoundRows {
    Indices page_table, lengths;          // [R, P], [R]
    std::optional<Indices> num_selected;  // [R]

    Rows with(const Tensor& q) const {
        return {static_cast<int64_t>(q.shape(0)),
                static_cast<int64_t>(q.shape(1)),
                static_cast<int64_t>(page_table.shape(1)),
                static_cast<const char*>(q.data()),
                page_table.data(),
                lengths.data(),
                num_selected ? num_selected->data() : nullptr};
    }
};

struct BoundSoftmax {
    float scale, softcap;
    std::optional<Floats> sinks;  // [Hq]

    Softmax view() const { return {scale, softcap, sinks ? sinks->data() : nullptr}; }
};

struct BoundPlaces {
    Indices slots, sealed;               // [n], [m]
    std::optional<Indices> into, spans;  // [m] coded pages, [k, C]
};

// keys [n, Hkv, D], values [n, Hkv, Dv], and where they go.
using Writes = std::tuple<Tensor, Tensor, const BoundPlaces*>;

DType dtype_of(const Tensor& tensor) {
    const nb::dlpack::dtype type = tensor.dtype();
    if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat)) return DType::bf16;
    if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Int)) return DType::i8;
    return type.bits == 16 ? DType::f16 : DType::f32;
}

// One layer's pages. Holds its tensors, so that their memory outlives it.
class LayerPages {
  public:
    LayerPages(std::vector<Tensor> keys, std::vector<Tensor> values, std::vector<Tensor> boxes,
               std::vector<std::optional<Floats>> scales, std::vector<std::optional<Floats>> value_scales)
        : keys_(std::move(keys)),
          values_(std::move(values)),
          boxes_(std::move(boxes)),
          scales_(std::move(scales)),
          value_scales_(std::move(value_scales)) {
        if (keys_.empty() || values_.size() != keys_.size() || boxes_.size() != keys_.size() ||
            scales_.size() != keys_.size() || value_scales_.size() != keys_.size())
            throw std::invalid_argument("[LayerPages] segments: expected as many values, boxes and scales as keys");
        bool coded = false;
        int64_t start = 0;
        for (size_t i = 0; i < keys_.size(); ++i) {
            const int64_t pages = static_cast<int64_t>(keys_[i].shape(1));
            segments_.push_back({static_cast<char*>(keys_[i].data()), static_cast<char*>(values_[i].data()),
                                 static_cast<char*>(boxes_[i].data()), scales_[i] ? scales_[i]->data() : nullptr,
                                 value_scales_[i] ? value_scales_[i]->data() : nullptr, start, pages,
                                 static_cast<int64_t>(boxes_[i].shape(1)) - pages});
            coded |= segments_.back().coded();
            start += pages;
        }
        pages_ = {segments_.data(),
                  static_cast<int64_t>(segments_.size()),
                  static_cast<int64_t>(keys_[0].shape(0)),
                  static_cast<int64_t>(keys_[0].shape(2)),
                  static_cast<int64_t>(keys_[0].shape(3)),
                  static_cast<int64_t>(values_[0].shape(3)),
                  dtype_of(keys_[0]),
                  coded,
                  segments_[0].spans ? segments_[0].pages / segments_[0].spans : 0};
    }

    const Pages& view() const { return pages_; }

  private:
    std::vector<Tensor> keys_, values_, boxes_;
    std::vector<std::optional<Floats>> scales_, value_scales_;
    std::vector<Segment> segments_;
    Pages pages_{};
};

const KernelTable& table_named(const std::string& isa) {
    const KernelTable* table = kernels(isa.c_str());
    if (table) return *table;
    std::string names;
    for (const KernelTable* const* t = available_kernels(); *t; ++t)
        names += (names.empty() ? "" : ", ") + std::string((*t)->name);
    throw std::invalid_argument("[native] QUESTKV_ISA: expected one of " + names + ", got " + isa);
}

// Whose threads: always one's, or the core's own where a decode step leaves torch's nothing to do. That is so where the
// linear layers are ours too, and shows in the calls: between two layers' attention there are several of `linear`.
// Where torch's threads have work in between they are awake, and ours would wait for the cores that those are on.
enum class Sharing { libgomp, own, automatic };
std::atomic<Sharing> sharing{Sharing::libgomp};
thread_local int linear_calls = 0;

void note_linear() { ++linear_calls; }

void note_attention() {
    const Sharing of = sharing.load(std::memory_order_relaxed);
    take_own_threads(of == Sharing::own || (of == Sharing::automatic && linear_calls > 1));
    linear_calls = 0;
}

// Append the new tokens, seal the pages that they fill and the spans that they complete.
void write(const KernelTable& table, const Pages& pages, const Writes& writes, int threads) {
    const auto& [keys, values, places] = writes;
    table.append(pages, static_cast<int64_t>(places->slots.size()), places->slots.data(),
                 static_cast<const char*>(keys.data()), static_cast<const char*>(values.data()), threads);
    table.seal(pages, static_cast<int64_t>(places->sealed.size()), places->sealed.data(),
               places->into ? places->into->data() : nullptr, threads);
    if (places->spans)
        table.seal_spans(pages, static_cast<int64_t>(places->spans->shape(0)), places->spans->data(), threads);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "questkv's compiled CPU kernels; questkv.kernels documents and validates what they take.";

    nb::class_<LayerPages>(m, "LayerPages", "One layer's pages: lists of the segments' tensors.")
        .def(nb::init<std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>, std::vector<std::optional<Floats>>,
                      std::vector<std::optional<Floats>>>(),
             nb::arg("keys").noconvert(), nb::arg("values").noconvert(), nb::arg("boxes").noconvert(),
             nb::arg("scales").noconvert(), nb::arg("value_scales").noconvert());

    nb::class_<BoundRows>(m, "Rows", "Page table [R, P], lengths [R] and K [R] or None.")
        .def(
            "__init__",
            [](BoundRows* self, Indices page_table, Indices lengths, std::optional<Indices> num_selected) {
                new (self) BoundRows{std::move(page_table), std::move(lengths), std::move(num_selected)};
            },
            nb::arg("page_table"), nb::arg("lengths"), nb::arg("num_selected").none());

    nb::class_<BoundSoftmax>(m, "Softmax", "Scale, soft cap or 0, sinks [Hq] or None.")
        .def(
            "__init__",
            [](BoundSoftmax* self, float scale, float softcap, std::optional<Floats> sinks) {
                new (self) BoundSoftmax{scale, softcap, std::move(sinks)};
            },
            nb::arg("scale"), nb::arg("softcap"), nb::arg("sinks").none());

    nb::class_<Scoring>(m, "Scoring", "Optimism, number of the group's rule, pages that are always selected.")
        .def(
            "__init__",
            [](Scoring* self, float optimism, int group, int64_t sink_pages, int64_t recent_pages) {
                new (self) Scoring{optimism, static_cast<Group>(group), sink_pages, recent_pages};
            },
            nb::arg("optimism"), nb::arg("group"), nb::arg("sink_pages"), nb::arg("recent_pages"));

    nb::class_<BoundPlaces>(m, "Places", "Slots [n], sealed pages [m], coded pages [m] or None, spans [k, C] or None.")
        .def(
            "__init__",
            [](BoundPlaces* self, Indices slots, Indices sealed, std::optional<Indices> into,
               std::optional<Indices> spans) {
                new (self) BoundPlaces{std::move(slots), std::move(sealed), std::move(into), std::move(spans)};
            },
            nb::arg("slots"), nb::arg("sealed"), nb::arg("into").none(), nb::arg("spans").none());

    m.def(
        "instruction_sets",
        [] {
            std::vector<std::string> names;
            for (const KernelTable* const* t = available_kernels(); *t; ++t) names.emplace_back((*t)->name);
            return names;
        },
        "Instruction sets that this machine can run, best first.");

    m.def(
        "use_threads",
        [](const std::string& whose) {
            sharing =
                whose == "own"       ? Sharing::own
                : whose == "libgomp" ? Sharing::libgomp
                : whose == "auto"
                    ? Sharing::automatic
                    : throw std::invalid_argument("[native] threads: expected libgomp, own or auto, got " + whose);
        },
        nb::arg("whose"),
        "Run decode steps on libgomp's threads, on the module's own, or (auto) on its own where linear layers are "
        "too.");

    m.def(
        "append",
        [](const std::string& isa, const LayerPages& pages, Indices slots, Tensor keys, Tensor values, int threads) {
            nb::gil_scoped_release release;
            table_named(isa).append(pages.view(), static_cast<int64_t>(slots.size()), slots.data(),
                                    static_cast<const char*>(keys.data()), static_cast<const char*>(values.data()),
                                    threads);
        },
        nb::arg("isa"), nb::arg("pages"), nb::arg("slots"), nb::arg("keys"), nb::arg("values"), nb::arg("threads"));

    m.def(
        "seal",
        [](const std::string& isa, const LayerPages& pages, Indices page_ids, std::optional<Indices> into,
           int threads) {
            nb::gil_scoped_release release;
            table_named(isa).seal(pages.view(), static_cast<int64_t>(page_ids.size()), page_ids.data(),
                                  into ? into->data() : nullptr, threads);
        },
        nb::arg("isa"), nb::arg("pages"), nb::arg("page_ids"), nb::arg("into").none(), nb::arg("threads"));

    m.def(
        "seal_spans",
        [](const std::string& isa, const LayerPages& pages, Indices page_ids, int threads) {
            nb::gil_scoped_release release;
            table_named(isa).seal_spans(pages.view(), static_cast<int64_t>(page_ids.shape(0)), page_ids.data(),
                                        threads);
        },
        nb::arg("isa"), nb::arg("pages"), nb::arg("page_ids"), nb::arg("threads"));

    m.def(
        "estimate",
        [](const std::string& isa, const LayerPages& pages, Tensor q, const BoundRows& rows, float scale,
           const Scoring& scoring, Floats scores, int threads) {
            nb::gil_scoped_release release;
            table_named(isa).estimate(pages.view(), rows.with(q), scale, scoring, scores.data(), threads);
        },
        nb::arg("isa"), nb::arg("pages"), nb::arg("q"), nb::arg("rows"), nb::arg("scale"), nb::arg("scoring"),
        nb::arg("scores").noconvert(), nb::arg("threads"));

    m.def(
        "select",
        [](const std::string& isa, Floats scores, Indices num_pages, Indices num_selected, const Scoring& scoring,
           Indices selection, int threads) {
            nb::gil_scoped_release release;
            table_named(isa).select(scores.data(), static_cast<int64_t>(scores.shape(0)),
                                    static_cast<int64_t>(scores.shape(1)), static_cast<int64_t>(scores.shape(2)),
                                    num_pages.data(), num_selected.data(), scoring,
                                    static_cast<int64_t>(selection.shape(2)), selection.data(), threads);
        },
        nb::arg("isa"), nb::arg("scores"), nb::arg("num_pages"), nb::arg("num_selected"), nb::arg("scoring"),
        nb::arg("selection").noconvert(), nb::arg("threads"));

    m.def(
        "attend",
        [](const std::string& isa, const LayerPages& pages, Tensor q, const BoundRows& rows,
           std::optional<Indices> selection, const BoundSoftmax& softmax, Tensor out, int threads) {
            nb::gil_scoped_release release;
            // An empty tensor has no address, but a selection without pages is not "everything".
            static const int64_t nothing = -1;
            const int64_t* chosen = !selection ? nullptr : selection->size() ? selection->data() : &nothing;
            table_named(isa).attend(pages.view(), rows.with(q), chosen,
                                    selection ? static_cast<int64_t>(selection->shape(1)) : pages.view().kv_heads,
                                    selection ? static_cast<int64_t>(selection->shape(2)) : 0, softmax.view(),
                                    static_cast<char*>(out.data()), threads);
        },
        nb::arg("isa"), nb::arg("pages"), nb::arg("q"), nb::arg("rows"), nb::arg("selection").none(),
        nb::arg("softmax"), nb::arg("out").noconvert(), nb::arg("threads"));

    m.def(
        "linear",
        [](const std::string& isa, Tensor x, Tensor weight, std::optional<Tensor> scales, std::optional<Tensor> bias,
           Tensor out, int threads) {
            const size_t channels = weight.ndim() == 2 ? weight.shape(1) : 0;
            const size_t rows = channels ? x.size() / channels : 0;
            const bool same = (scales ? dtype_of(weight) == DType::i8 : x.dtype() == weight.dtype()) &&
                              out.dtype() == x.dtype() && (!scales || scales->dtype() == x.dtype()) &&
                              (!bias || bias->dtype() == x.dtype());
            if (!same || x.size() != rows * channels || out.size() != rows * weight.shape(0) ||
                (scales && scales->size() != weight.shape(0)) || (bias && bias->size() != weight.shape(0)))
                throw std::invalid_argument(
                    "[linear] x: expected [..., K] of the dtype of a weight [N, K], or of the scales [N] of an int8 "
                    "one");
            nb::gil_scoped_release release;
            note_linear();
            table_named(isa).linear(
                dtype_of(x), static_cast<int64_t>(rows), static_cast<int64_t>(weight.shape(0)),
                static_cast<int64_t>(channels), static_cast<const char*>(x.data()),
                static_cast<const char*>(weight.data()), scales ? static_cast<const char*>(scales->data()) : nullptr,
                bias ? static_cast<const char*>(bias->data()) : nullptr, static_cast<char*>(out.data()), threads);
        },
        nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("weight").noconvert(), nb::arg("scales").none().noconvert(),
        nb::arg("bias").none().noconvert(), nb::arg("out").noconvert(), nb::arg("threads"));

    m.def(
        "decode",
        [](const std::string& isa, const LayerPages& pages, Tensor q, const BoundRows& rows,
           const BoundSoftmax& softmax, const Scoring& scoring, std::optional<Writes> writes,
           std::optional<Indices> pages_read, Tensor out, int threads) {
            nb::gil_scoped_release release;
            note_attention();
            const KernelTable& table = table_named(isa);
            if (writes) write(table, pages.view(), *writes, threads);
            table.decode(pages.view(), rows.with(q), softmax.view(), scoring, static_cast<char*>(out.data()),
                         pages_read ? pages_read->data() : nullptr, threads);
        },
        nb::arg("isa"), nb::arg("pages"), nb::arg("q"), nb::arg("rows"), nb::arg("softmax"), nb::arg("scoring"),
        nb::arg("writes").none(), nb::arg("pages_read").none().noconvert(), nb::arg("out").noconvert(),
        nb::arg("threads"));
}
