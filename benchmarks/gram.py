"""Gram norms on a GPU: which tiles are quick at which length, and how near to the device's speed.

    python benchmarks/gram.py                  # BERT's and ViT's layers, every variant
    python benchmarks/gram.py --length 512

A figure is milliseconds for 12 layers in one launch, median of several; the multiplications counted are those of the
upper half of both Gram matrices, three TF32 products each.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))

from sordino.gradients.kernels.gram import gram_norms, variant

SHAPES = [(64, 128, 768, 768), (64, 128, 3072, 768), (64, 197, 768, 768), (64, 197, 3072, 768)]
VARIANTS = [
    *itertools.product((64,), (32,), (4,), (2, 3, 4)), (64, 64, 4, 2), (64, 16, 4, 4), (64, 32, 8, 3),
    (32, 32, 4, 3), (128, 32, 8, 2), (128, 32, 8, 3), (128, 16, 8, 4),
]  # fmt: skip


def milliseconds(pairs: list[tuple[torch.Tensor, torch.Tensor]], how: tuple[int, int, int, int]) -> float:
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        gram_norms(pairs, 4.8e-7, how)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, action="append", help="other numbers of positions, for 768 x 768")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    shapes = SHAPES if options.length is None else [(64, length, 768, 768) for length in options.length]
    for n, length, p, q in shapes:
        dtype = torch.bfloat16 if options.bf16 else torch.float32
        pairs = [
            (
                torch.randn(n, length, p, device="cuda", dtype=dtype),
                torch.randn(n, length, q, device="cuda", dtype=dtype),
            )
            for _ in range(12)
        ]
        work = 12 * n * length * (length + 1) / 2 * (p + q) * 2 * (1 if options.bf16 else 3)
        print(f"\n{n} examples, {length} positions, {p} x {q}; now {variant(length)}")
        for how in VARIANTS:
            try:
                ms = milliseconds(pairs, how)
            except Exception as error:  # too much shared memory, say
                print(f"  {how}  {type(error).__name__}")
                continue
            print(f"  {how!s:20s} {ms:8.3f} ms  {work / ms / 1e9:6.0f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
