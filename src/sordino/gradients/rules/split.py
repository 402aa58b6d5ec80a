"""Taking one operation on a batch apart into the same operation on each example alone.

A `Split` says, for every batched tensor and every parameter, whether an example
sees all of it (None), its own rows (a layout), or the one row it was expanded from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import Layout
from ..uses import add

if TYPE_CHECKING:
    from .fallback import Generic

Part = Layout | str | None


@dataclass(frozen=True)
class Split:
    inputs: tuple[Layout | None, ...]
    parameters: Mapping[int, Part]

    def fits(self, inputs: Sequence[Tensor], parameters: Mapping[int, Tensor], n: int) -> bool:
        pairs: list[tuple[Part, Tensor]] = [*zip(self.inputs, inputs, strict=True)]
        pairs += [(part, parameters[i]) for i, part in self.parameters.items()]
        return all(not isinstance(part, Layout) or part.fits(t.shape, n) for part, t in pairs)


def splits(
    inputs: Sequence[Tensor], parameters: Mapping[int, Tensor], rows: Mapping[int, Tensor], layout: Layout, n: int
) -> Iterator[Split]:
    """The ways to try, the likeliest first: every batched tensor by example, every parameter whole."""

    def layouts(t: Tensor) -> list[Layout]:
        return [x for x in dict.fromkeys([layout, Layout(0)]) if x.fits(t.shape, n)]

    each_input: list[list[Layout | None]] = [[*layouts(t), None] for t in inputs]
    each_parameter: list[list[Part]] = []
    for i, p in parameters.items():
        if i in rows:
            each_parameter.append(["row", None])
        else:
            each_parameter.append([None, *layouts(p)])
    found = product(product(*each_parameter), product(*each_input))
    for chosen, ins in islice(found, 64):
        if any(x is not None for x in ins) or any(x is not None for x in chosen):
            yield Split(ins, dict(zip(parameters, chosen, strict=True)))


def one(t: Tensor, part: Part, n: int, i: int) -> Tensor:
    """What example i sees of t: its batch dimension is kept."""
    if not isinstance(part, Layout):
        return t
    rows = t.shape[part.dim] // n
    return t.narrow(part.dim, i * rows, rows) if part.slow else _strided(t, part.dim, n, i)


def _strided(t: Tensor, dim: int, n: int, i: int) -> Tensor:
    return t[(slice(None),) * dim + (slice(i, None, n),)]


def stacked(t: Tensor, part: Layout, n: int) -> Tensor:
    """All of `one`, stacked in front."""
    fronted = part.front(t, n)  # (n, m, remaining)
    return fronted if part.dim == 0 else fronted.movedim(1, part.dim + 1)


def whole_parameters(operation: Generic, split: Split) -> dict[int, Tensor]:
    rows, parts = operation.rows, split.parameters
    return {i: rows[i].detach() if parts[i] == "row" else p for i, p in operation.parameters.items()}


def same_numbers(
    operation: Generic, split: Split, saved: Sequence[Tensor], truth: Sequence[Tensor], shown: Sequence[int],
    layouts: Sequence[Layout],
) -> bool:  # fmt: skip
    """Whether every example alone gives the numbers that it gave in the batch."""
    n, whole = operation.recorder.n, whole_parameters(operation, split)
    for i in range(n):
        inputs = tuple(one(t, part, n, i) for t, part in zip(saved, split.inputs, strict=True))
        outs = operation.outputs(inputs, {k: one(p, split.parameters[k], n, i) for k, p in whole.items()})
        for j, want, layout in zip(shown, truth, layouts, strict=True):
            want, got = one(want, layout, n, i) if want.dim() else want, outs[j]
            if got.numel() != want.numel():
                return False
            if not close(got.reshape(want.shape), want):
                return False
    return True


def close(a: Tensor, b: Tensor) -> bool:
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    tolerance = 0.05 if torch.finfo(a.dtype).bits < 32 else 1e-3
    a, b = a.double().nan_to_num(0, 0, 0), b.double().nan_to_num(0, 0, 0)
    scale = float(b.abs().max()) if b.numel() else 0.0
    return bool(((a - b).abs() <= tolerance * (b.abs() + 0.1 * scale)).all())


def inner(a: Tensor, b: Tensor) -> Tensor:
    return torch.view_as_real(a * b.conj())[..., 0].sum() if a.is_complex() else (a * b).sum()


def together(
    operation: Generic, split: Split, saved: Sequence[Tensor], grads: Sequence[Tensor], shown: Sequence[int],
    layouts: Sequence[Layout],
) -> dict[int, Tensor] | None:  # fmt: skip
    """Every example's gradient by vmap, (n, *shape); None where the operation has no batching rule."""
    n, whole = operation.recorder.n, whole_parameters(operation, split)
    own = {k for k, part in split.parameters.items() if isinstance(part, Layout)}
    ins = tuple(t if x is None else stacked(t, x, n) for t, x in zip(saved, split.inputs, strict=True))
    in_dims = tuple(None if x is None else 0 for x in split.inputs)
    cotangents = tuple(stacked(g, x, n) for g, x in zip(grads, layouts, strict=True))
    parts = {k: stacked(p, split.parameters[k], n) if k in own else p for k, p in whole.items()}  # type: ignore[arg-type]

    def example(inputs: tuple, cotangents: tuple, parameters: dict[int, Tensor]) -> dict[int, Tensor]:
        def total(parameters: dict[int, Tensor]) -> Tensor:
            outs = operation.outputs(inputs, parameters)
            return add(inner(outs[j].reshape(g.shape), g) for j, g in zip(shown, cotangents, strict=True))

        return torch.func.grad(total)(parameters)

    dims: tuple[Any, ...] = (in_dims, 0, {k: 0 if k in own else None for k in parts})
    try:
        return torch.func.vmap(example, in_dims=dims, randomness="error")(ins, cotangents, parts)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
        return None


def one_by_one(
    operation: Generic, split: Split, saved: Sequence[Tensor], grads: Sequence[Tensor], shown: Sequence[int],
    layouts: Sequence[Layout],
) -> dict[int, Tensor]:  # fmt: skip
    """Every example's gradient by ordinary autograd, which also knows custom autograd functions."""
    n, whole = operation.recorder.n, whole_parameters(operation, split)
    found: dict[int, list[Tensor]] = {k: [] for k in whole}
    for i in range(n):
        with torch.enable_grad():
            inputs = tuple(one(t, part, n, i) for t, part in zip(saved, split.inputs, strict=True))
            leaves = {k: one(p, split.parameters[k], n, i).detach().requires_grad_() for k, p in whole.items()}
            outs = operation.outputs(inputs, leaves)
            pairs = [(outs[j], one(g, x, n, i)) for j, g, x in zip(shown, grads, layouts, strict=True)]
            pairs = [(o, g.reshape(o.shape)) for o, g in pairs if o.requires_grad]
            got: Sequence[Tensor | None] = (None,) * len(leaves)
            if pairs:
                got = torch.autograd.grad(
                    [o for o, _ in pairs], list(leaves.values()), [g for _, g in pairs], allow_unused=True
                )
        for (k, leaf), g in zip(leaves.items(), got, strict=True):
            found[k].append(torch.zeros_like(leaf) if g is None else g.to_dense() if g.is_sparse else g)
    return {k: torch.stack(v) for k, v in found.items()}
