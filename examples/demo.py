"""DP-SGD and λCGD on scikit-learn's digits under one budget: two guarantees, two accuracies, one picture.

Both go through the data in the same fixed order, so that the noise is all that differs. DP-SGD with Poisson sampling
stands beside them: there the secret of who is in the batch saves noise instead (and the guarantee compares other
neighbours). Learning rates were chosen for each of the three alike, from 0.2, 0.3, 0.5, 0.7, 1 and 1.5, by the mean
accuracy of five runs on 300 of the training digits; the digits are public, so that cost nothing here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from torch.utils.data import TensorDataset

import sordino
from sordino.data import load
from sordino.models import build

BUDGET = sordino.Budget(epsilon=8, delta=1e-5)
BATCH_SIZE, EPOCHS, CLIP_NORM = 150, 30, 1.0
METHODS = [  # name, noise, sampling, learning rate
    ("DP-SGD", "identity", "fixed-order", 0.3),
    ("λCGD", "lambda-cgd:0.8", "fixed-order", 0.7),
    ("DP-SGD, Poisson", "identity", "poisson", 1.0),
]


def train(noise: str, sampling: str, learning_rate: float, seed: int, tick) -> tuple[list[float], sordino.Private]:  # type: ignore[no-untyped-def]
    """One private run; the test accuracy after every epoch."""
    data, test = load("digits"), load("digits", "test")
    torch.manual_seed(seed)  # the initial weights alone: batches and noise come from a secret key
    model = build("mlp", data.input_shape, 10, hidden=[64])
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    private = sordino.make_private(
        model,
        optimizer,
        TensorDataset(*data[:]),
        budget=BUDGET,
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        clip_norm=CLIP_NORM,
        noise=noise,
        sampling=sampling,
    )

    def losses(inputs, targets):  # type: ignore[no-untyped-def]
        return F.cross_entropy(model(inputs), targets, reduction="none")

    inputs, targets = test[:]
    accuracy = []
    for batch in private.batches():
        private.backward(losses, batch)
        optimizer.step()
        if private.step % private.plan.schedule.steps_per_epoch == 0:
            with torch.no_grad():
                accuracy.append(float((model(inputs).argmax(1) == targets).float().mean()))
        tick()
    return accuracy, private


def draw(path: Path, found: dict[str, list[list[float]]], plans: dict[str, sordino.Plan]) -> None:
    """Accuracy as training goes on, and how much noise the weights have collected by then."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for name, runs in found.items():
        epochs = np.arange(1, EPOCHS + 1)
        mean, spread = np.mean(runs, 0), np.std(runs, 0)
        (line,) = left.plot(epochs, mean, label=f"{name}: {mean[-1]:.1%}")
        left.fill_between(epochs, mean - spread, mean + spread, color=line.get_color(), alpha=0.2)
        plan = plans[name]
        collected = np.linalg.norm(np.cumsum(plan.strategy.inverse(), 0), axis=1) * plan.noise_multiplier
        right.plot(np.arange(1, plan.steps + 1), collected * CLIP_NORM / BATCH_SIZE, label=name)
    left.set(xlabel="epoch", ylabel="test accuracy", ylim=(0.5, 1), title=f"Accuracy, {len(runs)} runs each")
    right.set(xlabel="step", ylabel="standard deviation per weight", title="Noise in the sum of all gradients so far")
    left.legend(loc="lower right")
    right.legend()
    figure.suptitle(f"Digits, ε = {BUDGET.epsilon:g}, δ = {BUDGET.delta:g}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="runs of each method")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the picture")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else there")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error("--runs must be at least 1")
    console = Console(stderr=arguments.json, highlight=False)
    torch.set_num_threads(1)  # the model is small: more threads only get in each other's way
    start = time.perf_counter()
    found: dict[str, list[list[float]]] = {}
    plans: dict[str, sordino.Plan] = {}
    sentences: dict[str, str] = {}
    steps = sordino.Schedule(examples=1500, batch_size=BATCH_SIZE, epochs=EPOCHS).steps
    with Progress(console=Console(stderr=True)) as bar:
        for name, noise, sampling, rate in METHODS:
            task = bar.add_task(name, total=arguments.runs * steps)

            def tick(task=task) -> None:  # type: ignore[no-untyped-def]
                bar.advance(task)

            found[name] = []
            for seed in range(arguments.runs):
                accuracy, private = train(noise, sampling, rate, seed, tick)
                found[name].append(accuracy)
            plans[name], sentences[name] = private.plan, str(private.guarantee())
    picture = arguments.out / "digits.png"
    draw(picture, found, plans)
    last = {name: [run[-1] for run in runs] for name, runs in found.items()}
    if arguments.json:
        print(json.dumps({"accuracy": last, "guarantee": sentences, "picture": str(picture)}, ensure_ascii=False))
        return
    for name, noise, sampling, rate in METHODS:
        mean, spread = statistics.mean(last[name]), statistics.stdev(last[name]) if arguments.runs > 1 else 0.0
        console.print(f"\n[bold]{name}[/bold] (noise {noise}, {sampling}, learning rate {rate:g})")
        console.print(f"  test accuracy {mean:.1%} ± {spread:.1%} over {arguments.runs} runs")
        console.print(f"  each run: {sentences[name]}")
    console.print(f"\nThe picture is {picture}; {time.perf_counter() - start:.0f} s in all.")


if __name__ == "__main__":
    main()
