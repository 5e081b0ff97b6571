"""The paged part of a `QuestCache`: what its layers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from questkv.config import QuestConfig
from questkv.errors import CacheMismatchError, ConfigError, UnsupportedError
from questkv.hf.attendance import Attendance
from questkv.hf.counts import PageCounts
from questkv.hf.group import Group
from questkv.hf.own_layers import OwnLayers
from questkv.hf.plan import Columns, Plan
from questkv.hf.snapshot import Snapshot
from questkv.kernels import Softmax
from questkv.pages import PageGeometry, PagePool, SequenceBatch

# Called with a layer, its new queries [B, Hq, n, D] and how their logits become weights; see `QuestCache.observe`.
Observer = Callable[[int, torch.Tensor, Softmax], None]


class PagedState:
    """Sequences of all paged layers, and the forward that is under way.

    A forward that is watched (see `questkv.hf.watch`) is complete when the model's forward has returned. Where nobody
    watches, it begins with the first paged layer that attends and is complete when every one of the model has. One that
    an exception ended is undone; until it is complete it doesn't count in `columns`.

    What changes more than one thing keeps a snapshot first. While that is there, something is under way: an exception
    has it put back, or, if that was interrupted too, whatever comes next does.

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
        # The cache's layers that are transformers' own; the cache says which.
        self.own = OwnLayers(())
        self._forward: Columns | None = None
        self.attendance = Attendance(paged_layers)
        # What is put back if what is under way fails.
        self._before: Snapshot | None = None

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
        return self._before is not None

    @property
    def is_interrupted(self) -> bool:
        """Whether a watched forward is under way that is no longer running."""
        return self._is_under_way and self.attendance.is_watched and not self.attendance.is_inside

    def forward_begins(self, model: PreTrainedModel) -> None:
        """A watched forward begins: one that is still under way was interrupted."""
        self._end()
        if not self.columns:
            # Left by a forward that nobody watched.
            self.own.reset()
        self.attendance.know(model)
        self._before = Snapshot.of(self, own=True)
        self.attendance.is_watched = True

    def forward_returned(self) -> None:
        """A watched forward has returned: the layers that haven't attended don't run in this model.

        Raises:
            CacheMismatchError: No paged layer has attended; or an earlier forward, which nobody watched, was taken for
                an interrupted one because it left the same layers out.
        """
        if not self.attendance.is_watched:
            return
        try:
            if self._forward is None:
                raise CacheMismatchError(
                    "[QuestCache] forward: expected its tokens in the cache, it returned without writing any: no paged "
                    "layer of the model has attended"
                )
            if not self.attendance.is_complete:
                self.attendance.check_not_taken_back()
            self._commit()
        except BaseException:
            self._undo()
            raise

    def begin(self, batch: int, width: int, mask: torch.Tensor | None) -> None:
        """Start a forward: find the real tokens among its columns and make room for them in every group.

        Args:
            batch: B.
            width: Its columns, padding included.
            mask: [B, columns] bool 2-D padding mask over all columns, or None.
        """
        if self.attendance.is_watched and self._is_under_way and self._forward is not None:
            if not self.attendance.is_complete:
                raise CacheMismatchError(
                    "[QuestCache] forward: expected every layer once in a forward, got one again before the others: "
                    "the model runs a layer twice, or its forward was interrupted and then called without its hooks"
                )
            self._commit()  # the model's forward goes through all layers again
            self.attendance.attended.clear()
            self.attendance.is_watched = True
        if not self._is_under_way or not self.attendance.is_watched:
            if not self.attendance.is_watched:
                self._end()
                self.attendance.find_model()
            self._before = Snapshot.of(self, own=False)
        if self.batch_size not in (None, batch):
            raise CacheMismatchError(
                f"[questkv] batch: expected {self.batch_size} sequences as in the cache, got {batch}; use a new cache, "
                "cache.reset(), or cache.batch_repeat_interleave(n)"
            )
        forward = Columns.of(batch, width, mask, self.columns, self.real)
        for group in self.groups.values():
            group.plan = Plan(group.batch.reserve(forward.counts), self.config)
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
            has_begun = self._is_under_way and self._forward is not None and layer not in attended
            if not begun and new is not None and not has_begun:
                self.begin(new[0].shape[0], new[0].shape[2], mask)
            out = self._attend(layer, query, new, softmax)
            if self.observer is not None:
                self.observer(layer, query, softmax)
            if layer not in attended:
                attended.add(layer)
                if self.attendance.is_complete and not self.attendance.is_watched:
                    self._commit()
            return out
        except BaseException:
            self._undo()
            raise

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
        self.settle()
        try:
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
        except BaseException:
            self._undo()
            raise

    def settle(self) -> None:
        """End the last forward: undo it if it was interrupted.

        Raises:
            CacheMismatchError: It ended as the one before, and nobody knows whether an exception ended them; the cache
                is as it was before the two.
        """
        has_run = self._is_under_way and self._forward is not None and self.attendance.is_complete
        if has_run and self.attendance.is_inside:
            self._commit()
        self._end()

    def change(self, change: Callable[[], None]) -> None:
        """Change all layers, or none: what `change` did is undone if it raises."""
        self.settle()
        self._before = Snapshot.of(self, own=True)
        try:
            change()
            self._before = None
        except BaseException:
            self._undo()
            raise

    def _end(self) -> None:
        try:
            if self._is_under_way:
                self.attendance.take_back()
        finally:
            self._undo()

    def _undo(self) -> None:
        """Put back what was before what is under way, if something is."""
        if self._before is not None:
            self._before.put_back(self)
            self.attendance.is_watched = False
        self._forward = self._before = None
        self.attendance.attended.clear()

    def check_crop(self, tokens: int) -> None:
        """Raise ValueError where `crop` would."""
        if not 0 <= tokens <= self.columns:
            raise ValueError(f"[crop] tokens: expected 0 to {self.columns}, got {tokens}")

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` columns of every sequence. Part of a `change`."""
        kept = self.columns - tokens
        for group in self.groups.values():
            group.batch.crop(
                [tokens] * len(group.batch) if self.real is None else self.real[:, kept:].sum(dim=1).tolist()
            )
        self.columns = kept
        self.real = None if self.real is None else self.real[:, :kept]

    def reorder(self, indices: torch.Tensor) -> None:
        """Sequence i becomes what sequence indices[i] was. Part of a `change`."""
        for group in self.groups.values():
            group.batch.reorder(indices.tolist())
        self.real = None if self.real is None else self.real[indices.to(self.real.device)]

    def reset(self) -> None:
        """Forget every token and every count. Part of a `change`."""
        self.free()
        self.groups = {}
        self.columns, self.real = 0, None
        self.attendance = Attendance(self.paged_layers)
        self.counts.clear()

    def free(self) -> None:
        """Give every page back."""
        for group in self.groups.values():
            group.batch.free()

    def fork(self, config: QuestConfig) -> PagedState:
        """The same tokens in a second state, sharing every page; its counts start at zero."""
        for name in ("page_size", "box_dtype", "kv_dtype", "span_pages", "offload"):
            if getattr(config, name) != getattr(self.config, name):
                raise ConfigError(
                    f"[fork] {name}: expected {getattr(self.config, name)!r} as in the shared pages, "
                    f"got {getattr(config, name)!r}"
                )
        other = PagedState(config, self.paged_layers, self.max_tokens)
        other.columns, other.real = self.columns, self.real
        other.attendance = self.attendance.fork()
        try:
            for geometry, group in self.groups.items():
                other.groups[geometry] = Group(group.pool, group.batch.fork(), dict(group.layers))
            return other
        except BaseException:
            other.free()
            raise

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: pages are shared with other caches, and belong to a process."""
        raise UnsupportedError(
            "[QuestCache] pickle: expected a cache to stay in its process; cache.fork() copies it there, and the keys "
            "and values that cache.keys_values(layer) gives can be saved and put into a new cache with cache.fill"
        )

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

    def _commit(self) -> None:
        assert self._forward is not None
        real = self._forward.behind(self.columns, self.real)
        left_out = self.attendance.complete()
        for group in self.groups.values():
            for layer in left_out & group.layers.keys():
                self.attendance.behind.add(layer)
                group.batch.written(group.layers[layer])
            group.batch.finish()
        self.real = real
        self.columns += self._forward.width
        self.attendance.is_watched = False
        self._before = None  # last: before this, an exception undoes the forward

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
