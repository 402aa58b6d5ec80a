"""A public data set as the losses will see it: labels drawn once, batches held in memory.

Every product of a Hessian with a vector must be of the same function, so whatever is random about the data (drawn
labels, a data set that crops) is drawn once, here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..noise.keys import Keys

if TYPE_CHECKING:
    from ..public import Public

HELD = 2**31  # bytes of examples kept on the model's device; beyond that they wait in main memory


class Examples:
    """The batches of a public set, with labels drawn by the weights the model has now."""

    def __init__(self, model: nn.Module, public: Public, seed: int = 0, limit: int | None = None) -> None:
        self.losses = public.losses
        self.device = next(model.parameters()).device
        self.batches: list[Any] = []
        self.sizes: list[int] = []
        held = 0
        training = [(m, m.training) for m in model.modules()]
        try:
            model.eval()
            with torch.no_grad():
                for data, n in public.batches(model, Keys.from_seed(seed), limit):
                    held += sum(t.numel() * t.element_size() for t in tensors(data))
                    elsewhere = held > HELD and self.device.type != "cpu"
                    self.batches.append(_to(data, torch.device("cpu")) if elsewhere else data)
                    self.sizes.append(n)
        finally:
            for module, mode in training:
                module.training = mode

    @property
    def count(self) -> int:
        return sum(self.sizes)

    def cast(self, dtype: torch.dtype) -> Examples:
        """The same examples, floating-point numbers in `dtype`."""
        out = object.__new__(Examples)
        out.__dict__.update(self.__dict__)

        def change(leaf: Any) -> Any:
            return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        out.batches = [each(change, data) for data in self.batches]
        return out

    def batch(self, index: int) -> Any:
        """The data of one batch on the model's device."""
        return _to(self.batches[index], self.device)

    def joined(self) -> Any | None:
        """All batches as one, or None where their rows differ in shape (text of different lengths)."""
        try:
            first = self.batches[0]
            if isinstance(first, Tensor):
                return torch.cat([b.cpu() for b in self.batches])
            if isinstance(first, tuple):
                return tuple(torch.cat([b[i].cpu() for b in self.batches]) for i in range(len(first)))
            if isinstance(first, dict):
                return {k: torch.cat([b[k].cpu() for b in self.batches]) for k in first}
        except (RuntimeError, TypeError, KeyError, AttributeError):
            return None
        return None


def tensors(data: Any) -> list[Tensor]:
    """The tensors of a batch."""
    found: list[Tensor] = []
    each(lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None, data)
    return found


def each(change: Any, data: Any) -> Any:
    """`change` of every leaf; a mapping torch does not know (a tokenizer's) counts as a dict."""
    if hasattr(data, "keys") and not isinstance(data, dict):
        data = {key: data[key] for key in data.keys()}
    return tree_map(change, data)


def _to(data: Any, device: torch.device) -> Any:
    return each(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, data)


def model_output(model: nn.Module, data: Any) -> Tensor | None:
    """What the model gives for the inputs of a batch, or its `.logits`; None if it cannot be called that way."""
    try:
        with torch.no_grad():
            if isinstance(data, dict):
                out = model(**{k: v for k, v in data.items() if k not in ("labels", "label")})
            else:
                out = model(data[0] if isinstance(data, tuple) else data)
    except Exception:  # the user's model may want anything: then nothing is known about its outputs
        return None
    out = getattr(out, "logits", out)
    return out if isinstance(out, Tensor) else None
