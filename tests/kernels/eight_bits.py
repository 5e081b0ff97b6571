"""Pages in eight bits by docs/method.md's formulas, in numpy: what codes a page must have, and what they stand for."""

from __future__ import annotations

import numpy as np
import torch


def key_codes(keys: torch.Tensor, box: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[Hkv, S, D] codes of one page's keys.

    Args:
        keys: [Hkv, S, D].
        box: [Hkv, 2, D] int8.
        scale: [Hkv] float32.
    """
    lo, hi, step = _box(box, scale)
    with np.errstate(invalid="ignore", divide="ignore"):
        codes = np.clip(np.rint((_f64(keys) - step * lo) * 255 / (step * (hi - lo))), 0, 255)
    return torch.from_numpy(np.where((lo == hi) | np.isinf(step), 0, codes).astype(np.uint8))


def decoded_keys(codes: torch.Tensor, box: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[Hkv, S, D] float32 keys that the codes stand for, every step rounded to float32."""
    lo, hi, step = (part.astype(np.float32) for part in _box(box, scale))
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(step * (lo + codes.numpy().astype(np.float32) * (hi - lo) / np.float32(255)))


def rounding_of_keys(decoded: torch.Tensor, box: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[Hkv, S, D] float64: how far those roundings may take a key: a quotient's, a sum's and a product's."""
    lo, hi, step = _box(box, scale)
    with np.errstate(invalid="ignore"):
        width = torch.from_numpy(step * (hi - lo))
    return (width + 2 * decoded.double().abs()) * 2.0**-24 + 2.0**-149


def half_step_of_keys(box: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[Hkv, 1, D] float64: half the distance of two neighbouring codes."""
    lo, hi, step = _box(box, scale)
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(step * (hi - lo) / 510)


def value_codes(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[Hkv, S, D] codes of one page's values, and [Hkv, S, 2] float32 steps and offsets."""
    exact = values.float().numpy()
    lo, hi = exact.min(axis=-1), exact.max(axis=-1)
    bad = ~np.isfinite(exact).all(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        step = np.where(bad, np.nan, ((hi - lo) / np.float32(255))).astype(np.float32)
        offset = np.where(bad, np.nan, lo).astype(np.float32)
        place = (exact.astype(np.float64) - offset[..., None]) / step[..., None].astype(np.float64)
        codes = np.where((bad | (step == 0))[..., None], 0, np.clip(np.rint(place), 0, 255))
    return torch.from_numpy(codes.astype(np.uint8)), torch.from_numpy(np.stack([step, offset], axis=-1))


def decoded_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[Hkv, S, D] float32 values that the codes stand for, every step rounded to float32."""
    step, offset = scales.numpy()[..., :1], scales.numpy()[..., 1:]
    return torch.from_numpy(offset + step * codes.numpy().astype(np.float32))


def _box(box: torch.Tensor, scale: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lowest and highest code [Hkv, 1, D] and scale [Hkv, 1, 1]."""
    return _f64(box)[:, :1], _f64(box)[:, 1:], _f64(scale)[:, None, None]


def _f64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy()
