"""The tokens that one layer of a policy's cache holds, as plain tensors."""

from __future__ import annotations

import torch

# Room for new tokens when a buffer is full, as a share of what it holds and at least this many.
_GROWTH, _LEAST_ROOM = 8, 64


class HeldTokens:
    """Keys, values and positions of the held tokens; each KV head holds equally many, not always the same ones.

    A dropped token's slot is overwritten by the next one, so slots are in no particular order.

    Args:
        keys: [Hkv, T, D], copied.
        values: [Hkv, T, Dv], copied.
        positions: [Hkv, T] int64, places in the sequence, copied.
        limit: Most tokens that will be held at once; no memory is taken for more. None: no limit.
    """

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, limit: int | None = None
    ) -> None:
        self._limit = limit
        self._count = 0
        self._keys, self._values, self._positions = (states[:, :0] for states in (keys, values, positions))
        self._reserve(keys.shape[1])
        self._count = keys.shape[1]
        self.keys.copy_(keys)
        self.values.copy_(values)
        self.positions.copy_(positions)

    def __len__(self) -> int:
        """Tokens held per KV head."""
        return self._count

    @property
    def keys(self) -> torch.Tensor:
        """[Hkv, len, D]."""
        return self._keys[:, : self._count]

    @property
    def values(self) -> torch.Tensor:
        """[Hkv, len, Dv]."""
        return self._values[:, : self._count]

    @property
    def positions(self) -> torch.Tensor:
        """[Hkv, len] int64."""
        return self._positions[:, : self._count]

    @property
    def bytes_held(self) -> int:
        """Bytes of the keys' and values' buffers, spare room included."""
        return sum(buffer.numel() * buffer.element_size() for buffer in (self._keys, self._values))

    def add(self, key: torch.Tensor, value: torch.Tensor, position: int) -> None:
        """Hold one more token behind the others: key [Hkv, D] and value [Hkv, Dv]."""
        self._reserve(self._count + 1)
        self._count += 1
        self.put(torch.full((len(key), 1), self._count - 1, device=key.device), key, value, position)

    def put(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor, position: int) -> None:
        """Let one token take the place of another: `slots` [Hkv, 1] int64, key [Hkv, D] and value [Hkv, Dv]."""
        for held, new in ((self._keys, key), (self._values, value)):
            held.scatter_(1, slots[..., None].expand(-1, -1, new.shape[-1]), new[:, None])
        self._positions.scatter_(1, slots, position)

    def _reserve(self, count: int) -> None:
        """Make the buffers large enough for `count` tokens."""
        capacity = self._keys.shape[1]
        if count <= capacity:
            return
        room = count + max(count // _GROWTH, _LEAST_ROOM)
        if self._limit is not None:
            assert count <= self._limit, "a method holds no more than its budget"
            room = min(room, self._limit)
        for name in ("_keys", "_values", "_positions"):
            old = getattr(self, name)
            grown = old.new_empty((old.shape[0], room, *old.shape[2:]))
            grown[:, : self._count] = old[:, : self._count]
            setattr(self, name, grown)
