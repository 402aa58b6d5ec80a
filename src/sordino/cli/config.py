"""The configuration of ``sordino train``: what may stand in the TOML file, and what is said when something else does.

The top level has the names of `make_private`; ``[data]``, ``[model]``, ``[optimizer]`` and ``[public]`` are tables. A
table with one obvious key may be written as that key's value: ``model = "mlp"``.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..errors import SordinoError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=True)


def _short(key: str, value: Any) -> Any:
    return {key: value} if isinstance(value, str) else value


class Data(_Table):
    """The private data, and what is public beside it."""

    path: str = Field("digits", description="digits, a fetched set, or a file or folder of your own")
    test: str | None = Field(None, description="public test data; a built-in set brings its own")
    label: str = Field("label", description="the label's column in CSV and Parquet")
    size: int | None = Field(None, ge=1, description="what images of a folder are resized to, in pixels")
    validation: float = Field(0.0, ge=0, lt=1, description="share of the private data that is kept for validation")


class Model(BaseModel):
    """A built-in model and its options."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str = "mlp"


class Optimizer(_Table):
    name: Literal["sgd", "adam", "adamw"] = "sgd"
    learning_rate: float = Field(0.5, gt=0, allow_inf_nan=False)
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _momentum_is_of_sgd(self) -> Optimizer:
        if self.momentum and self.name != "sgd":
            raise ValueError(f"momentum={self.momentum} goes with name='sgd', not with {self.name!r}")
        return self


class PublicData(_Table):
    """Data that costs no privacy."""

    path: str
    labels: Literal["model", "random", "given"] = "model"
    label: str = "label"
    size: int | None = Field(None, ge=1)


class Config(_Table):
    """One run."""

    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None = Field(None, ge=0, description="instead of epsilon, for research")
    batch_size: int = Field(250, ge=1, description="the expected batch size")
    epochs: int = Field(20, ge=1)
    examples: int | None = Field(None, ge=1, description="a public number of examples; by default the data's own")
    clip_norm: float = Field(1.0, gt=0, allow_inf_nan=False)
    clipping: str = "flat"
    noise: str = "identity"
    spectrum: str | None = Field(None, description="eigenvalues that shape noise-curve, made by sordino spectrum")
    exact_curvature: bool = Field(False, description="eigenvalues beyond one over the learning rate as they are")
    allow_overlap: bool = Field(False, description="public examples may be private ones too")
    noise_storage: Literal["auto", "regenerate", "device", "host"] = Field(
        "auto", description="where the past lives that correlated noise needs; the noise is the same"
    )
    sampling: str = "poisson"
    accountant: str | None = None
    geometry: str | dict[str, Any] = "euclidean"
    denoising: str | dict[str, Any] = "none"
    physical_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    checkpoint_every: int = Field(1, ge=1, description="epochs between two checkpoints")
    seed: int | None = Field(None, description="a public seed, for research: the guarantee then says none")
    data: Data = Data()
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    public: PublicData | None = None

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            value = dict(value)
            for table, key in (("data", "path"), ("model", "name"), ("optimizer", "name"), ("public", "path")):
                if table in value:
                    value[table] = _short(key, value[table])
        return value

    @field_validator("epsilon", "noise_multiplier", "clip_norm", "delta", mode="before")
    @classmethod
    def _whole_numbers_are_numbers(cls, value: Any) -> Any:
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _one_budget(self) -> Config:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            which = "epsilon is missing" if self.epsilon is None else "epsilon and noise_multiplier are both given"
            raise ValueError(f"{which}; give one of the two: epsilon=8 with delta=1e-5 is usual")
        if self.epsilon is not None and self.delta is None:
            raise ValueError("delta is missing; choose it well under one over the number of examples, such as 1e-5")
        return self

    def as_toml(self) -> dict[str, Any]:
        """Without what is not set: TOML has no null."""
        return self.model_dump(exclude_none=True)


def parse_assignment(text: str) -> tuple[str, Any]:
    """``key=value`` of ``--set``; the value is TOML, or else a string.

    >>> parse_assignment("model.hidden=[64, 32]")
    ('model.hidden', [64, 32])
    >>> parse_assignment("noise=lambda-cgd:0.9")
    ('noise', 'lambda-cgd:0.9')
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SordinoError(f"--set {text!r} must be written key=value, such as --set optimizer.learning_rate=0.5")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SordinoError(f"configuration {str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SordinoError(f"configuration {str(path)!r} is not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise SordinoError(f"configuration {str(path)!r} is not valid TOML: {error}") from error


def override(tables: dict[str, Any], assignments: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """`tables` with dotted keys set; shorthands are spelled out where a key goes below them."""
    tables = {key: dict(value) if isinstance(value, dict) else value for key, value in tables.items()}
    for key, value in assignments:
        table, dot, inner = key.partition(".")
        if not dot:
            tables[key] = value
            continue
        held = tables.get(table, {})
        if isinstance(held, str):
            held = {"name" if table in ("model", "optimizer", "geometry", "denoising") else "path": held}
        if not isinstance(held, dict):
            raise SordinoError(f"{key}: {table} is {held!r}, not a table")
        tables[table] = {**held, inner: value}
    return tables


def validate(tables: Mapping[str, Any], where: str = "configuration") -> Config:
    """A `Config`, or an error that names the key and what is allowed there."""
    try:
        return Config.model_validate(dict(tables))
    except ValidationError as error:
        raise SordinoError(f"{where}: {_first(error)}") from None


# How pydantic names the members of "int or 'auto'" and "str or table" in the location of an error.
_MEMBERS = ("int", "str", "dict[", "literal[", "constrained-")
_PLAIN = {
    "Input should be ": "it should be ",
    "a valid dictionary or instance of ": "a name or the table ",
    "a valid dictionary": "a table",
    "a valid string": "text",
    "a valid integer": "a whole number",
    "a valid number": "a number",
}


def _in_words(message: str) -> str:
    for theirs, ours in _PLAIN.items():
        message = message.replace(theirs, ours)
    return message


def _first(error: ValidationError) -> str:
    """One line for the first thing that is wrong."""
    # Unknown keys first: a misspelt key also looks like a missing one.
    problems = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    problem = problems[0]
    location = [str(part) for part in problem["loc"] if not str(part).endswith("]")]
    # A union ("int or 'auto'") reports one error a member, each under the member's own name.
    location = [part for part in location if not part.startswith(_MEMBERS)]
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        known = _known(location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"unknown key {key!r}; {hint}known: {', '.join(known)}"
    if problem["type"] == "missing":
        return f"{key} is missing"
    if problem["type"] == "value_error":
        message = problem["msg"].removeprefix("Value error, ")
        return f"{key}: {message}" if key else message
    members = [p for p in problems if p["loc"][0] == problem["loc"][0] and p["loc"] != problem["loc"]]
    message = " or ".join(
        [_in_words(problem["msg"]), *(_in_words(p["msg"]).removeprefix("it should be ") for p in members)]
    )
    return f"{key}={problem['input']!r}: {message}"


def _known(location: Sequence[str]) -> list[str]:
    model: type[BaseModel] = Config
    for part in location:
        annotation = model.model_fields[part].annotation
        options = (annotation, *get_args(annotation))
        model = next(a for a in options if isinstance(a, type) and issubclass(a, BaseModel))
    return list(model.model_fields)
