"""Public data: data that costs no privacy, through one door.

`Public(dataset, losses=...)` is what a geometry, a noise strategy or a preparation
learns from. Labels of public examples are, by choice, drawn from the model's own
predictions, drawn uniformly, or the given ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .asked import flag, shown, whole
from .batches import Source
from .errors import SordinoError
from .randomness import derived_seed, seeded

if TYPE_CHECKING:
    from .noise import Keys

LABELS = ("model", "random", "given")


class Public:
    """A public data set with its per-example losses.

    `losses` is called as in `private.backward`. With ``labels="model"`` or ``"random"`` the second item of an example
    (or its "labels" entry) is replaced; examples may also be bare inputs. `predict(inputs)` gives logits, by default
    the model's output or its `.logits`; with `multilabel` each of them is a yes or no of its own (drawn as 1.0 or 0.0).
    """

    def __init__(
        self,
        dataset: Any,
        losses: Callable[..., Tensor],
        labels: str = "model",
        predict: Callable[[Any], Tensor] | None = None,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        batch_size: int = 64,
        multilabel: bool = False,
    ) -> None:
        if labels not in LABELS:
            raise SordinoError(f"labels={shown(labels)} is not known; choose one of: {', '.join(LABELS)}")
        if not callable(losses):
            raise SordinoError(f"Public(losses={shown(losses)}) must be a function that returns one loss per example")
        if predict is not None and not callable(predict):
            raise SordinoError(f"Public(predict={shown(predict)}) must be a function from inputs to logits")
        self.dataset, self.losses, self.labels, self.predict = dataset, losses, labels, predict
        self.batch_size, self.multilabel = whole("batch_size", batch_size, 1), flag("multilabel", multilabel)
        self.source = Source(dataset, collate=collate, device=torch.device("cpu"), what="public data set")

    def describe(self) -> str:
        return f"{len(self.source)} public examples with labels {LABEL_WORDS[self.labels]}"

    def batches(self, model: nn.Module, keys: Keys, examples: int | None = None) -> Iterator[tuple[Any, int]]:
        """(data ready for `losses`, number of examples), on the model's device, labels drawn."""
        from .noise import Stream

        device = next(model.parameters()).device
        self.source.device = device
        count = len(self.source) if examples is None else min(examples, len(self.source))
        generator = torch.Generator()
        token = Stream(keys.subkey("public-labels")).words(0, "labels", 0, 8).tobytes()
        generator.manual_seed(derived_seed(token, "labels"))
        for lo in range(0, count, self.batch_size):
            rows = list(range(lo, min(count, lo + self.batch_size)))
            samples = self.source.samples(rows, token)
            data = self.source.collated(rows, samples, range(len(rows)), token, None)
            with seeded(derived_seed(token, "model", lo), device):  # dropout may be on
                data = self._labelled(model, data, generator)
            yield data, len(rows)

    def _labelled(self, model: nn.Module, data: Any, generator: torch.Generator) -> Any:
        if self.labels == "given":
            return data
        if isinstance(data, dict):
            inputs: Any = {k: v for k, v in data.items() if k not in ("labels", "label")}
            return {**data, "labels": self._draw(model, inputs, generator)}
        inputs = data[0] if isinstance(data, tuple) else data
        return inputs, self._draw(model, inputs, generator)

    @torch.no_grad()
    def _draw(self, model: nn.Module, inputs: Any, generator: torch.Generator) -> Tensor:
        if self.predict is not None:
            logits = self.predict(inputs)
        else:
            out = model(**inputs) if isinstance(inputs, dict) else model(inputs)
            logits = getattr(out, "logits", out)
        if not isinstance(logits, Tensor) or logits.dim() < 2:
            raise SordinoError(
                "labels drawn from the model need logits of shape (examples, ..., classes); pass predict=, or "
                "labels='given'"
            )
        if self.multilabel:
            yes = logits.float().sigmoid().cpu() if self.labels == "model" else torch.full(logits.shape, 0.5)
            return torch.bernoulli(yes, generator=generator).to(logits.device)
        probabilities = logits.float().softmax(-1).cpu()
        if self.labels == "random":
            probabilities = torch.full_like(probabilities, 1 / probabilities.shape[-1])
        flat = probabilities.reshape(-1, probabilities.shape[-1])
        drawn = torch.multinomial(flat, 1, generator=generator)
        return drawn.reshape(probabilities.shape[:-1]).to(logits.device)

    def second_moments(
        self, model: nn.Module, parameters: dict[str, Tensor], keys: Keys, examples: int | None = None
    ) -> dict[str, Tensor]:
        """E[g²] of every coordinate over the public examples, g the gradient of one example's loss."""
        from .geometry.base import Meter
        from .geometry.euclidean import Euclidean
        from .gradients.engine import Engine

        engine = Engine(model, parameters)
        total = {name: torch.zeros(p.shape, device=p.device) for name, p in parameters.items()}
        seen = 0
        for data, n in self.batches(model, keys, examples):
            if n == 1:  # ordinary autograd: there is nothing to tell apart
                for name, g in self._one(data, parameters, seen).items():
                    total[name] += g.square()
                seen += 1
                continue
            meter = Meter(Euclidean(), engine.recorder, n)
            with seeded(seen, engine.recorder.device):
                engine.measure(self.losses, data, n, n, meter)
            with torch.no_grad():
                meter.finish()
                for name, uses in meter.uses.items():
                    step = max(1, min(n, 2**24 // max(1, total[name].numel())))
                    for lo in range(0, n if uses else 0, step):
                        grad = sum(use.per_example(lo, min(n, lo + step)) for use in uses)
                        total[name] += grad.square().sum(0)  # type: ignore[union-attr]
            engine.recorder.end()
            seen += n
        return {name: v / seen for name, v in total.items()}

    def _one(self, data: Any, parameters: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
        from .gradients.engine import call
        from .gradients.recorder import check_losses

        device = next(iter(parameters.values())).device
        with seeded(seed, device), torch.enable_grad():
            value = check_losses(call(self.losses, data), 1)
            grads = torch.autograd.grad(value.sum(), list(parameters.values()), allow_unused=True)
        pairs = zip(parameters, grads, strict=True)
        return {name: (g.to_dense() if g.is_sparse else g).float() for name, g in pairs if g is not None}


LABEL_WORDS = {"model": "drawn from the model", "random": "drawn uniformly", "given": "as given"}
