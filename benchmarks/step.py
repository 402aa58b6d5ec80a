"""One private step against one plain PyTorch step, side by side with Opacus, on whatever device there is.

    python benchmarks/step.py                       # every case of this device, as a table
    python benchmarks/step.py --case mlp --json     # one case, one JSON object
    python benchmarks/step.py --launch-floor        # and batches so small that only the host's work is left
    python benchmarks/step.py --profile             # and how busy the device is, and with how many launches
    python benchmarks/step.py --profile bert        # where the time goes, operation by operation

Each contestant (plain, sordino, sordino λCGD, Opacus hooks, Opacus ghost) has its own copy of the model and
takes turns step by step in one process, so that whatever else the machine does hits all of them. A figure is the
median over rounds of its time divided by the plain step of the same round; the spread is the interquartile range.
Memory is what a step adds at its peak to what lies there before it, measured with each contestant alone.
"""

from __future__ import annotations

import argparse
import builtins
import copy
import functools
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))

import sordino

warnings.filterwarnings("ignore")


@dataclass
class Case:
    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, ...]]
    losses: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    target: float  # the ratio aimed at
    made: nn.Module | None = None  # built once, copied for every contestant

    def fresh(self, device: str) -> nn.Module:
        if self.made is None:
            torch.manual_seed(0)
            self.made = self.model()
        return copy.deepcopy(self.made).to(device).train()


def classify(model: nn.Module, data: tuple[Tensor, ...]) -> Tensor:
    out = model(data[0])
    return F.cross_entropy(getattr(out, "logits", out), data[1], reduction="none")


def classify_text(model: nn.Module, data: tuple[Tensor, ...]) -> Tensor:
    """Position and type ids are passed for every example: Opacus cannot take the model's own of shape (1, T)."""
    places = torch.arange(data[0].shape[1], device=data[0].device).expand(data[0].shape).contiguous()
    out = model(data[0], position_ids=places, token_type_ids=torch.zeros_like(data[0]))
    return F.cross_entropy(out.logits, data[1], reduction="none")


class Block(nn.Module):
    """A transformer layer in plain modules, so that every library can take it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """Four layers of width 256 over 128 tokens: the usual small text classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(8000, 256), nn.Embedding(128, 256)
        self.layers, self.head = nn.Sequential(*(Block(256, 4) for _ in range(4))), nn.Linear(256, 2)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device).expand(x.shape)
        return self.head(self.layers(self.tokens(x) + self.places(places)).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def built(name: str) -> Callable[[], nn.Module]:
    from sordino.models import build

    return lambda: build(name, (3, 32, 32), 10)


def bert(lora: bool = False, **sizes: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    model = BertForSequenceClassification(config)
    if lora:
        add_lora(model, 16)
    return model


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x))


def add_lora(model: nn.Module, rank: int) -> None:
    """LoRA on query and value; the classifier stays trainable, all else is frozen."""
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("classifier"))
    for module in list(model.modules()):
        for name in ("query", "value"):
            child = getattr(module, name, None)
            if isinstance(child, nn.Linear):
                setattr(module, name, LoRA(child, rank))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )


def images(n: int, side: int = 32, channels: int = 3) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(n, channels, side, side), torch.randint(10, (n,)))


def tokens(n: int, length: int, vocabulary: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(vocabulary, (n, length)), torch.randint(2, (n,)))


def cases(device: str) -> list[Case]:
    flat = lambda n: lambda: (torch.randn(n, 784), torch.randint(10, (n,)))  # noqa: E731
    if device == "cpu":
        return [
            Case("transformer", Transformer, tokens(32, 128, 8000), classify, 1.35),
            Case("mlp", mlp, flat(512), classify, 1.6),
            Case("cnn", built("small-cnn"), images(256), classify, 1.6),
            Case("wrn", built("wrn-16-4"), images(64), classify, 1.7),
        ]
    return [
        Case("bert", bert, tokens(64, 128, 30000), classify_text, 1.25),
        Case("vit", vit, images(64, 224), classify, 1.35),
        Case("bert-lora", lambda: bert(True), tokens(64, 128, 30000), classify_text, 1.3),
        Case("mlp", mlp, flat(4096), classify, 1.5),
        Case("wrn", built("wrn-16-4"), images(512), classify, 2.0),
        Case("cnn", built("small-cnn"), images(450), classify, 2.8),
    ]


