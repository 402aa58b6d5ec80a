"""Copies of a model's tensors that stand in for them while the losses are computed.

The losses are the user's own function of the user's own model, so a cast or a prepared copy of the model cannot be
handed to them. Its numbers can: inside ``with weights:`` every parameter and buffer of the model is replaced by a
copy; outside, nobody can tell.
"""

from __future__ import annotations

from collections import OrderedDict
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..asked import one_device, refuse
from ..errors import SordinoError


class Weights:
    """The parameters and buffers of `at` (by default of the model itself) in place of the model's.

    `trainable` are the copies by name, leaves that require a gradient.
    """

    def __init__(self, model: nn.Module, at: nn.Module | None = None, dtype: torch.dtype | None = None) -> None:
        refuse(model)
        source = model if at is None else at
        self.model = model
        self._copies: dict[int, Tensor] = {}
        self.trainable: dict[str, Tensor] = OrderedDict()
        values: dict[str, Tensor] = {**dict(source.named_parameters()), **dict(source.named_buffers())}
        for name, own in [*model.named_parameters(), *model.named_buffers()]:
            if name not in values or values[name].shape != own.shape:
                raise SordinoError(
                    f"at= has no {name!r} of shape {tuple(own.shape)}; pass a copy of the same model, as prepare() "
                    "returns it"
                )
            value = values[name].detach().to(device=own.device, copy=True)
            if dtype is not None and value.is_floating_point():
                value = value.to(dtype)
            if isinstance(own, nn.Parameter):
                value = nn.Parameter(value, requires_grad=own.requires_grad)
                if own.requires_grad:
                    self.trainable[name] = value
            self._copies[id(own)] = value
        if not self.trainable:
            raise SordinoError(
                "the model has no trainable parameter; set requires_grad_(True) on what shall be trained"
            )
        self.device = one_device(self.trainable)
        self._originals: list[tuple[dict[str, Any], str, Tensor]] = []

    def __enter__(self) -> Weights:
        assert not self._originals, "entered twice"
        for module in self.model.modules():
            holders: list[dict[str, Any]] = [module._parameters, module._buffers]
            for held in holders:
                for key, tensor in list(held.items()):
                    if tensor is not None:
                        self._originals.append((held, key, tensor))
                        held[key] = self._copies[id(tensor)]
        self._flatten()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for held, key, tensor in self._originals:
            held[key] = tensor
        self._originals = []
        self._flatten()

    def _flatten(self) -> None:
        """Recurrent layers keep a second list of their weights."""
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase):
                module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]

    def store(self, model: nn.Module) -> None:
        """Write the copies' numbers into `model`, a copy of this one."""
        names = {id(t): name for name, t in [*self.model.named_parameters(), *self.model.named_buffers()]}
        with torch.no_grad():
            there: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            for key, tensor in self._copies.items():
                there[names[key]].copy_(tensor)


def parameter_names(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The trainable parameters and their shapes, in the order of the model."""
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
