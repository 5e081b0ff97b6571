"""A loaded model's linear layers on the CPU, in eight or four bits.

Torchao chooses the codes; torch multiplies with them, and for few rows of eight bits `kernels.linear`. torchao's own
layers are not used for the product: in eager mode its eight-bit one unpacks the whole matrix for every token, which is
slower than 16-bit weights, and the dispatch of its four-bit one costs half as much as the product (docs/decode.md).
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from questkv import kernels
from questkv.errors import MissingPackageError, UnsupportedError

# Weights that share a scale in four bits, along a row.
GROUP_SIZE = 32
INSTALL = "pip install 'torchao>=0.18'"
# Up to so many rows are bound by reading the codes, which torch does at a third of the memory's speed.
_FEWEST_ROWS = 8
# More rows than this are multiplied faster by an unpacked matrix.
_FEW_ROWS = 16
# Codes as numbers up to 1, exact in every dtype: products of whole codes could be too large for float16.
_CODE_UNIT = 2.0**-7
# What torch's four-bit packing divides the rows of a matrix by.
_INT4_ROWS = 16


class Int8Linear(nn.Module):
    """A linear layer whose weights have eight bits and a scale a row.

    Args:
        linear: The layer whose weights are coded; it can be dropped.

    Attributes:
        codes: [out, in] int8.
        scales: [out] in the model's type: weight = code * scale.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        from torchao.quantization import Int8Tensor, PerRow

        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        scales = Int8Tensor.from_hp(weight, PerRow()).scale.to(weight.dtype)
        # the scales that will multiply are rounded, so the codes are chosen for those
        coded = Int8Tensor.from_hp(weight, PerRow(), scale=scales.float())
        self.register_buffer("codes", coded.qdata)
        self.register_buffer("scales", scales.flatten())
        self.bias = linear.bias
        self._native = "native" in kernels.available_backends()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        rows = x.reshape(-1, self.in_features)
        if self._native and len(rows) <= _FEWEST_ROWS and not (torch.is_grad_enabled() and x.requires_grad):
            return kernels.linear(x.contiguous(), self.codes, self.bias, scales=self.scales, backend="native")
        if len(rows) <= _FEW_ROWS:
            out = torch.ops.aten._weight_int8pack_mm(rows.contiguous(), self.codes, self.scales)
        else:
            out = F.linear(rows, self.codes.to(x.dtype) * _CODE_UNIT) * (self.scales / _CODE_UNIT)
        return _finished(out, x, self.bias)


class Int4Linear(nn.Module):
    """A linear layer whose weights have four bits, and a scale and a zero in each group of `GROUP_SIZE`.

    Args:
        linear: The layer whose weights are coded; it can be dropped.

    Attributes:
        codes: [out, in / 2] uint8, two codes a byte in the order of torch's kernel.
        scales_and_zeros: [in / GROUP_SIZE, out, 2] in the model's type: weight = (code - 8) * scale + zero.
    """

    codes: torch.Tensor
    scales_and_zeros: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        from torchao.prototype.quantization.int4 import Int4OpaqueTensor

        self.in_features, self.out_features = linear.in_features, linear.out_features
        coded = Int4OpaqueTensor.from_hp(linear.weight.detach(), [1, GROUP_SIZE])
        self.register_buffer("codes", coded.qdata)
        self.register_buffer("scales_and_zeros", coded.scale_and_zero)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        rows = x.reshape(-1, self.in_features).contiguous()
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.codes, GROUP_SIZE, self.scales_and_zeros)
        return _finished(out, x, self.bias)

    @staticmethod
    def fits(linear: nn.Linear) -> bool:
        """Whether a layer's shape can be packed."""
        return linear.in_features % GROUP_SIZE == 0 and linear.out_features % _INT4_ROWS == 0


def _finished(rows: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[rows, out] -> [..., out], like x, with the bias."""
    out = rows.view(*x.shape[:-1], rows.shape[-1])
    return out if bias is None else out + bias


def lighten(model: nn.Module, weights: str) -> None:
    """Code the weights of a model's linear layers in place; each layer's own weights are dropped when it is coded.

    With ``int4`` the output layer, whose errors go straight into the logits, and layers whose shape four bits don't
    divide have eight. Embeddings, norms, and experts that are no linear layers stay as they are.

    Args:
        model: A causal language model of transformers, on the CPU.
        weights: ``int8`` or ``int4``.

    Raises:
        MissingPackageError: torchao isn't installed, or another version than is needed.
        UnsupportedError: The model isn't on the CPU, has light weights already, or has no linear layer.
    """
    _check(model, weights)
    head = getattr(model, "get_output_embeddings", lambda: None)()

    def make(linear: nn.Linear) -> nn.Module:
        four = weights == "int4" and linear is not head and Int4Linear.fits(linear)
        return Int4Linear(linear) if four else Int8Linear(linear)

    with _quiet_import(weights):
        if not _replace(model, make):
            raise UnsupportedError(
                f"--weights {weights}: expected a model with linear layers, got {type(model).__name__}"
            )


def _replace(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> int:
    """Put what `make` makes of it in the place of each linear layer, and drop the layer's own weights; how many."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    made: dict[int, nn.Module] = {}
    with torch.no_grad():
        for parent, name, child in found:
            if id(child) not in made:
                made[id(child)] = make(child)
                if made[id(child)] is not child:
                    child.weight = None  # type: ignore[assignment]  # freed now, not when all are done
            setattr(parent, name, made[id(child)])
    return len(found)


def _check(model: nn.Module, weights: str) -> None:
    if importlib.util.find_spec("torchao") is None:
        raise MissingPackageError(f"--weights {weights}: expected torchao; install it: {INSTALL}")
    devices = sorted({parameter.device.type for parameter in model.parameters()})
    if devices != ["cpu"]:
        raise UnsupportedError(
            f"--weights {weights}: expected a model on the CPU, got {', '.join(devices)}; on a GPU load a checkpoint "
            "that is GPTQ or AWQ already"
        )
    if getattr(model, "is_quantized", False) or getattr(getattr(model, "config", None), "quantization_config", None):
        raise UnsupportedError(f"--weights {weights}: expected 16- or 32-bit weights, got a quantised checkpoint")


@contextlib.contextmanager
def _quiet_import(weights: str) -> Iterator[None]:
    """Import torchao without what it tells about the GPUs that aren't there, and name a version that lacks a part."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ImportError as error:
        raise MissingPackageError(f"--weights {weights}: {error}; install it: {INSTALL}") from error
    finally:
        logging.disable(before)
