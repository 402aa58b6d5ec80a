"""Mistakes. Each gives one line that names the value and the remedy, and nothing is lost."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.common import ce, make, mlp, points, sgd, step
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import sordino
from sordino import Budget, SordinoError, SordinoWarning

GOOD: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-6, "batch_size": 8, "epochs": 2, "sampling": "fixed-order"}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(points())


class Ragged(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.zeros(5 + i % 2), 0


class NoLength(Dataset):
    def __getitem__(self, i: int) -> Tensor:
        return torch.zeros(5)


def public(**options: Any) -> sordino.Public:
    return sordino.Public(points(6), ce(mlp()), **options)


# what is passed to make_private: (options, words of the message)
OPTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "epsilon negative": ({"budget": lambda: Budget(-1, 1e-5)}, ["epsilon=-1", "positive"]),
    "epsilon zero": ({"budget": lambda: Budget(0, 1e-5)}, ["epsilon=0", "positive"]),
    "epsilon NaN": ({"budget": lambda: Budget(math.nan, 1e-5)}, ["epsilon=nan", "positive"]),
    "epsilon True": ({"budget": lambda: Budget(True, 1e-5)}, ["epsilon=True", "number"]),
    "epsilon text": ({"budget": lambda: Budget("8", 1e-5)}, ["epsilon='8'", "number"]),
    "delta zero": ({"budget": lambda: Budget(1, 0)}, ["delta=0", "between 0 and 1"]),
    "delta one": ({"budget": lambda: Budget(1, 1)}, ["delta=1", "between 0 and 1"]),
    "delta NaN": ({"budget": lambda: Budget(1, math.nan)}, ["delta=nan"]),
    "budget a number": ({"budget": 8.0, "noise_multiplier": None, "delta": None}, ["budget=8.0", "Budget("]),
    "budget and noise": ({"budget": Budget(1, 1e-5)}, ["both"]),
    "neither": ({"noise_multiplier": None, "delta": None}, ["neither", "budget="]),
    "noise negative": ({"noise_multiplier": -1.0}, ["noise_multiplier=-1.0", "at least 0"]),
    "noise NaN": ({"noise_multiplier": math.nan}, ["noise_multiplier=nan"]),
    "noise infinite": ({"noise_multiplier": math.inf}, ["noise_multiplier=inf"]),
    "noise text": ({"noise_multiplier": "1"}, ["noise_multiplier='1'", "number"]),
    "delta twice": ({"budget": Budget(1, 1e-5), "noise_multiplier": None}, ["delta=", "twice"]),
    "delta text": ({"delta": "small"}, ["delta='small'", "number"]),
    "batch size zero": ({"batch_size": 0}, ["batch_size=0", "at least 1"]),
    "batch size half": ({"batch_size": 7.5}, ["batch_size=7.5", "whole number"]),
    "batch size True": ({"batch_size": True}, ["batch_size=True", "whole number"]),
    "batch size text": ({"batch_size": "8"}, ["batch_size='8'", "whole number"]),
    "batch larger than the data": ({"batch_size": 25}, ["batch_size=25", "24 examples", "at most 24"]),
    "epochs zero": ({"epochs": 0}, ["epochs=0", "at least 1"]),
    "epochs half": ({"epochs": 0.5}, ["epochs=0.5", "whole number"]),
    "examples zero": ({"examples": 0}, ["examples=0", "at least 1"]),
    "examples text": ({"examples": "all"}, ["examples='all'", "whole number"]),
    "examples too few": ({"examples": 4}, ["batch_size=8", "4 examples"]),
    "clip norm zero": ({"clip_norm": 0}, ["clip_norm=0", "positive"]),
    "clip norm negative": ({"clip_norm": -1.0}, ["clip_norm=-1.0", "positive"]),
    "clip norm infinite": ({"clip_norm": math.inf}, ["clip_norm=inf", "finite"]),
    "clip norm NaN": ({"clip_norm": math.nan}, ["clip_norm=nan"]),
    "clip norm text": ({"clip_norm": "1"}, ["clip_norm='1'"]),
    "clip norm a tensor": ({"clip_norm": torch.ones(3, 40)}, ["clip_norm=tensor"]),
    "clip norm twice": ({"clip_norm": 2.0, "clipping": lambda: sordino.Clipping(1.0)}, ["clip_norm=2.0", "twice"]),
    "clipping misspelt": ({"clipping": "layerwise"}, ["clipping='layerwise'", "'layer-wise'"]),
    "clipping None": ({"clipping": None}, ["clipping must be a name", "flat"]),
    "gamma zero": ({"clipping": lambda: sordino.Clipping(1.0, "automatic", gamma=0)}, ["gamma=0", "positive"]),
    "layers that do not add up": (
        {"clipping": lambda: sordino.Clipping(1.0, "layer-wise", layers={"0": 1.0, "2": 1.0})}, ["1.41421", "Σ ζ_l²"]),
    "layers NaN": (
        {"clipping": lambda: sordino.Clipping(1.0, "layer-wise", layers={"0": math.nan, "2": 1.0})}, ["'0'=nan"]),
    "layers unknown": (
        {"clipping": lambda: sordino.Clipping(5.0, "layer-wise", layers={"0": 3.0, "3": 4.0})}, ["'2'", "given: 0, 3"]),
    "layers too many": (
        {"clipping": lambda: sordino.Clipping(5.0, "layer-wise", layers={"0": 3.0, "2": 3.0, "x": 7**0.5})},
        ["'x'", "known: 0, 2"]),
    "layers for flat": ({"clipping": lambda: sordino.Clipping(1.0, "flat", layers={"0": 1.0})}, ["takes no layers"]),
    "noise misspelt": ({"noise": "identiy"}, ["noise='identiy'", "did you mean 'identity'"]),
    "noise without its number": ({"noise": "bisr"}, ["bisr"]),
    "noise with a bad number": ({"noise": "lambda-cgd:2"}, ["2", "lambda"]),
    "noise with a word": ({"noise": "lambda-cgd:much"}, ["much"]),
    "noise None": ({"noise": None}, ["noise", "NoneType"]),
    "sampling misspelt": ({"sampling": "poison"}, ["sampling='poison'", "did you mean 'poisson'"]),
    "sampling with an argument": ({"sampling": "poisson:3"}, ["takes no argument"]),
    "no accountant": ({"sampling": "poisson", "noise": "lambda-cgd:0.9"}, ["poisson"]),
    "accountant misspelt": ({"accountant": "prv", "noise_multiplier": None, "delta": None, "budget": Budget(1, 1e-5)},
                            ["accountant='prv'"]),
    "geometry misspelt": ({"geometry": "euclidian"}, ["geometry='euclidian'", "did you mean 'euclidean'"]),
    "geometry a number": ({"geometry": 3}, ["geometry", "int"]),
    "geometry a table without a name": ({"geometry": {"epsilon": 1}}, ["needs a name"]),
    "geometry with an unknown option": ({"geometry": {"name": "adadps", "eps": 1}}, ["'eps'", "known: epsilon"]),
    "geometry with a bad option": ({"geometry": {"name": "adadps", "epsilon": -1}}, ["epsilon=-1", "positive"]),
    "geometry with a text option": ({"geometry": {"name": "adadps", "epsilon": "x"}}, ["epsilon='x'", "positive"]),
    "geometry without its public data": ({"geometry": "adadps"}, ["geometry='adadps'", "public=sordino.Public"]),
    "denoising misspelt": ({"denoising": "shrink"}, ["denoising='shrink'", "did you mean 'shrinkage'"]),
    "denoising with an unknown option": ({"denoising": {"name": "shrinkage", "kapa": 1}}, ["'kapa'", "known: kappa"]),
    "public a data set": ({"public": points(4)}, ["public is a TensorDataset", "sordino.Public("]),
    "physical batch size zero": ({"physical_batch_size": 0}, ["physical_batch_size=0", "at least 1"]),
    "physical batch size True": ({"physical_batch_size": True}, ["physical_batch_size=True"]),
    "physical batch size text": ({"physical_batch_size": "half"}, ["physical_batch_size='half'", "'auto'"]),
    "physical batch size half": ({"physical_batch_size": 0.5}, ["physical_batch_size=0.5"]),
    "augmentations zero": ({"augmentations": 0, "augment": lambda: (lambda e: e)}, ["augmentations=0"]),
    "augmentations without augment": ({"augmentations": 4}, ["augmentations=4", "augment="]),
    "augment a number": ({"augment": 3}, ["augment=3", "function"]),
    "rows by a number": ({"augment": lambda: sordino.OnRows(3)}, ["OnRows(3)", "function"]),
    "collate a number": ({"collate": 3}, ["collate=3", "function"]),
    "workers negative": ({"workers": -1}, ["workers=-1", "at least 0"]),
    "workers text": ({"workers": "two"}, ["workers='two'"]),
    "pin_memory text": ({"pin_memory": "yes"}, ["pin_memory='yes'", "True or False"]),
    "check text": ({"check": "no"}, ["check='no'", "True or False"]),
    "seed text": ({"seed": "x"}, ["seed='x'", "whole number"]),
    "seed half": ({"seed": 0.5}, ["seed=0.5"]),
}  # fmt: skip


def one_line(error: BaseException, words: list[str]) -> None:
    text = str(error)
    assert "\n" not in text and 20 < len(text) < 500, text
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"


@contextlib.contextmanager
def untouched(model: nn.Module):
    before = {k: v.clone() for k, v in model.state_dict().items()}
    grads = [p.grad for p in model.parameters()]
    yield
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(a is b for a, b in zip(grads, (p.grad for p in model.parameters()), strict=True))


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    options, words = OPTIONS[name]
    model = mlp()
    optimizer = sgd(model)
    with untouched(model), pytest.raises(SordinoError) as error:
        chosen = {k: v() if callable(v) and type(v).__name__ == "function" else v for k, v in options.items()}
        sordino.make_private(model, optimizer, points(), **{**GOOD, **chosen})
    one_line(error.value, words)


def meta() -> nn.Module:
    return nn.Linear(5, 3, device="meta")


def sparse() -> nn.Module:
    model = nn.Linear(5, 3)
    model.weight = nn.Parameter(torch.eye(3, 5).to_sparse())
    return model


def complex_() -> nn.Module:
    model = nn.Linear(5, 3)
    model.weight = nn.Parameter(torch.zeros(3, 5, dtype=torch.complex64))
    return model


def float8() -> nn.Module:
    model = nn.Linear(5, 3)
    model.weight = nn.Parameter(torch.zeros(3, 5).to(torch.float8_e4m3fn))
    return model


def compiled_in_place() -> nn.Module:
    model = mlp()
    model.compile()
    return model


def inner_compiled() -> nn.Module:
    model = mlp()
    model[0].compile()
    return model


def tracked() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True))


MODELS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a function": (lambda: lambda x: x, ["model is a function", "torch.nn.Module"]),
    "no trainable parameter": (lambda: mlp().requires_grad_(False), ["no trainable parameter", "requires_grad_"]),
    "no parameter at all": (lambda: nn.ReLU(), ["no trainable parameter"]),
    "under torch.compile": (lambda: torch.compile(mlp()), ["torch.compile", "_orig_mod"]),
    "compiled in place": (compiled_in_place, ["Sequential", "compile()"]),
    "compiled inside": (inner_compiled, ["Linear '0'", "compile()"]),
    "scripted": (lambda: torch.jit.script(nn.Linear(5, 3)), ["TorchScript"]),
    "DataParallel": (lambda: nn.DataParallel(mlp()), ["DataParallel", "model.module"]),
    "on meta": (meta, ["'weight'", "meta device"]),
    "sparse": (sparse, ["'weight'", "sparse", "to_dense"]),
    "complex": (complex_, ["'weight'", "complex64", "view_as_complex"]),
    "float8": (float8, ["'weight'", "float8", "requires_grad_(False)"]),
    "lazy": (lambda: nn.LazyLinear(3), ["'weight'", "lazy"]),
    "batch norm": (lambda: nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), ["BatchNorm1d '1'", "GroupNorm"]),
    "tracked instance norm": (tracked, ["InstanceNorm1d '2'", "track_running_stats"]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    build, words = MODELS[name]
    model = build()
    trained = [p for p in model.parameters() if p.requires_grad] if isinstance(model, nn.Module) else []
    optimizer = torch.optim.SGD(trained or mlp().parameters(), lr=0.1)
    with pytest.raises(SordinoError) as error:
        sordino.make_private(model, optimizer, points(), **GOOD)
    one_line(error.value, words)


DATASETS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "iterable": (Stream, ["Stream", "map-style", "by number"]),
    "a generator": (lambda: (i for i in range(3)), ["generator", "__getitem__"]),
    "a loader": (lambda: DataLoader(points()), ["DataLoader", "loader.dataset"]),
    "a tuple of tensors": (lambda: points().tensors, ["tuple of 2 arrays", "TensorDataset"]),
    "a tuple of arrays": (lambda: (np.zeros((9, 5)), np.zeros(9)), ["tuple of 2 arrays"]),
    "a dict": (lambda: {"x": 1}, ["dict", "__getitem__"]),
    "text": (lambda: "train.csv", ["str"]),
    "None": (lambda: None, ["NoneType"]),
    "empty": (lambda: TensorDataset(torch.zeros(0, 5)), ["empty"]),
    "no length": (NoLength, ["NoLength"]),
}


@pytest.mark.parametrize("name", DATASETS)
def test_data_sets(name: str) -> None:
    build, words = DATASETS[name]
    model = mlp()
    with untouched(model), pytest.raises(SordinoError) as error:
        sordino.make_private(model, sgd(model), build(), **GOOD)
    one_line(error.value, words)


def holds_less(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model[0].parameters(), lr=0.1)


def holds_more(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3, 7))], lr=0.1)


def holds_another(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(mlp().parameters(), lr=0.1)


OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], Any], list[str]]] = {
    "less": (holds_less, ["'2.weight'", "not in the optimizer", "2 such", "freeze"]),
    "more": (holds_more, ["1 parameter(s)", "(3, 7)", "model.parameters()"]),
    "another model's": (holds_another, ["'0.weight'", "not in the optimizer"]),
    "a number": (lambda model: 0.1, ["optimizer is a float", "torch.optim.Optimizer"]),
    "a scheduler": (lambda m: torch.optim.lr_scheduler.ConstantLR(sgd(m)), ["ConstantLR"]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    build, words = OPTIMIZERS[name]
    model = mlp()
    with untouched(model), pytest.raises(SordinoError) as error:
        sordino.make_private(model, build(model), points(), **GOOD)
    one_line(error.value, words)


LOSSES: dict[str, tuple[Callable[[nn.Module], Any], list[str]]] = {
    "not a function": (lambda m: 3.0, ["float", "private.backward(losses, batch)"]),
    "a loss already computed": (lambda m: ce(m)(*points().tensors), ["Tensor", "function"]),
    "a scalar": (lambda m: lambda x, y: F.cross_entropy(m(x), y), ["a scalar", "reduction='none'"]),
    "None": (lambda m: lambda x, y: None, ["NoneType", "one loss per example"]),
    "a tuple": (lambda m: lambda x, y: (ce(m)(x, y), m(x)), ["tuple"]),
    "a list": (lambda m: lambda x, y: list(ce(m)(x, y)), ["list"]),
    "a number": (lambda m: lambda x, y: 0.5, ["float"]),
    "integers": (lambda m: lambda x, y: (m(x).argmax(1) == y).long(), ["int64", "floating point"]),
    "one entry too few": (lambda m: lambda x, y: ce(m)(x, y)[1:], ["(23,)", "24 rows", "(24,)"]),
    "one by class": (lambda m: lambda x, y: F.mse_loss(m(x), x[:, :3], reduction="none"), ["(24, 3)", "average"]),
    "a column": (lambda m: lambda x, y: ce(m)(x, y)[:, None], ["(24, 1)"]),
    "detached": (lambda m: lambda x, y: ce(m)(x, y).detach(), ["does not depend on any trainable parameter"]),
    "under no_grad": (lambda m: torch.no_grad()(ce(m)), ["no_grad"]),
    "complex": (lambda m: lambda x, y: ce(m)(x, y) * 1j, ["complex64"]),
    "dropped in place": (lambda m: lambda x, y: ce(m)(x.mul_(2), y), ["clone"]),
    "a second backward": (lambda m: lambda x, y: (v := ce(m)(x, y)).sum().backward() or v, ["backward()"]),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, check: bool) -> None:
    build, words = LOSSES[name]
    model = mlp()
    private = make(model, check=check, noise_multiplier=1.0, delta=1e-6)
    with pytest.raises(SordinoError) as error:
        step(private, build(model))
    one_line(error.value, [w.replace("24", "8").replace("23", "7") for w in words] if check else words)
    assert private.step == 0 and private.journal.steps == 0 and all(p.grad is None for p in model.parameters())
    step(private, ce(model))  # nothing is lost


def test_nan_losses_for_all_release_noise_alone() -> None:
    model = mlp()
    private = make(model, noise_multiplier=1.0, delta=1e-6)
    got = step(private, lambda x, y: ce(model)(x, y) * math.nan)
    assert private.last.non_finite == 24 and all(torch.isfinite(g).all() for g in got.values())


def freeze(model: nn.Module) -> None:
    model[0].weight.requires_grad_(False)


def add(model: nn.Module) -> None:
    model.add_module("head", nn.Linear(3, 3))


def replace(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())


def move(model: nn.Module) -> None:
    model.to("meta")


def compile_(model: nn.Module) -> None:
    model.compile()


LATER: dict[str, tuple[Callable[[nn.Module], None], list[str]]] = {
    "a parameter frozen": (freeze, ["'0.weight'", "before make_private"]),
    "a parameter added": (add, ["'head.bias'", "before make_private"]),
    "a parameter replaced": (replace, ["'2.weight'", "before make_private"]),
    "the model moved": (move, ["'0.weight'", "before make_private"]),
    "the model compiled": (compile_, ["compile"]),
}


@pytest.mark.parametrize("name", LATER)
def test_changes_after_make_private(name: str) -> None:
    change, words = LATER[name]
    model = mlp()
    private = make(model, noise_multiplier=1.0, delta=1e-6)
    step(private, ce(model))
    change(model)
    grads = [p.grad for p in model.parameters()]
    with pytest.raises(SordinoError) as error:
        step(private, ce(model))
    one_line(error.value, words)
    assert private.step == 1 and all(a is b for a, b in zip(grads, (p.grad for p in model.parameters()), strict=True))


def batch_of(private: sordino.Private) -> Any:
    return next(iter(private.batches()))


def test_calls_of_backward() -> None:
    model = mlp()
    private = make(model, batch_size=8, epochs=1, noise_multiplier=1.0, delta=1e-6)
    first = batch_of(private)
    for arguments, words in (
        ((first, ce(model)), ["Batch", "function"]),
        ((ce(model), first.data), ["tuple", "private.batches()"]),
        ((ce(model), None), ["NoneType", "private.batches()"]),
        ((ce(model), batch_of(make(mlp()))), ["another run", "batches()"]),
    ):
        with untouched(model), pytest.raises(SordinoError) as error:
            private.backward(*arguments)
        one_line(error.value, words)
    private.backward(ce(model), first)
    with untouched(model), pytest.raises(SordinoError) as error:
        private.backward(ce(model), first)
    one_line(error.value, ["step 0", "released already", "next: 1"])
    step(private, ce(model), 2)
    with untouched(model), pytest.raises(SordinoError) as error:
        private.backward(ce(model), first)
    one_line(error.value, ["all 3 planned steps", "new epochs"])
    private.close()


def test_examples_that_cannot_be_collated() -> None:
    model = mlp()
    private = make(model, Ragged())
    with pytest.raises(SordinoError) as error:
        step(private, ce(model))
    one_line(error.value, ["could not be collated", "collate="])

    def fails(items: list[Any]) -> Any:
        raise KeyError("label")

    with pytest.raises(SordinoError) as error:
        step(make(model, Ragged(), collate=fails), ce(model))
    one_line(error.value, ["could not be collated", "label"])


def test_an_error_of_the_users_own_code_comes_through_as_it_is() -> None:
    model = mlp()
    private = make(model)
    with pytest.raises(ZeroDivisionError):
        step(private, lambda x, y: 1 / 0)
    assert private.step == 0


PUBLIC: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "labels misspelt": (lambda: public(labels="models"), ["labels='models'", "model, random, given"]),
    "losses a number": (lambda: sordino.Public(points(), 3), ["losses=3", "function"]),
    "predict a number": (lambda: public(predict=3), ["predict=3", "function"]),
    "batch size zero": (lambda: public(batch_size=0), ["batch_size=0"]),
    "iterable": (lambda: sordino.Public(Stream(), ce(mlp())), ["public data set", "Stream"]),
    "empty": (lambda: sordino.Public(TensorDataset(torch.zeros(0, 5)), ce(mlp())), ["public data set", "empty"]),
    "examples zero": (lambda: sordino.AdaDPS(examples=0), ["examples=0", "at least 1"]),
    "epsilon infinite": (lambda: sordino.AdaDPS(math.inf), ["epsilon=inf", "1e-3"]),
    "epsilon NaN": (lambda: sordino.AdaDPS(math.nan), ["epsilon=nan"]),
    "kappa": (lambda: sordino.Shrinkage(kappa=0.5), ["kappa=0.5", "at least 1"]),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_objects(name: str) -> None:
    build, words = PUBLIC[name]
    with pytest.raises(SordinoError) as error:
        build()
    one_line(error.value, words)


def test_what_is_allowed_and_probably_not_meant_is_a_warning() -> None:
    model = mlp()
    with pytest.warns(SordinoWarning, match="delta=0.1 is not below 1/N"):
        make(model, budget=Budget(1, 0.1))
    with pytest.warns(SordinoWarning, match="public= was given"):
        make(model, public=public())
    with pytest.warns(SordinoWarning, match="correlated noise is private but usually harmful"):
        make(model, noise="lambda-cgd:0.9", denoising="shrinkage", noise_multiplier=1.0, delta=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(model, noise_multiplier=1.0, delta=1e-6)


def test_numbers_of_numpy_are_numbers() -> None:
    private = make(
        mlp(), batch_size=np.int64(8), epochs=np.int32(2), clip_norm=np.float32(0.5), physical_batch_size=np.int64(4)
    )
    assert private.steps == 6 and type(private.plan.schedule.batch_size) is int and private.clipping.bound == 0.5


def test_there_are_fifty_at_least() -> None:
    assert sum(map(len, (OPTIONS, MODELS, DATASETS, OPTIMIZERS, LOSSES, LATER, PUBLIC))) > 110