def floors(device: str) -> list[Case]:
    """The same layers with next to nothing to compute: what is left is the host's work, Python and launches."""
    narrow = {} if device == "cuda" else {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    flat = lambda: (torch.randn(4, 784), torch.randint(10, (4,)))  # noqa: E731
    return [
        Case("bert-floor", lambda: bert(**narrow), tokens(2, 8, 30000), classify_text, 2.0),
        Case("bert-lora-floor", lambda: bert(True, **narrow), tokens(2, 8, 30000), classify_text, 1.6),
        Case("mlp-floor", mlp, flat, classify, 2.5),
        Case("cnn-floor", built("small-cnn"), images(2), classify, 2.5),
    ]


# -- contestants: each returns a function that makes one step -----------------------------------------------


def plain(case: Case, model: nn.Module, data: tuple[Tensor, ...]) -> Callable[[], None]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        case.losses(model, data).mean().backward()
        optimizer.step()

    return step


def ours(noise: str) -> Callable[[Case, nn.Module, tuple[Tensor, ...]], Callable[[], None]]:
    def make(case: Case, model: nn.Module, data: tuple[Tensor, ...]) -> Callable[[], None]:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        n = len(data[0])
        private = sordino.make_private(
            model, optimizer, TensorDataset(*data), noise_multiplier=1.0, delta=1e-6, examples=10 * n, batch_size=n,
            epochs=400, noise=noise, sampling="fixed-order", seed=0,
        )  # fmt: skip
        waiting: list[Any] = []

        def ready() -> None:
            """The next batch, whole and there already, as the plain step's is."""
            batch = private._batch(private.step, np.arange(n))
            batch._fetch = lambda positions, place: data if len(positions) == n else taken(positions)
            waiting[:] = [batch]

        def taken(positions: Sequence[int]) -> tuple[Tensor, ...]:
            return tuple(t[torch.as_tensor(np.asarray(positions), device=t.device)] for t in data)

        def losses(*inputs: Tensor) -> Tensor:
            return case.losses(model, inputs)

        def step() -> None:
            if not waiting:
                ready()
            private.backward(losses, waiting.pop())
            optimizer.step()

        step.ready = ready  # type: ignore[attr-defined]
        return step

    return make


def opacus(mode: str) -> Callable[[Case, nn.Module, tuple[Tensor, ...]], Callable[[], None]]:
    def make(case: Case, model: nn.Module, data: tuple[Tensor, ...]) -> Callable[[], None]:
        from opacus import PrivacyEngine
        from torch.utils.data import DataLoader

        model.train()
        for module in model.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = False
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        loader = DataLoader(TensorDataset(*(t.cpu() for t in data)), batch_size=len(data[0]))
        common = {"module": model, "optimizer": optimizer, "data_loader": loader, "noise_multiplier": 1.0,
                  "max_grad_norm": 1.0, "poisson_sampling": False, "grad_sample_mode": mode}  # fmt: skip
        if mode == "ghost":
            criterion = nn.CrossEntropyLoss()
            module, optimizer, criterion, _ = PrivacyEngine().make_private(criterion=criterion, **common)
        else:
            module, optimizer, _ = PrivacyEngine().make_private(**common)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            if mode == "ghost":
                out = module(data[0])
                criterion(getattr(out, "logits", out), data[1]).backward()
            else:
                case.losses(module, data).mean().backward()
            optimizer.step()

        return step

    return make


CONTESTANTS: dict[str, Any] = {
    "plain": plain,
    "sordino": ours("identity"),
    "sordino λCGD": ours("lambda-cgd:0.9"),
    "opacus hooks": opacus("hooks"),
    "opacus ghost": opacus("ghost"),
    "opacus ew": opacus("ew"),
}


# -- measuring ----------------------------------------------------------------------------------------------


def finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(step: Callable[[], None], device: str) -> float:
    if hasattr(step, "ready"):
        step.ready()
    finish(device)
    start = time.perf_counter()
    step()
    finish(device)
    return time.perf_counter() - start


def prepare(case: Case, who: str, device: str) -> Callable[[], None]:
    model = case.fresh(device)
    torch.manual_seed(0)
    data = tuple(t.to(device) for t in case.data())
    step = CONTESTANTS[who](case, model, data)
    step.model = model  # type: ignore[attr-defined]
    for _ in range(3):
        step()
    return step


def peak(case: Case, who: str, device: str) -> int | None:
    """Bytes a step adds at its peak; on a GPU exact, on a CPU from torch's allocator records."""
    try:
        step = prepare(case, who, device)
    except Exception:
        return None
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        without_gradients(step)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    return cpu_peak(step)


def without_gradients(step: Callable[[], None]) -> None:
    """Every contestant starts with its gradients freed, and pays for them."""
    for p in step.model.parameters():  # type: ignore[attr-defined]
        p.grad = None
        for kept in ("grad_sample", "summed_grad"):  # Opacus leaves these for its next step to free
            if hasattr(p, kept):
                setattr(p, kept, None)
    if hasattr(step, "ready"):
        step.ready()


def cpu_peak(step: Callable[[], None]) -> int:
    """The highest point of allocated minus freed bytes, from the profiler's allocation events.

    The step before the measured one is recorded too: what it leaves, the measured one may free.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
        without_gradients(step)
        start = time.time_ns()
        step()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = top = before = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        if event.start_ns() < start:
            before = top = level
        top = max(top, level)
    return top - before


def measure(case: Case, device: str, rounds: int, who: list[str], memory: bool) -> dict[str, Any]:
    steps: dict[str, Callable[[], None]] = {}
    failed: dict[str, str] = {}
    for name in who:
        try:
            steps[name] = prepare(case, name, device)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            gc.collect()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name in list(steps):
            try:
                times[name].append(timed(steps[name], device))
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
                del steps[name]
                times.pop(name)
    if "plain" not in times:
        raise SystemExit(f"{case.name}: the plain step fails: {failed['plain']}")
    out: dict[str, Any] = {"case": case.name, "device": device, "target": case.target, "rounds": rounds, "results": {}}
    base = times["plain"]
    steps.clear()
    gc.collect()
    for name, found in times.items():
        ratios = [t / b for t, b in zip(found, base, strict=False)]
        low, _, high = statistics.quantiles(ratios, n=4)
        out["results"][name] = {
            "ms": 1e3 * statistics.median(found), "ratio": statistics.median(ratios), "iqr": [low, high],
            "peak_bytes": peak(case, name, device) if memory else None,
        }  # fmt: skip
    for name, reason in failed.items():
        out["results"][name] = {"failed": reason}
    return out


def show(result: dict[str, Any], quiet: bool) -> None:
    print = functools.partial(builtins.print, file=sys.stderr if quiet else sys.stdout, flush=True)
    print(f"\n{result['case']} on {result['device']}, target {result['target']}")
    rows = result["results"]
    base = rows["plain"].get("peak_bytes")
    for name, row in rows.items():
        if "failed" in row:
            print(f"  {name:14s} failed: {row['failed']}")
            continue
        memory = f"{row['peak_bytes'] / base:6.2f}" if base and row["peak_bytes"] else "     –"
        low, high = row["iqr"]
        print(f"  {name:14s} {row['ms']:9.2f} ms  ratio {row['ratio']:5.2f} [{low:.2f}, {high:.2f}]  memory {memory}")


def recorded(step: Callable[[], None], device: str, steps: int = 3) -> Any:
    """A profile of a few steps, each finished before the next."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=kinds) as record:
        for _ in range(steps):
            if hasattr(step, "ready"):
                step.ready()
            step()
            finish(device)
    return record


def profiled(case: Case, device: str, who: str) -> None:
    record = recorded(prepare(case, who, device), device)
    key = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    print(record.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=60))


