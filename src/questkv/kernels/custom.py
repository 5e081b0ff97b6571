"""The operators as torch custom operators (``torch.ops.questkv.*``): what torch.compile sees in their place.

While torch.compile traces, `questkv.kernels` calls these instead of looking at its arguments, so the graph stays whole.
When the graph runs, they call `questkv.kernels` with the same arguments, which checks and dispatches as ever. They take
tensors and plain values only, so a layer's pages come as the five lists of `Pages.tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from questkv import kernels
from questkv.kernels import dispatch
from questkv.kernels.checks import check_linear_dtype
from questkv.kernels.types import NewTokens, Pages

Tensors = Sequence[torch.Tensor]

_READ = "Tensor[] keys, Tensor[] values, Tensor[] boxes, Tensor[] scales, Tensor[] value_scales"
_WRITTEN = "Tensor(a!)[] keys, Tensor(b!)[] values, Tensor(c!)[] boxes, Tensor(d!)[] scales, Tensor(e!)[] value_scales"
_TARGET = (
    "Tensor(a!)[] new_keys, Tensor(b!)[] new_values, Tensor(c!)[] new_boxes, Tensor(d!)[] new_scales, "
    "Tensor(e!)[] new_value_scales"
)
_SOFTMAX = "float scale, float? softcap, Tensor? sinks"
_DECODE = (
    f"Tensor page_table, Tensor lengths, Tensor num_selected, {_SOFTMAX}, float optimism, str group, "
    "SymInt sink_pages, SymInt recent_pages"
)

_library = torch.library.Library("questkv", "FRAGMENT")


def _operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define ``questkv::<schema>``: the decorated function runs it on every device, `fake` tells its result's shape."""
    name = schema.partition("(")[0]

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _library.define(schema)
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"questkv::{name}", fake, lib=_library)
        return function

    return register


def _nothing(*_: Any) -> None:
    """The fake of an operator that only writes."""


def _value_a_query(q: torch.Tensor, keys: Tensors, values: Tensors, *_: Any) -> torch.Tensor:
    """The fake of an operator that answers every query with a vector of the values' width."""
    return q.new_empty((*q.shape[:2], values[0].shape[3]))


def _fake_scores(
    q: torch.Tensor,
    keys: Tensors,
    values: Tensors,
    boxes: Tensors,
    scales: Tensors,
    value_scales: Tensors,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    num_selected: torch.Tensor | None,
    scale: float,
    optimism: float,
    group: str,
    backend: str,
) -> torch.Tensor:
    heads = q.shape[1] if group == "per_head" else keys[0].shape[0]
    return q.new_empty((q.shape[0], heads, page_table.shape[1]), dtype=torch.float32)


def _fake_selection(scores: torch.Tensor, *_: Any) -> torch.Tensor:
    return scores.new_empty(scores.shape, dtype=torch.int64)


@_operator(f"append({_WRITTEN}, Tensor slots, Tensor new_keys, Tensor new_values, str backend) -> ()", _nothing)
def append(
    keys: Tensors,
    values: Tensors,
    boxes: Tensors,
    scales: Tensors,
    value_scales: Tensors,
    slots: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    backend: str,
) -> None:
    """As `kernels.append`."""
    kernels.append(Pages.of(keys, values, boxes, scales, value_scales), slots, new_keys, new_values, backend=backend)


@_operator(f"seal({_WRITTEN}, Tensor page_ids, Tensor? into, str backend) -> ()", _nothing)
def seal(
    keys: Tensors,
    values: Tensors,
    boxes: Tensors,
    scales: Tensors,
    value_scales: Tensors,
    page_ids: torch.Tensor,
    into: torch.Tensor | None,
    backend: str,
) -> None:
    """As `kernels.seal`."""
    kernels.seal(Pages.of(keys, values, boxes, scales, value_scales), page_ids, into, backend=backend)


@_operator(f"seal_spans({_WRITTEN}, Tensor page_ids, str backend) -> ()", _nothing)
def seal_spans(
    keys: Tensors,
    values: Tensors,
    boxes: Tensors,
    scales: Tensors,
    value_scales: Tensors,
    page_ids: torch.Tensor,
    backend: str,
) -> None:
    """As `kernels.seal_spans`."""
    kernels.seal_spans(Pages.of(keys, values, boxes, scales, value_scales), page_ids, backend=backend)


@_operator(f"transfer({_READ}, Tensor page_ids, {_TARGET}, Tensor into, str backend) -> ()", _nothing)
def transfer(
    keys: Tensors,
    values: Tensors,
    boxes: Tensors,
    scales: Tensors,
    value_scales: Tensors,
    page_ids: torch.Tensor,
    new_keys: Tensors,
    new_values: Tensors,
    new_boxes: Tensors,
    new_scales: Tensors,
    new_value_scales: Tensors,
    into: torch.Tensor,
    backend: str,
) -> None:
    """As `kernels.transfer`, between pages that don't overlap."""
    source = Pages.of(keys, values, boxes, scales, value_scales)
    target = Pages.of(new_keys, new_values, new_boxes, new_scales, new_value_scales)
    kernels.transfer(source, page_ids, target, into, backend=backend)


@_operator(
    f"estimate(Tensor q, {_READ}, Tensor page_table, Tensor lengths, Tensor? num_selected, float scale, "
    "float optimism, str group, str backend) -> Tensor",
    _fake_scores,
)
def estimate(
    q: torch.Tensor,
    keys: Tensors,
    values: Tensors,
    boxes: Tensors,
    scales: Tensors,
    value_scales: Tensors,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    num_selected: torch.Tensor | None,
    scale: float,
    optimism: float,
    group: str,
    backend: str,
) -> torch.Tensor:
    """As `kernels.estimate`."""
    pages = Pages.of(keys, values, boxes, scales, value_scales)
    return kernels.estimate(
        q, pages, page_table, lengths, num_selected, scale=scale, optimism=optimism, group=group, backend=backend
    )


