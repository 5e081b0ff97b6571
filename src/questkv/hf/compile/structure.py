"""What a compiled step takes for granted about its model, looked at before every step."""

from __future__ import annotations

from typing import Any

import torch


class Structure:
    """A model as it was when its step was compiled: its submodules, their classes and modes, its tensors, its config.

    torch's own guards look at every attribute and hook of every submodule, which takes several times as long
    (docs/decode.md). This looks at what changes in use: layers that are replaced or made fast, weights that are
    replaced, converted or moved, training mode, settings of the config, the type of a rotary embedding.

    Args:
        model: Any model; its submodules are kept alive, it and its tensors are not.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        modules = list(model.modules())
        self._children = [module._modules for module in modules if module._modules]
        self._tensors = [held for module in modules for held in (module._parameters, module._buffers) if held]
        self._rotary = [module for module in modules if hasattr(module, "rope_type")]
        configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}
        self._configs = [vars(config) for config in configs.values()]
        self._seen = self._look(model), [dict(config) for config in self._configs]

    def is_of(self, model: torch.nn.Module) -> bool:
        """Whether the model is still so."""
        return self._seen == (self._look(model), self._configs)

    def _look(self, model: torch.nn.Module) -> tuple[Any, ...]:
        modules = [child for children in self._children for child in children.values()]
        tensors = [tensor for held in self._tensors for tensor in held.values() if tensor is not None]
        # A tensor's memory stands for what it is: as a value it would be compared number by number.
        return (
            model.training,
            modules,
            [*map(type, modules)],
            [*map(torch.Tensor.data_ptr, tensors)],
            [tensor.dtype for tensor in tensors],
            [module.rope_type for module in self._rotary],
        )
