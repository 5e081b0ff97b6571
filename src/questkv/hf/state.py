"""The paged part of a `QuestCache`: what its layers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from transformers import PreTrainedModel

from questkv.config import QuestConfig
from questkv.errors import CacheMismatchError, ConfigError, UnsupportedError
from questkv.hf.attendance import Attendance
from questkv.hf.counts import PageCounts
from questkv.hf.group import Group, Softmax
from questkv.hf.plan import Columns, Plan
from questkv.pages import PageGeometry, PagePool, SequenceBatch

# Called with a layer, its new queries [B, Hq, n, D] and how their logits become weights; see `QuestCache.observe`.
Observer = Callable[[int, torch.Tensor, Softmax], None]


class PagedState:
    """Sequences of all paged layers, and the forward that is under way.

    A forward begins with the first paged layer that attends and is complete when every paged layer of the model has, or
    when the model's forward has returned without the others (see `questkv.hf.watch`). One that an exception ended is
    undone; until it is complete it doesn't count in `columns`.

    Args:
        config: The method's configuration.
        paged_layers: The model's layers that are paged, ascending.
        max_tokens: Most tokens that the pages may hold, over all sequences.
    """

    def __init__(self, config: QuestConfig, paged_layers: list[int], max_tokens: int | None) -> None:
        self.config = config
        self.paged_layers = paged_layers
        self.max_tokens = max_tokens
        self.columns = 0
        # [B, columns] False where a column is padding, kept only once there is any.
        self.real: torch.Tensor | None = None
        self.groups: dict[PageGeometry, Group] = {}
        self.observer: Observer | None = None
        self.counts = PageCounts()
        self._forward: Columns | None = None
        self.attendance = Attendance(paged_layers)
        self._columns_before = 0

    @property
    def batch_size(self) -> int | None:
        """B, or None before the first token."""
        return next((len(group.batch) for group in self.groups.values()), None)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sequence after the last complete forward."""
        group = next(iter(self.groups.values()), None)
        if group is None:
            return []
        step = group.batch.step if self._is_under_way else None
        counts = [0] * len(group.batch) if step is None else step.counts
        return [length - count for length, count in zip(group.batch.lengths, counts, strict=True)]

    @property
    def _is_under_way(self) -> bool:
        return self._forward is not None and not self.attendance.is_complete

    def forward_begins(self, model: PreTrainedModel) -> None:
        """A watched forward begins: one that is still under way was interrupted."""
        self.settle()
        self.attendance.know(model)
        self.attendance.is_watched, self._columns_before = True, self.columns

    def forward_returned(self) -> None:
        """A watched forward has returned: the layers that haven't attended don't run in this model.

        Raises:
            CacheMismatchError: No paged layer has attended; or an earlier forward, which nobody watched, was taken for
                an interrupted one because it left the same layers out.
        """
        if not self.attendance.is_watched:
            return
        self.attendance.is_watched = False
        if self._is_under_way:
            try:
                self.attendance.check_not_taken_back()
            except CacheMismatchError:
                self._undo()
                raise
            self._commit()
        elif self.columns == self._columns_before:
            raise CacheMismatchError(
                "[QuestCache] forward: expected its tokens in the cache, it returned without writing any: no paged "
                "layer of the model has attended"
            )

    def begin(self, batch: int, width: int, mask: torch.Tensor | None) -> None:
        """Start a forward: find the real tokens among its columns and make room for them in every group.

        Args:
            batch: B.
            width: Its columns, padding included.
            mask: [B, columns] bool 2-D padding mask over all columns, or None.
        """
        if self.attendance.is_watched and self._is_under_way:
            raise CacheMismatchError(
                "[QuestCache] forward: expected every layer once in a forward, got one again before the others: the "
                "model runs a layer twice, or its forward was interrupted and then called without its hooks"
            )
        self.settle()
        self.attendance.find_model()
        if self.batch_size not in (None, batch):
            raise CacheMismatchError(
                f"[questkv] batch: expected {self.batch_size} sequences as in the cache, got {batch}; use a new cache, "
                "cache.reset(), or cache.batch_repeat_interleave(n)"
            )
        forward = Columns(batch, width, self._new_columns(width, mask))
        reserved: list[Group] = []
        try:
            for group in self.groups.values():
                group.plan = Plan(group.batch.reserve(forward.counts), self.config)
                reserved.append(group)
        except BaseException:
            for group in reserved:
                group.batch.undo()
            raise
        self._forward = forward

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        mask: torch.Tensor | None,
        softmax: Softmax,
        *,
        begun: bool = False,
    ) -> torch.Tensor:
        """Write a layer's new keys and values and attend its new queries.

        Args:
            layer: The model's layer.
            query: [B, Hq, width, D].
            new: Keys [B, Hkv, width, D] and values [B, Hkv, width, Dv]; None if another layer that shares them has
                written them already.
            mask: [B, columns] bool 2-D padding mask over all columns, or None.
            softmax: Scale, soft cap and sinks.
            begun: `begin` was called for this forward; if not, the first paged layer calls it.

        Returns:
            [B, width, Hq, Dv].
        """
        kind = query.device.type
        if torch.is_autocast_enabled(kind):
            # What autocast does to SDPA's arguments; inside, float32 stays float32.
            dtype = torch.get_autocast_dtype(kind)
            query, *pair = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, *(new or ())))
            with torch.autocast(kind, enabled=False):
                return self.attend(layer, query, (pair[0], pair[1]) if new else None, mask, softmax, begun=begun)
        attended = self.attendance.attended
        try:
            if not begun and new is not None and (not self._is_under_way or layer in attended):
                self.begin(new[0].shape[0], new[0].shape[2], mask)
            out = self._attend(layer, query, new, softmax)
            if self.observer is not None:
                self.observer(layer, query, softmax)
        except BaseException:
            self._undo()
            raise
        if layer not in attended:
            attended.add(layer)
            if self.attendance.is_complete:
                self._commit()
        return out

    def _attend(
        self, layer: int, query: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor] | None, softmax: Softmax
    ) -> torch.Tensor:
        fresh = None if new is None else self._write(layer, *new)
        group = self._group_of(layer)
        if group is None or group.plan is None or self._forward is None:
            raise CacheMismatchError(
                f"[questkv] layer {layer}: expected its keys and values in the cache, got none yet"
            )
        columns, asked = self._forward, None
        if new is None and query.shape[2] < columns.width:
            # A layer that reads another one's keys may be asked for the last columns only (Gemma 4).
            columns = columns.last(query.shape[2])
            asked = columns.counts
        tokens = columns.pack(query)
        if fresh is None:
            out = group.attend(layer, tokens, softmax, self.counts, asked)
        else:
            out = group.step(layer, tokens, *fresh, softmax, self.counts)
        return columns.unpack(out)

    def keys_values(self, layer: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `QuestCache.keys_values`."""
        group = self._group_of(layer)
        if group is None or layer in self.attendance.behind:
            raise CacheMismatchError(f"[keys_values] layer: expected a paged layer that holds tokens, got {layer}")
        keys, values = group.batch.keys_values(group.layers[layer], sequence)
        return keys.to(group.pool.geometry.dtype), values.to(group.pool.geometry.dtype)

    def fill(self, layers: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """See `QuestCache.fill`."""
        for layer in self.paged_layers:
            keys, values = layers[layer]
            if layer == self.paged_layers[0]:
                self.begin(keys.shape[0], keys.shape[2], None)
            group = self._group(layer, keys, values)
            assert self._forward is not None
            packed = self._forward.pack(keys), self._forward.pack(values)
            group.batch.write(group.layers[layer], *packed, backend=self.config.backend)
            self.attendance.attended.add(layer)
        self._commit()

    def settle(self) -> None:
        """End the last forward: undo it if it was interrupted.

        Raises:
            CacheMismatchError: It ended as the one before, and nobody knows whether an exception ended them; the cache
                is as it was before the two.
        """
        try:
            if self._is_under_way:
                self.attendance.take_back()
        finally:
            self._undo()

    def _undo(self) -> None:
        """Forget the forward that is under way, if one is."""
        if self._is_under_way:
            for group in self.groups.values():
                group.batch.undo()
            if not self.columns:
                # Nothing was ever complete, so the next forward may bring another batch.
                self.groups.clear()
            self.attendance.is_watched = False
        self._forward = None
        self.attendance.attended.clear()

    def check_crop(self, tokens: int) -> None:
        """Raise ValueError where `crop` would."""
        if not 0 <= tokens <= self.columns:
            raise ValueError(f"[crop] tokens: expected 0 to {self.columns}, got {tokens}")

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` columns of every sequence."""
        self.check_crop(tokens)
        self.settle()
        kept = self.columns - tokens
        for group in self.groups.values():
            group.batch.crop(
                [tokens] * len(group.batch) if self.real is None else self.real[:, kept:].sum(dim=1).tolist()
            )
        self.columns = kept
        self.real = None if self.real is None else self.real[:, :kept]

    def reorder(self, indices: torch.Tensor) -> None:
        """Sequence i becomes what sequence indices[i] was."""
        self.settle()
        for group in self.groups.values():
            group.batch.reorder(indices.tolist())
        self.real = None if self.real is None else self.real[indices.to(self.real.device)]

    def reset(self) -> None:
        """Forget every token and every count."""
        self.settle()
        for group in self.groups.values():
            group.batch.free()
        self.groups.clear()
        self.columns, self.real = 0, None
        self.attendance = Attendance(self.paged_layers)
        self.counts.clear()

    def fork(self, config: QuestConfig) -> PagedState:
        """The same tokens in a second state, sharing every page; its counts start at zero."""
        for name in ("page_size", "box_dtype", "kv_dtype", "offload"):
            if getattr(config, name) != getattr(self.config, name):
                raise ConfigError(
                    f"[fork] {name}: expected {getattr(self.config, name)!r} as in the shared pages, "
                    f"got {getattr(config, name)!r}"
                )
        self.settle()
        other = PagedState(config, self.paged_layers, self.max_tokens)
        other.columns, other.real = self.columns, self.real
        other.attendance = self.attendance.fork()
        for geometry, group in self.groups.items():
            other.groups[geometry] = Group(group.pool, group.batch.fork(), dict(group.layers))
        return other

    def _write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Write a layer's new tokens, or give them back packed for `Group.step` to write where each is a row."""
        if self._forward is None or (keys.shape[0], keys.shape[2]) != (self._forward.batch, self._forward.width):
            raise CacheMismatchError(
                f"[questkv] layer {layer}: expected the tokens that the layers before it got in this forward"
            )
        if layer in self.attendance.behind or (self.columns and self._group_of(layer) is None):
            raise CacheMismatchError(
                f"[questkv] layer {layer}: expected it in every forward, an earlier one left it out, so it lacks "
                "tokens; use a new cache"
            )
        group = self._group(layer, keys, values)
        packed = self._forward.pack(keys), self._forward.pack(values)
        assert group.plan is not None
        if group.plan.is_decode_step:
            return packed
        group.batch.write(group.layers[layer], *packed, backend=self.config.backend)
        return None

    def _new_columns(self, width: int, mask: torch.Tensor | None) -> torch.Tensor | None:
        """[B, width] bool of the new columns, None if all are real."""
        if mask is None:
            return None
        if mask.shape[1] != self.columns + width:
            raise CacheMismatchError(
                f"[questkv] attention_mask: expected {self.columns + width} columns (cached and new tokens), "
                f"got {mask.shape[1]}"
            )
        past, new = mask[:, : self.columns], mask[:, self.columns :]
        known = torch.ones_like(past) if self.real is None else self.real
        if not torch.equal(past, known):
            raise UnsupportedError(
                "[questkv] attention_mask: expected the cached tokens' mask unchanged, got another; masking a token "
                "after it was cached is not supported"
            )
        return None if bool(new.all()) else new

    def _commit(self) -> None:
        assert self._forward is not None
        width, new = self._forward.width, self._forward.real
        if self.real is not None or new is not None:
            batch, device = self._forward.batch, next(iter(self.groups)).device
            past = (
                self.real if self.real is not None else torch.ones(batch, self.columns, dtype=torch.bool, device=device)
            )
            added = new if new is not None else torch.ones(batch, width, dtype=torch.bool, device=device)
            self.real = torch.cat([past, added], dim=1)
        left_out = self.attendance.complete()
        for group in self.groups.values():
            for layer in left_out & group.layers.keys():
                self.attendance.behind.add(layer)
                group.batch.written(group.layers[layer])
            group.batch.settle()
        self.columns += width

    def _group_of(self, layer: int) -> Group | None:
        """The layer's group, None before its first token."""
        for group in self.groups.values():
            if layer in group.layers:
                return group
        return None

    def _group(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Group:
        """The layer's group, made when its first layer arrives."""
        known = self._group_of(layer)
        if known is not None and known.pool.geometry.fits(keys, values):
            return known
        geometry = PageGeometry(
            kv_heads=keys.shape[1],
            head_dim=keys.shape[3],
            value_dim=values.shape[3],
            page_size=self.config.page_size,
            dtype=keys.dtype,
            device=keys.device,
            box_dtype=self.config.box_dtype,
            kv_dtype=self.config.kv_dtype,
            offload=self.config.offload,
            span_pages=self.config.span_pages,
        )
        group = self.groups.get(geometry)
        if group is None or layer not in group.layers:
            if any(layer in other.layers for other in self.groups.values()):
                raise CacheMismatchError(
                    f"[questkv] layer {layer}: expected the heads, widths, dtype and device that the cache holds, got "
                    f"{geometry}; use a new cache"
                )
            assert self._forward is not None
            if group is None:
                pool = PagePool(geometry, max_tokens=self.max_tokens)
                group = Group(pool, SequenceBatch(pool, self._forward.batch))
                group.plan = Plan(group.batch.reserve(self._forward.counts), self.config)
                self.groups[geometry] = group
            host = self.config.offload == "host" and not self.config.is_dense_layer(layer)
            group.layers[layer] = group.pool.add_layer(host=host)
        return group
