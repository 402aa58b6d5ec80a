"""Products with the Hessian of the mean loss over a public set, over the trainable parameters only.

With g(w) the gradient of the mean loss, ``H v = ∂(gᵀv)/∂w``: double backward. The graph of g is kept between products
where memory allows, so that a product is one backward through it; batches for which it does not are differentiated
anew in every product, once for all vectors of a `matmat`. Dropout is off, attention goes through the math kernel (the
others have no second derivative), nothing computes in TF32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from ..asked import out_of_memory, wide
from ..errors import SordinoError, Unsupported
from ..gradients.engine import call
from ..gradients.recorder import check_losses
from ..randomness import derived_seed, seeded
from .examples import Examples
from .operators import Operator
from .surroundings import exactly, free_bytes, still
from .twice import Twice
from .weights import Weights

if TYPE_CHECKING:
    from ..public import Public

Watch = Callable[[int, int], None]  # batches done, batches in all


class HessianOperator(Operator):
    """H of the mean loss of `public` at the model's weights, or at those of `at`, a copy of the model.

    `dtype` casts copies of weights and data (torch.float64 resolves eigenvalues far below the largest); by default
    they are as the model has them, half precision as float32. `keep` is how many bytes of graphs may stay in memory:
    by default half of what is free on a GPU, a quarter on a CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        public: Public | Examples,
        *,
        at: nn.Module | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        examples: int | None = None,
        keep: int | None = None,
        watch: Watch | None = None,
    ) -> None:
        plain = Weights(model, at)
        self.model, self.device, self.watch = model, plain.device, watch
        self.dtype = dtype or wide(next(iter(plain.trainable.values())).dtype)
        if self.dtype not in (torch.float32, torch.float64):
            raise SordinoError(f"dtype={self.dtype} cannot hold curvature; choose torch.float32 or torch.float64")
        if isinstance(public, Examples):
            data = public
        else:
            with plain:  # labels are drawn by the weights in question, in their own precision
                data = Examples(model, public, seed, examples)
        self.examples = data.cast(self.dtype)
        self.weights = Weights(model, at, self.dtype)
        self.parameters = list(self.weights.trainable.values())
        self.size = sum(p.numel() for p in self.parameters)
        self.keep = keep
        self._own = {id(p) for p in model.parameters()}
        self._graphs: dict[int, list[Tensor]] = {}
        self._graph_bytes: int | None = None
        self._may_keep = 0

    # -- products ----------------------------------------------------------------------------------------------------

    def matvec(self, v: Tensor) -> Tensor:
        return self.matmat(v[:, None])[:, 0]

    def matmat(self, V: Tensor) -> Tensor:
        out = torch.zeros(V.shape[1], self.size, dtype=self.dtype, device=self.device)
        columns = [self._split(v.to(self.dtype).contiguous()) for v in V.unbind(1)]
        sums = [self._split(row) for row in out]
        total = len(self.examples.sizes)
        with self.in_place():
            for index in range(total):
                graph, kept = self._graph(index)
                for j, (column, sum_) in enumerate(zip(columns, sums, strict=True)):
                    self._add(graph, column, sum_, kept or j + 1 < len(columns))
                del graph
                if self.watch is not None:
                    self.watch(index + 1, total)
        self.products += V.shape[1]
        return out.T

    def gradient(self) -> Tensor:
        """The gradient of the mean loss."""
        out = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        parts = self._split(out)
        with self.in_place():
            for index in range(len(self.examples.sizes)):
                for part, g in zip(parts, self._graph(index)[0], strict=True):
                    part += g.detach()
        return out

    def loss(self) -> float:
        """The mean loss."""
        with self.in_place(), torch.no_grad():
            return sum(float(self._mean_loss(i, check=False)) for i in range(len(self.examples.sizes)))

    @property
    def kept(self) -> float:
        """The part of the batches whose graphs stay in memory."""
        return len(self._graphs) / len(self.examples.sizes)

    def _split(self, flat: Tensor) -> list[Tensor]:
        pieces = flat.split([p.numel() for p in self.parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]

    def _add(self, graph: list[Tensor], column: list[Tensor], sums: list[Tensor], again: bool) -> None:
        pairs = [(g, v) for g, v in zip(graph, column, strict=True) if g.requires_grad]
        if not pairs:  # a loss linear in the parameters
            return
        found = torch.autograd.grad(
            [g for g, _ in pairs], self.parameters, [v for _, v in pairs], retain_graph=again, allow_unused=True
        )
        some = [(s, f) for s, f in zip(sums, found, strict=True) if f is not None]
        if some:
            torch._foreach_add_([s for s, _ in some], [f for _, f in some])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model as the loss is computed with it: these weights, no dropout."""
        with self.weights, still(self.model, self.device), exactly(self.device), torch.enable_grad():
            yield

    # -- graphs ------------------------------------------------------------------------------------------------------

    def _graph(self, index: int) -> tuple[list[Tensor], bool]:
        """The gradient of one batch's part of the mean loss, with its graph; and whether that is kept."""
        if index in self._graphs:
            return self._graphs[index], True
        if self._graph_bytes is None:
            self._measure()
        try:
            graph = self._differentiated(index)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error) or not self._graphs:
                self._explain(error)
            self._graphs.clear()
            self._may_keep = 0
            graph = self._differentiated(index)
        if len(self._graphs) < self._may_keep:
            self._graphs[index] = graph
            return graph, True
        return graph, False

    def _measure(self) -> None:
        """How large the graph of a batch is, by what it saves, and how many of them may stay."""
        sizes: dict[int, int] = {}
        weights = {p.untyped_storage().data_ptr() for p in self.parameters}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            try:
                self._differentiated(0, check=True)
            except (RuntimeError, MemoryError) as error:
                self._explain(error)
        self._graph_bytes = max(1, sum(size for where, size in sizes.items() if where not in weights))
        self._may_keep = (free_bytes(self.device) if self.keep is None else self.keep) // self._graph_bytes

    def _differentiated(self, index: int, check: bool = False) -> list[Tensor]:
        loss = self._mean_loss(index, check)
        found = torch.autograd.grad(loss, self.parameters, create_graph=True, allow_unused=True)
        if check and any("Error" in node.name() for node in nodes(g for g in found if g is not None)):
            raise NotImplementedError("its backward is marked as once differentiable")
        grads = [torch.zeros_like(p) if g is None else g for g, p in zip(found, self.parameters, strict=True)]
        if not bool(torch.stack([g.detach().isfinite().all() for g in grads]).all()):
            lo = sum(self.examples.sizes[:index])
            raise SordinoError(
                f"the gradient of public examples {lo} to {lo + self.examples.sizes[index] - 1} is not finite; look "
                "for NaN or infinity among them, or in the weights"
            )
        return grads

    def _mean_loss(self, index: int, check: bool) -> Tensor:
        """One batch's part of the mean: the sum of its losses over the number of all examples."""
        examples, data = self.examples, self.examples.batch(index)
        with seeded(derived_seed(b"curvature", "batch", index), self.device), Twice():
            value = call(examples.losses, data)
        if torch.is_grad_enabled():
            value = check_losses(value, examples.sizes[index])
        if check:
            self._check_leaves(value)
        return value.sum() / examples.count

    def _check_leaves(self, value: Tensor) -> None:
        """The losses must use the copies that stand in for the model's parameters."""
        leaves = {id(getattr(node, "variable", None)) for node in nodes([value])}
        if leaves & self._own:
            raise SordinoError(
                "losses holds a parameter of the model in a variable of its own; let it reach parameters through the "
                "model, as in model.weight, so that copies can stand in"
            )
        if not leaves & {id(p) for p in self.parameters}:
            raise SordinoError(
                "losses does not use this model: it was written for another (perhaps the one this is a copy of); pass "
                "that model, and this one as at="
            )

    def _explain(self, error: BaseException) -> NoReturn:
        text = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, SordinoError):
            raise error
        if out_of_memory(error):
            raise SordinoError(
                f"a batch of {max(self.examples.sizes)} public examples and the graph of its gradient do not fit in "
                "memory; pass Public(batch_size=...) half as large"
            ) from error
        if "not implemented" in text or "not supported" in text or isinstance(error, NotImplementedError):
            raise Unsupported(
                f"an operation of the model has no second derivative ({text[:150]}); for attention set "
                "attn_implementation='eager' or 'sdpa'"
            ) from error
        raise error


def nodes(roots: Iterable[Tensor]) -> Iterator[Any]:
    """Everything in the graph behind some tensors."""
    todo: list[Any] = [root.grad_fn for root in roots]
    done: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in done:
            done.add(node)
            todo.extend(below for below, _ in node.next_functions)
            yield node
