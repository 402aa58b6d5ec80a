"""From a model and public data to a spectrum: exactly, or by Lanczos, quadrature and a fitted tail.

Stages that take long save themselves in the folder `resume`, and a second call with the same arguments goes on where
the first was stopped.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from ..asked import shown, whole
from ..errors import SordinoError
from .examples import model_output
from .hessian import HessianOperator
from .judged import judged, tail_end
from .lanczos import Eigenvalues, Lanczos
from .overlap import contents
from .progress import Bar
from .quadrature import Quadrature, quadrature
from .saved import Saved
from .spectrum import Spectrum, data_fingerprint, model_fingerprint
from .tail import FEWEST, fit_tail

if TYPE_CHECKING:
    from ..public import Public

EXACT = 2000  # up to so many parameters the whole Hessian is taken
SAVE_EVERY = 120.0  # seconds


def estimate_spectrum(
    model: nn.Module,
    public: Public,
    top: int = 200,
    *,
    at: nn.Module | None = None,
    method: Literal["auto", "exact", "lanczos"] = "auto",
    tail: Literal["fit", "none"] | tuple[int, float] = "fit",
    smallest: float = 1e-6,
    upper: bool = False,
    probes: int = 10,
    steps: int = 80,
    tolerance: float = 1e-4,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    examples: int | None = None,
    resume: str | Path | None = None,
    keep: int | None = None,
    show: bool = True,
) -> Spectrum:
    """The eigenvalues of the Hessian of `public`'s mean loss over the model's trainable parameters.

    At the model's own weights, or at those of `at`, a copy that `prepare` returned. ``method="auto"`` computes all of
    them for at most 2,000 parameters; otherwise the `top` largest by Lanczos, and a tail: ``"fit"`` counts the
    eigenvalues of at least `smallest` by quadrature with `probes` × `steps` products and fits NoiseCurve's Eq. 4;
    ``(p₊, μ)`` gives these two numbers instead; ``"none"`` leaves the rest at 0. `upper` lifts the fit until it bounds
    the computed part of the tail. A small tail is told from rounding only with ``dtype=torch.float64``.
    """
    _check(method, tail, top)
    operator = HessianOperator(model, public, at=at, dtype=dtype, seed=seed, examples=examples, keep=keep)
    began = time.monotonic()
    hashes = contents(public.dataset, "public examples", show)[: operator.examples.count]
    about: dict[str, Any] = {
        "size": operator.size,
        "model": model_fingerprint(model),
        "data": data_fingerprint(hashes),
        "contents": b"".join(hashes),
        "description": f"{operator.examples.count:,} public examples, labels {public.labels!r}",
    }

    def result(values: np.ndarray, source: str, computed: int, notes: tuple[str, ...], **details: Any) -> Spectrum:
        details |= {"products": operator.products, "seconds": round(time.monotonic() - began, 1)}
        return Spectrum(values, source, computed, notes=notes, details=details, **about)

    if method == "exact" or (method == "auto" and operator.size <= EXACT):
        values = _exact(operator, show)
        return result(values, "exact", len(values), _negative(values))
    _enough(model, operator, top)
    saved = Saved(resume, f"{about['model']} {about['data']} {seed} {operator.dtype} {top} {tolerance}")
    found = _lanczos(operator, top, tolerance, seed, saved, show, vectors=tail == "fit")
    values, residuals = found.values.numpy(), found.residuals.numpy()
    positive = int((values > residuals).sum())
    residual = float((residuals[:positive] / values[:positive]).max(initial=0.0))
    if positive < top:
        text = f"only {positive} of the top {top} eigenvalues are positive: there is no tail"
        return result(values, "lanczos", top, (text,), residual=residual)
    if tail == "none":
        return result(values, "lanczos", top, (), residual=residual)
    counted, extra = None, {}
    notes: tuple[str, ...]
    if isinstance(tail, tuple):
        notes, last, smallest = ("p₊ and the smallest eigenvalue as given",), tail[0], tail[1]
    else:
        counted = _quadrature(operator, probes, steps, (found.values, found.vectors), seed, saved, show)
        notes, last, smallest = tail_end(counted, operator.dtype, float(values[0]), smallest)
        extra = {"probes": probes, "steps": steps, "count": str(counted.count(smallest)), "least": counted.least}
    if last <= top:
        return result(values, "lanczos", top, (*notes, "there is no tail to fit"), residual=residual, **extra)
    fitted = fit_tail(values, last, smallest, upper)
    everything = np.concatenate([values, fitted.after(values)])
    notes += judged(fitted, counted)
    return result(everything, "lanczos + tail", top, notes, residual=residual, tail=asdict(fitted), **extra)


def _check(method: Any, tail: Any, top: Any) -> None:
    if method not in ("auto", "exact", "lanczos"):
        raise SordinoError(f"method={shown(method)} is not known; choose 'auto', 'exact' or 'lanczos'")
    pair = isinstance(tail, tuple) and len(tail) == 2
    if not pair and tail not in ("fit", "none"):
        raise SordinoError(f"tail={shown(tail)} is not known; choose 'fit', 'none', or (p₊, μ) as two numbers")
    if pair:
        whole("tail=(p₊, μ): p₊", tail[0], 1)
    if whole("top", top, 1) < FEWEST and tail != "none" and method == "lanczos":
        raise SordinoError(
            f"top={top}: a tail is fitted to at least {FEWEST} eigenvalues; ask for more, or tail='none'"
        )


def _enough(model: nn.Module, operator: HessianOperator, top: int) -> None:
    """No more eigenvalues than rows, nor than the outputs on the public examples can shape."""
    data = operator.examples
    if top > operator.size:
        raise SordinoError(
            f"top={top} eigenvalues, and the model has {operator.size:,} trainable parameters; ask for less"
        )
    with operator.in_place():
        out = model_output(model, data.batch(0))
    if out is None or out.dim() == 0 or out.shape[0] != data.sizes[0]:
        return
    most = data.count * out[0].numel()
    if top > most:
        raise SordinoError(
            f"top={top} eigenvalues from {data.count} public examples with {out[0].numel()} outputs each, which shape "
            f"at most {most} of them; give more public examples, or ask for top={most} at most"
        )


def _exact(operator: HessianOperator, show: bool) -> np.ndarray:
    total = len(operator.examples.sizes) * -(-operator.size // 64)
    done = 0
    with Bar("Hessian", show) as bar:

        def watch(batch: int, batches: int) -> None:
            nonlocal done
            done += 1
            bar(done, total)

        operator.watch = watch
        matrix = operator.dense()
    return torch.linalg.eigvalsh(matrix.double()).flip(0).cpu().numpy()


def _lanczos(
    operator: HessianOperator, top: int, tolerance: float, seed: int, saved: Saved, show: bool, vectors: bool
) -> Eigenvalues:
    search = Lanczos(operator, top, tolerance=tolerance, seed=seed)
    if (state := saved.load("lanczos")) is not None:
        search.load_state_dict(state)
    last = time.monotonic()
    with Bar("eigenvalues", show) as bar:

        def tell(done: int, wanted: int, note: str) -> None:
            nonlocal last
            bar(done, wanted, f"{note} {search.products} products")
            if time.monotonic() - last > SAVE_EVERY:
                saved.save("lanczos", search.state_dict())
                last = time.monotonic()

        try:
            found = search.run(tell, vectors)
        finally:
            saved.save("lanczos", search.state_dict())
    return found


def _quadrature(
    operator: HessianOperator, probes: int, steps: int, known: Any, seed: int, saved: Saved, show: bool
) -> Quadrature:
    state = saved.load(f"quadrature-{steps}")
    done = None
    if state is not None:
        some = {name: state[name].numpy()[:probes] for name in ("nodes", "weights")}
        done = Quadrature(**some, size=operator.size - len(known[0]), known=known[0].cpu().numpy())

    def save(so_far: Quadrature) -> None:
        arrays = {"nodes": torch.from_numpy(so_far.nodes), "weights": torch.from_numpy(so_far.weights)}
        saved.save(f"quadrature-{steps}", arrays)

    with Bar("quadrature", show) as bar:
        return quadrature(operator, probes, steps, known=known, seed=seed, done=done, saved=save, progress=bar)


def _negative(values: np.ndarray) -> tuple[str, ...]:
    count = int((values < 0).sum())
    return (f"{count} negative eigenvalues, down to {values.min():.3g}, count as 0",) if count else ()