def covered(events: list[tuple[int, int]]) -> int:
    """The length of the union of intervals (start, end)."""
    total = reach = 0
    for start, end in sorted(events):
        total += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total


def summary(case: Case, device: str, who: str) -> dict[str, Any]:
    """Of one step: when it returns to the host, how long the device is busy and with how many kernels, which are the
    longest, and how long the host waits for the device (under the profiler, which slows the host down)."""
    step, steps = prepare(case, who, device), 3
    host = []
    for _ in range(7):
        if hasattr(step, "ready"):
            step.ready()
        finish(device)
        start = time.perf_counter()
        step()
        host.append(time.perf_counter() - start)
        finish(device)
    kernels, waits, busy = [], 0, []
    kinds: dict[str, list[float]] = {}
    for event in recorded(step, device, steps).profiler.kineto_results.events():
        span = (event.start_ns(), event.start_ns() + event.duration_ns())
        if "CUDA" in str(event.device_type()) and not event.name().startswith(("Optimizer.", "ProfilerStep")):
            busy.append(span)
            if not event.name().startswith(("Memcpy", "Memset")):
                kernels.append(event.name())
                kinds.setdefault(event.name(), []).append(event.duration_ns() / 1e6 / steps)
        elif event.name() in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"):
            waits += event.duration_ns()
    longest = sorted(kinds.items(), key=lambda kind: -sum(kind[1]))[:8]
    return {
        "step_ms": 1e3 * statistics.median(host), "device_busy_ms": covered(busy) / 1e6 / steps,
        "kernels": len(kernels) / steps, "waits_ms_profiled": waits / 1e6 / steps,
        "longest": [[name[:70], len(times) / steps, sum(times)] for name, times in longest],
    }  # fmt: skip


