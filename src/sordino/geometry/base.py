"""The contract of a geometry, and what all linear ones share.

A geometry maps the gradient g to coordinates ĝ, in which it is clipped and
noised, and maps the result back. Every geometry here is linear and works one
parameter at a time, so

    Σ_i w_i ĝ_i = into(Σ_i w_i g_i),

and only the norms ‖ĝ_i‖ need each example's gradient. `Meter` collects, during
one backward pass, the uses of every parameter, measures the norms as soon as a
parameter is complete, and keeps whatever is smaller for the sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..gradients.derived import Derived
from ..gradients.uses import Factors, PerExample, Rows, Use, Weights, add
from .norms import keeps, squares

if TYPE_CHECKING:
    from ..gradients.recorder import Recorder
    from ..public import Public


class Geometry(ABC):
    """How gradients are measured. Stateless unless a subclass says otherwise."""

    name: str
    needs_public = False

    def prepare(self, model: torch.nn.Module, parameters: dict[str, Tensor], public: Public | None, keys: Any) -> None:
        """Learn from public data, once, before the first step."""

    @abstractmethod
    def square_norms(self, name: str, uses: list[Use]) -> tuple[Tensor, list[Use]]:
        """‖ĝ_i‖² of one parameter, (n,), and the uses to keep for the sum."""

    def waits(self, use: Use) -> bool:
        """Whether to measure this use now or with others later is one for memory, so that later saves launches."""
        return False

    def together(self, uses: list[Use]) -> list[Tensor]:
        """‖ĝ_i‖² of several parameters, each with one use that waited; that use is kept for the sum."""
        raise NotImplementedError

    def into(self, name: str, total: Tensor) -> Tensor:
        """g ↦ ĝ, for one gradient of a parameter's shape or a stack of them."""
        return total

    def back(self, name: str, update: Tensor) -> Tensor:
        """What the optimizer gets from the noisy average in coordinates."""
        return update

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take up what `state_dict` gave."""

    def describe(self) -> str:
        return self.name


JOINT = ""  # the label of the small parameters' common norm
SMALL = 2**14  # numbers of a parameter up to which it may be measured together with others


class Meter:
    """The uses of one physical batch, by parameter.

    With `joint`, the many small gradients a model has (biases, norm layers) are laid side by side and measured and
    summed in one go, under the label `JOINT`: for clipping by one norm over all parameters that is all it takes. And
    what may wait is measured at the end, layers of one shape together.
    """

    def __init__(self, geometry: Geometry, recorder: Recorder, n: int, joint: bool = False) -> None:
        self.geometry, self.recorder, self.n, self.joint = geometry, recorder, n, joint
        self.reset()

    def reset(self) -> None:
        """Forget what was measured."""
        recorder = self.recorder
        self.scale = 1.0  # the gradients here are so many times the true ones
        self.uses: dict[str, list[Use]] = {name: [] for name in recorder.parameters}
        self.derived: dict[int, tuple[Tensor, list[Use]]] = {}
        self.norms: dict[str, Tensor] = {}
        self.waiting: list[str] = []  # parameters with uses that may be measured with others, later
        self.small: list[str] = []  # parameters with small gradients; from `finish` on, those measured together
        self.side_by_side: Tensor | None = None  # their gradients in coordinates, (n, numbers of all)
        self.stale: set[str] = set()  # measured, then used again (a checkpoint that recomputes)

    def add(self, tensor: Tensor, use: Use) -> None:
        """Called by the recorder while the backward pass runs."""
        name = self.recorder.names.get(id(tensor))
        if name is None:
            self.derived.setdefault(id(tensor), (tensor, []))[1].append(use)
            return
        expected = self.recorder.expected.get(id(tensor))
        if self.joint:
            if self.geometry.waits(use):
                self.waiting.append(name)
                self._append(name, use)
                return
            if use.each() <= SMALL:
                if expected == 1 and isinstance(use, Factors) and keeps([use]):  # what measuring it would do
                    use = PerExample(use.per_example(0, self.n))
                if isinstance(use, PerExample):
                    self.small.append(name)
                    self._append(name, use)
                    return
        self._append(name, use)
        if expected == len(self.uses[name]) and name not in self.recorder.has_derived:
            self._measure(name)

    def _append(self, name: str, use: Use) -> None:
        self.uses[name].append(use)
        if name in self.norms:
            self.stale.add(name)

    def _measure(self, name: str) -> None:
        self.recorder.later.flush()
        self.stale.discard(name)
        self.norms[name], self.uses[name] = self.geometry.square_norms(name, self.uses[name])

    def finish(self) -> dict[str, Tensor]:
        """‖ĝ_i‖² by parameter, for every parameter; zeros where no gradient arrived."""
        self.recorder.later.flush()
        for tensor, uses in self.derived.values():
            self._resolve(tensor, uses)
        self.derived.clear()
        if self.joint and self.side_by_side is None:
            self._measure_jointly()
            self._measure_what_waited()
        beside = set() if self.side_by_side is None else set(self.small)
        for name, uses in self.uses.items():
            if uses and (name not in self.norms or name in self.stale):
                self._measure(name)
            elif not uses and name not in beside:
                self.norms[name] = torch.zeros(self.n, device=self.recorder.device)
        return self.norms

    def _measure_jointly(self) -> None:
        """Move the uses of small parameters with one use each into one matrix."""
        grads: dict[str, Tensor] = {}
        for name in self.small:
            uses = self.uses[name]
            if len(uses) == 1 and isinstance(uses[0], PerExample) and name not in self.norms:
                grads[name] = self.geometry.into(name, uses[0].grad)
        dtypes = {g.dtype for g in grads.values()}
        if len(grads) < 2 or len(dtypes) > 1:
            return
        self.small = list(grads)
        rows = [grad if grad.dim() == 2 else grad.reshape(self.n, -1) for grad in grads.values()]
        self.side_by_side = torch.cat(rows, 1)
        self.norms[JOINT] = squares(self.side_by_side)
        for name in self.small:
            self.uses[name] = []

    def _measure_what_waited(self) -> None:
        alone = [name for name in self.waiting if len(self.uses[name]) == 1 and name not in self.norms]
        if alone:
            uses = [self.uses[name][0] for name in alone]
            self.norms.update(zip(alone, self.geometry.together(uses), strict=True))

    def true_norms(self) -> dict[str, Tensor]:
        """‖ĝ_i‖² by parameter, the scale taken out."""
        norms = self.finish()
        return norms if self.scale == 1.0 else {name: v / self.scale**2 for name, v in norms.items()}

    def _resolve(self, tensor: Tensor, uses: list[Use]) -> None:
        """Hand the uses of a derived tensor to the parameters it was computed from."""
        origin = self.recorder.origin(tensor)
        if origin is not None and origin.embedding is not None and all(isinstance(u, PerExample) for u in uses):
            weight, index, padding_idx = origin.embedding
            if id(weight) in self.recorder.names:
                grad = add(u.per_example(0, self.n) for u in uses)
                rows = index.reshape(1, -1).expand(self.n, -1)
                rows = rows if padding_idx is None else rows.masked_fill(rows == padding_idx, -1)
                right = grad.reshape(self.n, rows.shape[1], -1)
                self._append(self.recorder.names[id(weight)], Rows(rows, right, weight.shape[0]))
                return
        for parameter in self.recorder.parameters_below(tensor):
            self._append(self.recorder.names[id(parameter)], Derived(uses, tensor, parameter))

    def _forms(self, weights: dict[str, Tensor], keep: Tensor | None) -> dict[str, Weights]:
        """The weights of each parameter as sums take them; mostly one object for all."""
        made: dict[int, Weights] = {}
        for w in weights.values():
            if id(w) not in made:
                true = w if self.scale == 1.0 else w / self.scale
                made[id(w)] = Weights(true if keep is None else true[keep])
        return {name: made[id(w)] for name, w in weights.items()}

    def sums(self, weights: dict[str, Tensor], keep: Tensor | None) -> dict[str, Tensor]:
        """Σ_i weights_i ĝ_i by parameter; `keep` marks the finite examples if some are not.

        The last layers go first: early ones hold the data, which is there anyway, so that theirs frees less memory.
        """
        out, forms = {}, self._forms(weights, keep)
        for name in reversed(self.uses):
            uses, self.uses[name] = self.uses[name], []
            if not uses:
                continue
            if keep is not None:
                uses = [use.select(keep) for use in uses]
            total = uses[0].weighted_sum(forms[name])
            for use in uses[1:]:
                total = total + use.weighted_sum(forms[name])
            out[name] = self.geometry.into(name, total)
        if self.side_by_side is not None:
            rows = PerExample(self.side_by_side) if keep is None else PerExample(self.side_by_side[keep])
            total = rows.weighted_sum(forms[JOINT])
            shapes = [self.recorder.parameters[name].shape for name in self.small]
            parts = total.split([shape.numel() for shape in shapes])
            for name, part, shape in zip(self.small, parts, shapes, strict=True):
                out[name] = part if len(shape) == 1 else part.view(shape)
            self.side_by_side, self.small = None, []
        return out
