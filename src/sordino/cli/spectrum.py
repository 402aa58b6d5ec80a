"""``sordino spectrum``: a model and public data → the eigenvalues of the loss's Hessian. Touches nothing private.

The stages save themselves beside the result, and the same command goes on after a stop.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from ..curvature import Spectrum, draw_spectrum, estimate_spectrum, prepare
from ..data import Arrays, load
from ..errors import SordinoError, StateError
from ..models import build
from ..public import Public
from . import setup
from .config import override, read_toml
from .output import err, out, to_json

Preparation = Literal["random-labels", "simclr", "given-labels", "none"]
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Asked:
    """What the eigenvalues depend on."""

    public: str
    label: str
    size: int | None
    examples: int | None
    classes: int | None
    model: dict[str, Any]
    preparation: str
    epochs: int
    top: int
    dtype: str
    seed: int

    def check(self) -> None:
        if self.preparation not in get_args(Preparation):
            known = ", ".join(get_args(Preparation))
            raise SordinoError(f"--preparation {self.preparation!r} is not known; choose one of: {known}")
        if self.dtype not in DTYPES:
            raise SordinoError(f"--dtype {self.dtype!r} is not known; choose float32 or float64")

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


def asked(config: Path | None, overrides: Sequence[tuple[str, Any]], **options: Any) -> Asked:
    """The ``[model]``, ``[public]`` and seed of a run's TOML, and what is given in their place."""
    tables = override(read_toml(config) if config is not None else {}, overrides)
    public = tables.get("public", {})
    public = {"path": public} if isinstance(public, str) else public
    model = tables.get("model", "mlp")
    model = {"name": model} if isinstance(model, str) else model
    if "path" not in public:
        raise SordinoError("--public missing: the public data the curvature is learnt from; it needs no labels")
    seed = options.pop("seed")
    wanted = Asked(
        public=public["path"],
        label=public.get("label", "label"),
        size=public.get("size"),
        model={"name": "mlp", **model},
        seed=int(tables.get("seed", 0)) if seed is None else seed,
        **options,
    )
    wanted.check()
    return wanted


def spectrum(wanted: Asked, path: Path, picture: Path | None, as_json: bool) -> None:
    if path.exists():
        raise SordinoError(f"--out {str(path)!r} is there already; choose another, or delete it")
    data = _public(wanted)
    model = _model(wanted, data)
    labels = "given" if wanted.preparation == "given-labels" else "random"
    public = Public(setup.tensors(data), losses=setup.make_losses(model), labels=labels, batch_size=256)
    folder = path.with_name(f"{path.name}.{wanted.digest}.partial")
    try:
        ready = _prepared(model, public, wanted, folder)
        found = estimate_spectrum(
            model,
            public,
            wanted.top,
            at=ready,
            dtype=DTYPES[wanted.dtype],
            seed=wanted.seed,
            examples=wanted.examples,
            resume=folder,
        )
    except KeyboardInterrupt:
        if folder.exists():
            err().print(f"Stopped; what was done is in {folder}. The same command goes on from there.")
        raise
    found = _described(found, wanted)
    found.save(path)
    drawn = draw_spectrum(found, path.with_suffix(".png") if picture is None else picture)
    shutil.rmtree(folder, ignore_errors=True)
    _show(found, wanted, path, drawn, as_json)


def _public(wanted: Asked) -> Arrays:
    data = load(wanted.public, label=wanted.label, size=wanted.size, unlabelled=True)
    assert data is not None
    if wanted.examples is not None and wanted.examples < len(data):
        data = data.subset(list(range(wanted.examples)))
    if wanted.classes is None and not data.classes:
        raise SordinoError(f"{wanted.public} has no labels; say how many classes the private data has: --classes 10")
    return data


def _model(wanted: Asked, data: Arrays) -> nn.Module:
    options = {key: value for key, value in wanted.model.items() if key != "name"}
    torch.manual_seed(wanted.seed)
    model = build(wanted.model["name"], data.input_shape, wanted.classes or len(data.classes), **options)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def _prepared(model: nn.Module, public: Public, wanted: Asked, folder: Path) -> nn.Module:
    """The model where its curvature is taken, from an earlier attempt if there was one."""
    kept = folder / "prepared.pt"
    if wanted.preparation == "none":
        return model
    if kept.exists():
        try:
            state = torch.load(kept, weights_only=True, map_location="cpu")
            ready = prepare(model, public, "none")
            ready.load_state_dict(state)
        except Exception as error:  # whatever a broken file makes torch raise
            raise StateError(f"{kept} cannot be read ({str(error).splitlines()[0][:80]}); delete {folder}") from None
        return ready
    ready = prepare(
        model,
        public,
        wanted.preparation,  # type: ignore[arg-type]  # checked above
        epochs=wanted.epochs,
        seed=wanted.seed,
    )
    folder.mkdir(parents=True, exist_ok=True)
    partial = kept.with_suffix(".partial")
    torch.save(ready.state_dict(), partial)
    partial.replace(kept)
    return ready


def _described(found: Spectrum, wanted: Asked) -> Spectrum:
    from dataclasses import replace

    name = Path(wanted.public).name
    return replace(
        found,
        description=f"{found.description} of {name}, model {wanted.model['name']}, preparation {wanted.preparation}",
        details={**found.details, "asked": asdict(wanted)},
    )


def _show(found: Spectrum, wanted: Asked, path: Path, picture: Path, as_json: bool) -> None:
    if as_json:
        result = {
            "spectrum": str(path),
            "picture": str(picture),
            "eigenvalues": len(found),
            "computed": found.computed,
            "source": found.source,
            "largest": found.largest,
            "trace": found.trace,
            "stable_learning_rate": 2.0 / found.largest,
            "notes": list(found.notes),
            "details": dict(found.details),
        }
        print(to_json(result))
        return
    out().print(found.describe())
    for note in found.notes:
        out().print(note)
    out().print(f"The spectrum is in {path}, the picture in {picture}")
    out().print(
        f"Learning rates up to {2.0 / found.largest:.3g} are stable at this curvature. Next: sordino plan … "
        f"--noise noise-curve:16 --spectrum {path} --learning-rate η",
    )
