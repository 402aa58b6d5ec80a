"""The verbs and their options. What they do is imported when they run, so that ``--help`` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="sordino",
    help="Differentially private training for PyTorch.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Examples = Annotated[int | None, typer.Option(help="N, the number of private examples (a public constant).")]
BatchSize = Annotated[int | None, typer.Option(help="B, the expected batch size.")]
Epochs = Annotated[int | None, typer.Option(help="How often the data is gone through.")]
Delta = Annotated[float | None, typer.Option(help="δ of the (ε, δ) guarantee, well under 1/N.")]
Sampling = Annotated[str, typer.Option(help="Who is in the batch: poisson, fixed-order, balls-in-bins, …")]
Parameters = Annotated[
    int | None,
    typer.Option(help="Trainable parameters: the reach of the noise then counts in δ, and memory is told."),
]
Accountant = Annotated[str, typer.Option(help="auto, or one by name.")]
Momentum = Annotated[float, typer.Option(help="Momentum of SGD: the noise is summed with it.")]
WeightDecay = Annotated[float, typer.Option(help="Weight decay, apart from the gradient; needs --learning-rate.")]
LearningRate = Annotated[float | None, typer.Option(help="Learning rate, for --weight-decay and --spectrum.")]
LearningRates = Annotated[
    str | None,
    typer.Option(help="How the learning rate moves: linear, cosine, cosine:0.1, or a file, a number a step."),
]
Objective = Annotated[
    str | None, typer.Option(help="What optimised noise minimises: rmse, max-se, or curvature (with --spectrum).")
]
Spectrum = Annotated[
    Path | None, typer.Option(help="Eigenvalues from public data (sordino spectrum); needs --learning-rate.")
]
ExactCurvature = Annotated[
    bool, typer.Option("--exact-curvature", help="Eigenvalues beyond one over the learning rate as they are.")
]
Picture = Annotated[Path | None, typer.Option(help="Draw a picture into this file (.png, .svg, .pdf).")]


def _version(value: bool) -> None:
    if value:
        from .. import __version__

        print(f"sordino {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def plan(
    examples: Examples = None,
    batch_size: BatchSize = None,
    epochs: Epochs = None,
    epsilon: Annotated[float | None, typer.Option(help="ε that may be spent.")] = None,
    delta: Delta = None,
    noise: Annotated[
        str | None, typer.Option(help="identity, lambda-cgd:0.95, …; without it everything is compared.")
    ] = None,
    sampling: Annotated[
        str | None, typer.Option(help="Who is in the batch: poisson (if only --noise is given), fixed-order, …")
    ] = None,
    parameters: Parameters = None,
    accountant: Accountant = "auto",
    momentum: Momentum = 0.0,
    weight_decay: WeightDecay = 0.0,
    learning_rate: LearningRate = None,
    learning_rates: LearningRates = None,
    objective: Objective = None,
    spectrum: Spectrum = None,
    exact_curvature: ExactCurvature = False,
    picture: Picture = None,
    list_: Annotated[bool, typer.Option("--list", help="What there is to choose from.")] = False,
    as_json: Json = False,
) -> None:
    """How much noise a budget needs, and what it costs. Touches no data."""
    from . import plan as verb

    if list_:
        verb.show_choices(as_json)
        return
    schedule = verb.schedule(examples=examples, batch_size=batch_size, epochs=epochs)
    budget = verb.budget(epsilon, delta)
    from .workload import curvature, workload

    summed = workload(momentum, weight_decay, learning_rate, learning_rates, schedule.steps)
    curved = curvature(spectrum, learning_rate, exact_curvature, summed)
    if noise is None:
        from .comparison import show_comparison

        show_comparison(budget, schedule, sampling, parameters, summed, objective, curved, picture, as_json)
    else:
        verb.show_plan(
            budget,
            schedule,
            noise,
            sampling or "poisson",
            parameters,
            accountant,
            summed,
            objective,
            curved,
            picture,
            as_json,
        )


@app.command()
def account(
    examples: Examples = None,
    batch_size: BatchSize = None,
    epochs: Epochs = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Standard deviation of the entries of Z, in units of the clip norm.")
    ] = None,
    delta: Delta = None,
    noise: Annotated[str, typer.Option(help="identity, lambda-cgd:0.95, …")] = "identity",
    sampling: Sampling = "poisson",
    steps: Annotated[int | None, typer.Option(help="Only the first so many steps.")] = None,
    parameters: Parameters = None,
    accountant: Accountant = "auto",
    momentum: Momentum = 0.0,
    weight_decay: WeightDecay = 0.0,
    learning_rate: LearningRate = None,
    learning_rates: LearningRates = None,
    objective: Objective = None,
    spectrum: Spectrum = None,
    exact_curvature: ExactCurvature = False,
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """What a noise multiplier costs: the inverse of plan."""
    from . import plan as verb

    schedule = verb.schedule(examples=examples, batch_size=batch_size, epochs=epochs)
    from .workload import curvature, workload

    summed = workload(momentum, weight_decay, learning_rate, learning_rates, schedule.steps)
    curved = curvature(spectrum, learning_rate, exact_curvature, summed)
    verb.show_account(
        noise_multiplier,
        delta,
        schedule,
        noise,
        sampling,
        steps,
        parameters,
        accountant,
        summed,
        objective,
        curved,
        picture,
        as_json,
    )


@app.command()
def spectrum(
    config: Annotated[
        Path | None, typer.Argument(help="A run's TOML file: its model, public data and seed; options override it.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The file of eigenvalues.")] = Path("spectrum.npz"),
    public: Annotated[str | None, typer.Option(help="Public data: a fetched set, or a file or folder.")] = None,
    model: Annotated[str | None, typer.Option(help="A built-in model; sordino plan --list names them.")] = None,
    classes: Annotated[
        int | None, typer.Option(min=1, help="Classes of the private data, where the public has others or no labels.")
    ] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="Only the first so many public examples.")] = None,
    preparation: Annotated[
        str, typer.Option(help="Bring the model to training's curvature: random-labels, simclr, given-labels or none.")
    ] = "random-labels",
    preparation_epochs: Annotated[int, typer.Option(min=1, help="How long.")] = 10,
    top: Annotated[int, typer.Option(min=1, help="So many eigenvalues are computed; the others are fitted.")] = 200,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    seed: Annotated[int | None, typer.Option(help="Of weights, drawn labels and probes; all of it is public.")] = None,
    picture: Annotated[Path | None, typer.Option(help="By default beside --out.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any other key: --set model.dense=128")] = None,
    as_json: Json = False,
) -> None:
    """Eigenvalues of the loss's Hessian on public data. Touches nothing private."""
    from . import spectrum as verb
    from .config import parse_assignment

    options = {"public.path": public, "model.name": model}
    given = [(key, value) for key, value in options.items() if value is not None]
    wanted = verb.asked(
        config,
        [*given, *map(parse_assignment, set_ or [])],
        classes=classes,
        examples=examples,
        preparation=preparation,
        epochs=preparation_epochs,
        top=top,
        dtype=dtype,
        seed=seed,
    )
    verb.spectrum(wanted, out, picture, as_json)


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; options below override it.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; by default a new one under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    data: Annotated[str | None, typer.Option(help="digits, a fetched set, or a file or folder.")] = None,
    test: Annotated[str | None, typer.Option(help="Public test data.")] = None,
    model: Annotated[str | None, typer.Option(help="A built-in model; sordino plan --list names them.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="ε that may be spent.")] = None,
    delta: Delta = None,
    batch_size: BatchSize = None,
    epochs: Epochs = None,
    learning_rate: Annotated[float | None, typer.Option(help="The optimizer's.")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="ζ, the bound on one example's gradient.")] = None,
    noise: Annotated[str | None, typer.Option(help="identity, lambda-cgd:0.95, …")] = None,
    sampling: Annotated[str | None, typer.Option(help="poisson, fixed-order, balls-in-bins, …")] = None,
    spectrum: Annotated[str | None, typer.Option(help="Eigenvalues from sordino spectrum, for noise-curve.")] = None,
    geometry: Annotated[str | None, typer.Option(help="The space to clip in: euclidean, adadps, …")] = None,
    denoising: Annotated[str | None, typer.Option(help="none or shrinkage.")] = None,
    public: Annotated[str | None, typer.Option(help="Public data, where a choice needs it.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any other key: --set optimizer.momentum=0.9")] = None,
    as_json: Json = False,
) -> None:
    """Train a built-in model on your data. A run is one folder."""
    from .config import parse_assignment
    from .train import train as verb

    options = {
        "data.path": data,
        "data.test": test,
        "model.name": model,
        "epsilon": epsilon,
        "delta": delta,
        "batch_size": batch_size,
        "epochs": epochs,
        "optimizer.learning_rate": learning_rate,
        "clip_norm": clip_norm,
        "noise": noise,
        "spectrum": spectrum,
        "sampling": sampling,
        "geometry": geometry,
        "denoising": denoising,
        "public.path": public,
    }
    given = [(key, value) for key, value in options.items() if value is not None]
    code = verb(config, [*given, *map(parse_assignment, set_ or [])], out, resume, as_json)
    if code:
        raise typer.Exit(code)


@app.command()
def data(
    names: Annotated[
        list[str] | None, typer.Argument(help="cifar10, fashion-mnist, mnist; none: what is there.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Fetch even what is there.")] = False,
    as_json: Json = False,
) -> None:
    """Fetch and verify public image sets."""
    from .data import data as verb

    verb(names or [], everything, again, as_json)
