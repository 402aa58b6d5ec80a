"""Nanoseconds per normal: torch.randn, secure normals, and DP-λCGD's two-term replay, side by side in one run.

    python benchmarks/noise.py                    # the CPU, and a GPU if there is one
    python benchmarks/noise.py --json
    python benchmarks/noise.py --device cuda --sweep

Every repeat times all rows in turn, so that other work on the machine falls on all alike;
shown are the median and the quartiles. `added` rows add to a tensor in place, as a step does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from sordino.noise import Stream, add_many_normals_, add_normals_

KEY = bytes(range(32))
ONE = [(KEY, 5, 1.3)]
TWO = [(KEY, 5, 1.3), (KEY, 4, -1.2)]
LAYERS = {"768x768": (589_824, 48), "3072x768": (2_359_296, 24), "embedding": (23_440_896, 1), "bias": (768, 120)}


def measure(rows: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, list[float]]:
    """Seconds of every repeat of every row, the rows taking turns."""
    for row in rows.values():
        row()
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(repeats):
        for name, row in rows.items():
            if device == "cuda":
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                begin.record()
                row()
                end.record()
                torch.cuda.synchronize()
                times[name].append(begin.elapsed_time(end) / 1e3)
            else:
                start = time.perf_counter()
                row()
                times[name].append(time.perf_counter() - start)
    return times


def summary(times: dict[str, list[float]], count: int, baseline: str) -> dict[str, dict[str, Any]]:
    base = statistics.median(times[baseline])
    found: dict[str, dict[str, Any]] = {}
    for name, seconds in times.items():
        low, middle, high = statistics.quantiles(seconds, n=4)
        found[name] = {
            "ms": 1e3 * middle,
            "ns_per_normal": 1e9 * middle / count,
            "quartiles_ns": [1e9 * low / count, 1e9 * high / count],
            "ratio": middle / base,
            # of each repeat's own pair, where other work comes and goes
            "ratio_paired": statistics.median(a / b for a, b in zip(seconds, times[baseline], strict=True)),
        }
    return found


def on_cpu(count: int, repeats: int) -> dict[str, Any]:
    out, stream = torch.zeros(count), Stream(KEY)
    rows: dict[str, Callable[[], object]] = {
        "torch.randn": lambda: torch.randn(count),
        "torch.randn, added": lambda: out.add_(torch.randn(count), alpha=1.3),
        "secure, a new tensor": lambda: stream.normals(5, "w", 0, count),
        "secure, added": lambda: add_normals_(out, ONE, "w"),
        "secure, added, two terms": lambda: add_normals_(out, TWO, "w"),
    }
    return {
        "device": f"CPU, {torch.get_num_threads()} threads",
        "count": count,
        "rows": summary(measure(rows, repeats, "cpu"), count, "torch.randn"),
    }


def on_gpu(count: int, repeats: int, sweep: bool) -> dict[str, Any]:
    from sordino.noise import triton_kernel as kernel

    out = torch.zeros(count, device="cuda")
    rows: dict[str, Callable[[], object]] = {
        "torch.randn": lambda: torch.randn(count, device="cuda"),
        "torch.randn, added": lambda: out.add_(torch.randn(count, device="cuda"), alpha=1.3),
        "secure, added": lambda: add_normals_(out, ONE, "w"),
        "secure, added, two terms": lambda: add_normals_(out, TWO, "w"),
    }
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "count": count,
        "rows": summary(measure(rows, repeats, "cuda"), count, "torch.randn, added"),
    }
    # A model's worth of tensors: one launch, against one for each, against torch.
    model = {f"{n}.{i}": torch.zeros(s, device="cuda") for n, (s, times) in LAYERS.items() for i in range(times)}
    total = sum(t.numel() for t in model.values())

    def each() -> None:
        for name, tensor in model.items():
            add_normals_(tensor, ONE, name)

    rows = {
        "torch.randn, added": lambda: [t.add_(torch.randn_like(t), alpha=1.3) for t in model.values()],
        "secure, one launch": lambda: add_many_normals_(model, ONE),
        "secure, one launch, two terms": lambda: add_many_normals_(model, TWO),
        "secure, a launch each": each,
    }
    found["model"] = {
        "tensors": len(model),
        "count": total,
        "rows": summary(measure(rows, repeats, "cuda"), total, "torch.randn, added"),
    }
    if sweep:
        shapes = [(128, 1), (128, 2), (128, 4), (256, 4), (256, 8), (512, 4), (512, 8), (512, 16)]
        variants = [kernel.Variant(b, w, m) for m in (kernel.EXACT, kernel.FUSED) for b, w in shapes]
        variants += [kernel.Variant(128, w, kernel.EXACT, unroll=False) for w in (2, 4)]
        variants += [kernel.Variant(256, 8, kernel.EXACT, unroll=False), kernel.Variant(128, 4, kernel.APPROX)]
        found["sweep"] = []
        for variant in variants:
            begin = time.perf_counter()
            rows = {
                "one": lambda v=variant: kernel.add_normals_([("w", out, 0)], ONE, v),  # type: ignore[misc]
                "two": lambda v=variant: kernel.add_normals_([("w", out, 0)], TWO, v),  # type: ignore[misc]
            }
            try:
                for row in rows.values():
                    row()
                torch.cuda.synchronize()
                compiled = time.perf_counter() - begin
                times = measure(rows, repeats, "cuda")
                line = {k: 1e3 * statistics.median(v) for k, v in times.items()}
            except Exception as error:  # a variant that does not compile is a result too
                compiled, line = time.perf_counter() - begin, {"error": str(error)[:200]}  # type: ignore[dict-item]
            found["sweep"].append({**vars(variant), **line, "compile_s": compiled})
            print(found["sweep"][-1], file=sys.stderr, flush=True)
    return found


def show(result: dict[str, Any]) -> None:
    for title, part in ((result["device"], result), ("a model's tensors", result.get("model"))):
        if part is None:
            continue
        print(f"\n{title}: {part['count']:,} normals")
        print(f"{'':32}{'ms':>9}{'ns/normal':>11}{'quartiles':>18}{'ratio':>8}{'paired':>8}")
        for name, row in part["rows"].items():
            low, high = row["quartiles_ns"]
            print(
                f"{name:32}{row['ms']:9.3f}{row['ns_per_normal']:11.4f}{f'{low:.4f}-{high:.4f}':>18}"
                f"{row['ratio']:8.2f}{row['ratio_paired']:8.2f}"
            )
    for line in result.get("sweep", []):
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--device", choices=["cpu", "cuda", "all"], default="all")
    parser.add_argument("--cpu-count", type=int, default=10_000_000)
    parser.add_argument("--gpu-count", type=int, default=100_000_000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, help="threads for torch and for the noise (default: torch's)")
    parser.add_argument("--sweep", action="store_true", help="compile and time the kernel's variants")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    results = []
    if options.device in ("cpu", "all"):
        results.append(on_cpu(options.cpu_count, options.repeats))
    if options.device in ("cuda", "all") and torch.cuda.is_available():
        results.append(on_gpu(options.gpu_count, options.repeats, options.sweep))
    elif options.device == "cuda":
        print("no CUDA device here", file=sys.stderr)
        sys.exit(2)
    if options.json:
        print(json.dumps({"torch": torch.__version__, "results": results}))
    else:
        for result in results:
            show(result)


if __name__ == "__main__":
    main()
