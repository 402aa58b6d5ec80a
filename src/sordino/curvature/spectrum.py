"""A spectrum: eigenvalues of the Hessian of the mean loss on public data, largest first, none negative.

It remembers whose it is, so that it is not used for another model: a fingerprint of the names and shapes of the
trainable parameters (not of their values: the spectrum of a prepared model serves the run that starts anywhere), and
one of the public examples. Saved as an ``.npz`` with the array `eigenvalues`; any other ``.npz`` with a
one-dimensional `eigenvalues` can be loaded too.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ..errors import SordinoError
from .weights import parameter_names

SOURCES = ("exact", "lanczos", "lanczos + tail", "given")


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues, how they were obtained, and of what.

    >>> Spectrum.given([3.0, 1.0, -0.5]).eigenvalues
    array([3., 1., 0.])
    """

    eigenvalues: np.ndarray
    source: str = "given"
    computed: int = 0  # so many were computed; the others are a fitted tail
    size: int | None = None  # d, where it is known: the eigenvalues left out are 0
    model: str = ""  # fingerprint of the parameter set
    data: str = ""  # fingerprint of the public data
    description: str = ""
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)  # numbers of the tail, the counts, the cost
    contents: bytes = field(default=b"", repr=False)  # 16 bytes for each public example, to know it again

    def __post_init__(self) -> None:
        try:
            values = np.asarray(self.eigenvalues, dtype=np.float64)
        except (TypeError, ValueError):
            raise SordinoError("eigenvalues must be real numbers") from None
        if values.ndim != 1 or not len(values):
            raise SordinoError(f"eigenvalues have shape {values.shape}; needed is a list of at least one number")
        if not np.isfinite(values).all():
            raise SordinoError(f"eigenvalue {int((~np.isfinite(values)).argmax())} is not a finite number")
        if values.max() <= 0:
            raise SordinoError(
                f"all eigenvalues are ≤ 0 (the largest is {values.max():.3g}), so there is no curvature to shape noise "
                "by; prepare the model on the public data (random labels), or use noise='band-mf-general'"
            )
        if self.size is not None and self.size < len(values):
            raise SordinoError(f"{len(values)} eigenvalues of a matrix with {self.size} rows; they cannot be more")
        ordered = np.sort(np.maximum(values, 0.0))[::-1].copy()
        ordered.flags.writeable = False
        object.__setattr__(self, "eigenvalues", ordered)

    @classmethod
    def given(cls, eigenvalues: Any, description: str = "") -> Spectrum:
        """Eigenvalues from elsewhere; negative ones count as 0."""
        values = np.asarray(eigenvalues)
        return cls(values, "given", computed=values.size, description=description)

    def __len__(self) -> int:
        return len(self.eigenvalues)

    @property
    def largest(self) -> float:
        return float(self.eigenvalues[0])

    @property
    def trace(self) -> float:
        return float(self.eigenvalues.sum())

    def check_model(self, model: nn.Module) -> None:
        """An error if this is the spectrum of another parameter set."""
        names = parameter_names(model)
        size = sum(int(np.prod(shape)) for shape in names.values())
        if self.model and self.model != model_fingerprint(model):
            of = f" ({self.description})" if self.description else ""
            raise SordinoError(
                f"the spectrum is of another set of trainable parameters{of}, and this model has {len(names)} tensors "
                f"with {size:,} numbers; estimate it for this model: sordino.curvature.estimate_spectrum(model, public)"
            )
        if len(self) > size:
            raise SordinoError(
                f"the spectrum has {len(self):,} eigenvalues, and the model {size:,} trainable parameters"
            )

    def describe(self) -> str:
        """One line for a report."""
        how = {
            "exact": f"all {len(self):,} eigenvalues computed",
            "lanczos": f"the top {self.computed:,} eigenvalues computed",
            "lanczos + tail": f"the top {self.computed:,} eigenvalues computed, {len(self) - self.computed:,} fitted",
            "given": f"{len(self):,} eigenvalues as given",
        }[self.source]
        return f"{how}{', ' + self.description if self.description else ''}; the largest {self.largest:.4g}"

    # -- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> Path:
        path = Path(path)
        about = {
            "format": "sordino-spectrum-1",
            **{name: getattr(self, name) for name in ("source", "computed", "size", "model", "data", "description")},
            "notes": list(self.notes),
            "details": dict(self.details),
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                known = np.frombuffer(self.contents, dtype=np.uint8)
                text = np.array(json.dumps(about, ensure_ascii=False))
                np.savez(file, eigenvalues=self.eigenvalues, metadata=text, contents=known)
        except OSError as error:
            raise SordinoError(f"cannot write the spectrum to {path}: {error.strerror or error}") from None
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Spectrum:
        try:
            arrays = np.load(path, allow_pickle=False)
            if isinstance(arrays, np.ndarray):
                raise SordinoError(f"{path} is one array without a name; save it by np.savez(path, eigenvalues=array)")
            with arrays:
                if "eigenvalues" not in arrays.files:
                    held = ", ".join(arrays.files) or "none"
                    raise SordinoError(
                        f"{path} has no array 'eigenvalues' (arrays: {held}); make one with sordino spectrum"
                    )
                values = arrays["eigenvalues"]
                text = str(arrays["metadata"]) if "metadata" in arrays.files else ""
                known = arrays["contents"].tobytes() if "contents" in arrays.files else b""
        except FileNotFoundError:
            raise SordinoError(f"no spectrum at {path}; make one with sordino spectrum") from None
        except SordinoError:
            raise
        except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
            raise SordinoError(
                f"{path} is not an .npz of plain numbers ({' '.join(str(error).split())[:80]})"
            ) from None
        if values.dtype.kind not in "fiu":
            raise SordinoError(f"{path}: eigenvalues are of type {values.dtype}; real numbers are needed")
        try:
            about = json.loads(text) if text else {}
        except json.JSONDecodeError:
            about = {}
        if not isinstance(about, dict) or about.get("format") != "sordino-spectrum-1":
            return cls.given(values, f"from {Path(path).name}")
        about.pop("format")
        return cls(values, **{**about, "notes": tuple(about["notes"]), "contents": known})


def model_fingerprint(model: nn.Module) -> str:
    """Of the names and shapes of the trainable parameters."""
    names = sorted((name, list(shape)) for name, shape in parameter_names(model).items())
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]


def data_fingerprint(hashes: list[bytes]) -> str:
    """Of a set of examples, in any order."""
    return hashlib.sha256(b"".join(sorted(hashes))).hexdigest()[:16]