def show_summary(case: str, who: str, found: dict[str, Any], quiet: bool) -> None:
    print = functools.partial(builtins.print, file=sys.stderr if quiet else sys.stdout, flush=True)
    print(
        f"  {case} {who}: backward and optimizer return after {found['step_ms']:.2f} ms; device busy "
        f"{found['device_busy_ms']:.2f} ms with {found['kernels']:.0f} kernels; host waits for it "
        f"{found['waits_ms_profiled']:.2f} ms (under the profiler)"
    )
    for name, count, ms in found["longest"]:
        print(f"      {ms:8.3f} ms  {count:6.0f} x  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="only these cases")
    parser.add_argument("--who", action="append", help="only these contestants beside plain")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--launch-floor", action="store_true", help="also the cases with tiny batches")
    parser.add_argument(
        "--profile", nargs="?", const="", metavar="CASE", help="with CASE: only its table of operations"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    known = {case.name: case for case in cases(device)}
    wanted = list(known)
    known.update({case.name: case for case in floors(device)})
    if options.launch_floor:
        wanted = list(known)
    if options.profile:
        for who in options.who or ["sordino"]:
            profiled(known[options.profile], device, who)
        return
    who = ["plain", *(options.who or [name for name in CONTESTANTS if name != "plain"])]
    results = []
    for name in options.case or wanted:
        case = known[name]
        result = measure(case, device, options.rounds, who, not options.no_memory)
        show(result, options.json)
        if options.profile is not None:
            found = {who: summary(case, device, who) for who in ("plain", "sordino")}
            result["profile"] = found
            for contestant, numbers in found.items():
                show_summary(name, contestant, numbers, options.json)
        results.append(result)
        case.made = None
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    if options.json:
        where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU threads"
        print(json.dumps({"device": where, "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
