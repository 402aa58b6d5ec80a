"""A model without its randomness, so that an example can be compared with itself: for the sensitivity check."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Quiet(TorchFunctionMode):
    """Dropout of every spelling does nothing; with `exact`, autocast inside `losses` is off as well.

    With `frozen`, random tensors (stochastic depth, noise) hold one constant, so that an example can be looked at
    alone. Permutations and integers stay random.
    """

    same = {
        F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
        torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_, torch.feature_dropout,
        torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
    }  # fmt: skip
    recurrent = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}

    uniform = {torch.rand, torch.rand_like, Tensor.uniform_}
    normal = {torch.randn, torch.randn_like, Tensor.normal_}
    coins = {torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_}

    def __init__(self, device: str, exact: bool, frozen: bool) -> None:
        super().__init__()
        self.device, self.exact, self.frozen = device, exact, frozen
        self.autocast = False  # whether any operation ran under it

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self.same:
            return args[0] if args else kwargs["input"]
        if func is torch.native_dropout:
            args, kwargs = (args[0], 0.0, True), {}
        elif func is F.scaled_dot_product_attention:
            args, kwargs = _argument(args, kwargs, 4, "dropout_p", 0.0)
        elif func is F.multi_head_attention_forward:
            args, kwargs = _argument(args, kwargs, 10, "dropout_p", 0.0)
        elif func in self.recurrent:
            args = tuple(0.0 if type(a) is float else a for a in args)
        elif self.frozen and func in (self.uniform | self.normal | self.coins):
            return self._constant(func, args, kwargs)
        if not torch.is_autocast_enabled(self.device):
            return func(*args, **kwargs)
        self.autocast = True
        if not self.exact:
            return func(*args, **kwargs)
        with torch.autocast(self.device, enabled=False):
            return func(*args, **kwargs)

    def _constant(self, func: Any, args: tuple, kwargs: dict) -> Tensor:
        probability = None
        if func in self.coins:
            probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5 if func is Tensor.bernoulli_ else args[0])
            probability = probability.detach().clone() if isinstance(probability, Tensor) else probability
        out = func(*args, **kwargs)
        with torch.no_grad():
            if probability is not None:
                return out.copy_(torch.as_tensor(probability, device=out.device) >= 0.5)
            low, high = (*args[1:3], 0.0, 1.0)[:2] if func in (Tensor.uniform_, Tensor.normal_) and len(args) > 2 else (
                kwargs.get("from", kwargs.get("mean", 0.0)), kwargs.get("to", kwargs.get("std", 1.0))
            )  # fmt: skip
            return out.fill_(low + 0.3 * (high - low) if func in self.uniform else low + 0.5 * high)


def _argument(args: tuple, kwargs: dict, at: int, name: str, value: Any) -> tuple[tuple, dict]:
    if len(args) > at:
        return (*args[:at], value, *args[at + 1 :]), kwargs
    return args, {**kwargs, name: value} if name in kwargs else kwargs