@_operator(
    "select(Tensor scores, Tensor num_pages, Tensor num_selected, SymInt sink_pages, SymInt recent_pages, "
    "str backend) -> Tensor",
    _fake_selection,
)
def select(
    scores: torch.Tensor,
    num_pages: torch.Tensor,
    num_selected: torch.Tensor,
    sink_pages: int,
    recent_pages: int,
    backend: str,
) -> torch.Tensor:
    """As `kernels.select`, but [R, H, P]: in a graph a shape can't depend on what `num_selected` holds."""
    selection = kernels.select(
        scores, num_pages, num_selected, sink_pages=sink_pages, recent_pages=recent_pages, backend=backend
    )
    padded = selection.new_full(scores.shape, -1)
    padded[..., : selection.shape[2]] = selection
    return padded


@_operator(
    f"attend(Tensor q, {_READ}, Tensor page_table, Tensor lengths, Tensor selection, {_SOFTMAX}, str backend) "
    "-> Tensor",
    _value_a_query,
)
def attend(
    q: torch.Tensor,
    keys: Tensors,
    values: Tensors,
    boxes: Tensors,
    scales: Tensors,
    value_scales: Tensors,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    selection: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    """As `kernels.attend`."""
    pages = Pages.of(keys, values, boxes, scales, value_scales)
    return kernels.attend(
        q, pages, page_table, lengths, selection, scale=scale, softcap=softcap, sinks=sinks, backend=backend
    )


@_operator(
    f"dense(Tensor q, {_READ}, Tensor page_table, Tensor lengths, {_SOFTMAX}, str backend) -> Tensor", _value_a_query
)
def dense(
    q: torch.Tensor,
    keys: Tensors,
    values: Tensors,
    boxes: Tensors,
    scales: Tensors,
    value_scales: Tensors,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    """As `kernels.dense`."""
    pages = Pages.of(keys, values, boxes, scales, value_scales)
    return kernels.dense(q, pages, page_table, lengths, scale=scale, softcap=softcap, sinks=sinks, backend=backend)


@_operator(
    f"prefill(Tensor q, {_READ}, Tensor page_table, SymInt length, {_SOFTMAX}, str backend) -> Tensor", _value_a_query
)
def prefill(
    q: torch.Tensor,
    keys: Tensors,
    values: Tensors,
    boxes: Tensors,
    scales: Tensors,
    value_scales: Tensors,
    page_table: torch.Tensor,
    length: int,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    """As `kernels.prefill`."""
    pages = Pages.of(keys, values, boxes, scales, value_scales)
    out = kernels.prefill(q, pages, page_table, length, scale=scale, softcap=softcap, sinks=sinks, backend=backend)
    return out.contiguous()


@_operator(f"decode(Tensor q, {_READ}, {_DECODE}, Tensor(f!)? pages_read, str backend) -> Tensor", _value_a_query)
def decode(
    q: torch.Tensor,
    keys: Tensors,
    values: Tensors,
    boxes: Tensors,
    scales: Tensors,
    value_scales: Tensors,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    num_selected: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    optimism: float,
    group: str,
    sink_pages: int,
    recent_pages: int,
    pages_read: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    """As `kernels.decode` without new tokens."""
    return kernels.decode(
        q,
        Pages.of(keys, values, boxes, scales, value_scales),
        page_table,
        lengths,
        num_selected,
        scale=scale,
        optimism=optimism,
        group=group,
        sink_pages=sink_pages,
        recent_pages=recent_pages,
        softcap=softcap,
        sinks=sinks,
        pages_read=pages_read,
        backend=backend,
    )


@_operator(
    f"decode_new(Tensor q, {_WRITTEN}, {_DECODE}, Tensor(f!)? pages_read, Tensor slots, Tensor new_keys, "
    "Tensor new_values, Tensor sealed, Tensor? into, Tensor? spans, str backend) -> Tensor",
    _value_a_query,
)
def decode_new(
    q: torch.Tensor,
    keys: Tensors,
    values: Tensors,
    boxes: Tensors,
    scales: Tensors,
    value_scales: Tensors,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    num_selected: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    optimism: float,
    group: str,
    sink_pages: int,
    recent_pages: int,
    pages_read: torch.Tensor | None,
    slots: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    sealed: torch.Tensor,
    into: torch.Tensor | None,
    spans: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    """As `kernels.decode` with new tokens, which it writes into the pages."""
    return kernels.decode(
        q,
        Pages.of(keys, values, boxes, scales, value_scales),
        page_table,
        lengths,
        num_selected,
        scale=scale,
        optimism=optimism,
        group=group,
        sink_pages=sink_pages,
        recent_pages=recent_pages,
        softcap=softcap,
        sinks=sinks,
        pages_read=pages_read,
        new=NewTokens(slots, new_keys, new_values, sealed, into, spans),
        backend=backend,
    )


def _fake_linear(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    check_linear_dtype(x)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@_operator("linear(Tensor x, Tensor weight, Tensor? bias, Tensor? scales, str backend) -> Tensor", _fake_linear)
def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scales: torch.Tensor | None, backend: str
) -> torch.Tensor:
    """As `kernels.linear`; a model calls it hundreds of times a token, so only the backend looks at its arguments."""
    out: torch.Tensor = dispatch.resolve(backend, x.device).linear(x.contiguous(), weight.contiguous(), bias, scales)
    return out
