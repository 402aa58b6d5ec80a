"""LSTM, GRU and plain recurrent layers, written out step by step in linear uses.

The fused kernels give no per-step gate gradients, and `vmap` of them fails. Here
the input projection is one linear use over all steps and the recurrent one a use
per step; the equations are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import Unsupported

Cell = Callable[[Tensor, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]  # (input gates, hidden gates, state) -> state


def _lstm(inputs: Tensor, hidden: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    i, f, g, o = (inputs + hidden).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(inputs: Tensor, hidden: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (ri, zi, ni), (rh, zh, nh) = inputs.chunk(3, -1), hidden.chunk(3, -1)
    r, z = (ri + rh).sigmoid(), (zi + zh).sigmoid()
    new = (ni + r * nh).tanh()
    return (new + z * (state[0] - new),)


def _tanh(inputs: Tensor, hidden: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return ((inputs + hidden).tanh(),)


def _relu(inputs: Tensor, hidden: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return ((inputs + hidden).relu(),)


def _layer(x: Tensor, state: tuple[Tensor, ...], weights: Sequence[Tensor], cell: Cell, backwards: bool) -> tuple:
    """x (T, n, D) -> outputs (T, n, H) and the last state."""
    w_in, w_hidden = weights[:2]
    rest = list(weights[2:])
    project = rest.pop() if len(rest) % 2 else None  # an LSTM with proj_size
    b_in, b_hidden = rest if rest else (None, None)
    gates = F.linear(x, w_in, b_in)
    outputs: list[Tensor] = []
    steps = range(x.shape[0])
    for t in reversed(steps) if backwards else steps:
        state = cell(gates[t], F.linear(state[0], w_hidden, b_hidden), state)
        if project is not None:
            state = (F.linear(state[0], project), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _run(
    x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool, cell: Cell,
) -> tuple[Tensor, ...]:  # fmt: skip
    if batch_first:
        x = x.transpose(0, 1)
    directions = 2 if bidirectional else 1
    each = len(weights) // (num_layers * directions)
    last: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        outs = []
        for direction in range(directions):
            k = layer * directions + direction
            out, state = _layer(
                x, tuple(s[k] for s in states), weights[k * each : (k + 1) * each], cell, direction == 1
            )
            outs.append(out)
            last.append(state)
        x = outs[0] if directions == 1 else torch.cat(outs, -1)
        if dropout and train and layer < num_layers - 1:
            x = F.dropout(x, dropout)
    x = x.transpose(0, 1) if batch_first else x
    return (x, *(torch.stack([s[j] for s in last]) for j in range(len(last[0]))))


def _with_batch(states: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
    """An initial state of zeros is a constant; from here on it counts as part of the batch."""
    return tuple(s + x.new_zeros((), dtype=s.dtype) for s in states)


def _fused(cell: Cell, name: str) -> Callable[..., tuple[Tensor, ...]]:
    def run(x: Tensor, second: Tensor | Sequence[Tensor], third: object, *rest: object) -> tuple[Tensor, ...]:
        if isinstance(third, bool) or not isinstance(rest[0], bool) or not isinstance(third, (tuple, list)):
            raise Unsupported(
                f"{name} on a packed sequence orders its rows by time and length, so they cannot be told apart by "
                "example; pass the padded tensor and mask the loss instead"
            )
        states = _with_batch((second,) if isinstance(second, Tensor) else tuple(second), x)
        return _run(x, states, third, *rest, cell=cell)  # type: ignore[arg-type, misc]

    return run


def _cell(cell: Cell) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    def run(
        x: Tensor, state: Tensor | Sequence[Tensor], w_in: Tensor, w_hidden: Tensor,
        b_in: Tensor | None = None, b_hidden: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
        states = _with_batch((state,) if isinstance(state, Tensor) else tuple(state), x)
        out = cell(F.linear(x, w_in, b_in), F.linear(states[0], w_hidden, b_hidden), states)
        return out[0] if len(out) == 1 else out

    return run


DECOMPOSITIONS: dict[object, Callable[..., object]] = {
    torch.lstm: _fused(_lstm, "nn.LSTM"),
    torch.gru: _fused(_gru, "nn.GRU"),
    torch.rnn_tanh: _fused(_tanh, "nn.RNN"),
    torch.rnn_relu: _fused(_relu, "nn.RNN"),
    torch.lstm_cell: _cell(_lstm),
    torch.gru_cell: _cell(_gru),
    torch.rnn_tanh_cell: _cell(_tanh),
    torch.rnn_relu_cell: _cell(_relu),
}
