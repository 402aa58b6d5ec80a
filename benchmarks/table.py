"""The tables of README.md, docs/cost-model.md and docs/noise.md, from benchmarks/results/*.json.

    python benchmarks/table.py                # print them
    python benchmarks/table.py --write        # put them between their markers
    python benchmarks/step.py --json > benchmarks/results/step-cpu.json      # where the figures come from

A results file is what `benchmarks/step.py --json` prints, or what `benchmarks/correlated.py` writes there; other files
in that folder are left alone. Of two figures for one case on one device, the one from the file that comes later by name
counts. A test holds the pages to this script's output, so that no figure is ever typed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "cost-model.md", ROOT / "docs" / "noise.md")
NOTHING = (
    "*No figures are recorded in this checkout. `python benchmarks/step.py` measures them on your machine; with "
    "`--json` into `benchmarks/results/`, `python benchmarks/table.py --write` puts them here.*"
)
# what benchmarks/step.py measures, in words
CASES = {
    ("cpu", "transformer"): "transformer, 4 × 256, 128 tokens, batch 32",
    ("cpu", "mlp"): "MLP 784-1024-1024-10, batch 512",
    ("cpu", "cnn"): "small GroupNorm CNN, batch 256",
    ("cpu", "wrn"): "WRN-16-4, batch 64",
    ("cuda", "bert"): "BERT-base, 128 tokens, batch 64",
    ("cuda", "vit"): "ViT-B/16, batch 64",
    ("cuda", "bert-lora"): "BERT-base, LoRA rank 16, batch 64",
    ("cuda", "mlp"): "MLP 784-1024-1024-10, batch 4096",
    ("cuda", "wrn"): "WRN-16-4, batch 512",
    ("cuda", "cnn"): "small GroupNorm CNN, batch 450",
}
Machine = tuple[str, str]


def read(folder: Path = RESULTS) -> dict[Machine, list[dict[str, Any]]]:
    """The cases of every machine, in the order in which they were measured."""
    found: dict[Machine, dict[str, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        cases = content.get("results") if isinstance(content, dict) else None
        if isinstance(cases, list) and all(isinstance(case, dict) and "case" in case for case in cases):
            machine = found.setdefault((content["device"], content["torch"]), {})
            machine.update({case["case"]: {**case, "note": content.get("note", "")} for case in cases})
    return {machine: list(cases.values()) for machine, cases in found.items()}


def title(case: dict[str, Any]) -> str:
    return CASES.get((case["device"], case["case"]), case["case"])


def time_ratio(row: dict[str, Any] | None, spread: bool = False) -> str:
    if row is None:
        return "–"
    if "failed" in row:
        return "fails"
    text = f"{row['ratio']:.2f}"
    return text if not spread else f"{text} [{row['iqr'][0]:.2f}, {row['iqr'][1]:.2f}]"


def memory_ratio(row: dict[str, Any] | None, plain: dict[str, Any]) -> str:
    if row is not None and row.get("memory_ratio"):
        return f"{row['memory_ratio']:.2f}"
    if row is None or "failed" in row or not row.get("peak_bytes") or not plain.get("peak_bytes"):
        return "–"
    return f"{row['peak_bytes'] / plain['peak_bytes']:.2f}"


def fastest(rows: dict[str, Any], prefix: str) -> str | None:
    """The fastest mode of a library that ran."""
    ran = [name for name in rows if name.startswith(prefix) and "failed" not in rows[name]]
    return min(ran, key=lambda name: rows[name]["ratio"], default=None)


def lines(head: list[str], body: list[list[str]], left: int = 1) -> list[str]:
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return ["| " + " | ".join(row) + " |" for row in (head, rule, *body)]


def short(found: dict[Machine, list[dict[str, Any]]]) -> str:
    """One line a case: time and memory of a whole step, as multiples of plain PyTorch's."""
    out: list[str] = []
    head = ["", "plain, ms", "Sordino, time", "memory", "λCGD, time", "memory", "Opacus at its fastest, time", "memory"]
    for (device, torch), cases in found.items():
        body = []
        for case in cases:
            rows = case["results"]
            plain, ours, correlated = rows["plain"], rows.get("sordino"), rows.get("sordino λCGD")
            best = fastest(rows, "opacus")
            theirs = rows[best] if best else None
            name = f" ({best.removeprefix('opacus ')})" if best else ""
            tried = any(who.startswith("opacus") for who in rows)
            body.append([
                title(case), f"{plain['ms']:.1f}", time_ratio(ours), memory_ratio(ours, plain),
                time_ratio(correlated), memory_ratio(correlated, plain),
                time_ratio(theirs) + name if best or not tried else "every mode fails", memory_ratio(theirs, plain),
            ])  # fmt: skip
        out += [f"{device}, torch {torch}:", "", *lines(head, body), ""]
    return "\n".join(out).strip() or NOTHING


def full(found: dict[Machine, list[dict[str, Any]]]) -> str:
    """Every contestant, with the quartiles of its ratio."""
    out: list[str] = []
    head = ["", "", "ms", "time, times plain", "memory, times plain", "memory added, MiB"]
    for (device, torch), cases in found.items():
        body, failures = [], []
        for case in cases:
            plain = case["results"]["plain"]
            for i, (name, row) in enumerate(case["results"].items()):
                here = title(case) if i == 0 else ""
                if "failed" in row:
                    body.append([here, name, "–", "fails", "–", "–"])
                    failures.append(f"* {title(case)}, {name}: `{row['failed'].replace('`', '')}`")
                    continue
                peak = f"{row['peak_bytes'] / 2**20:.0f}" if row.get("peak_bytes") else "–"
                body.append(
                    [here, name, f"{row['ms']:.1f}", time_ratio(row, spread=i > 0), memory_ratio(row, plain), peak]
                )
        rounds = sorted({case["rounds"] for case in cases})
        about = f"{device}, torch {torch}, median [quartiles] of {' or '.join(map(str, rounds))} rounds"
        notes = "; ".join(dict.fromkeys(case["note"] for case in cases if case["note"]))
        out += [f"{about} ({notes}):" if notes else f"{about}:", "", *lines(head, body, left=2), ""]
        out += ["What failed:", "", *failures, ""] if failures else []
    return "\n".join(out).strip() or NOTHING


# -- what benchmarks/correlated.py measures ------------------------------------------------------------------

NOTHING_CORRELATED = (
    "*No figures are recorded in this checkout. `python benchmarks/correlated.py` measures them on your machine, and "
    "`python benchmarks/table.py --write` puts them here.*"
)
PLACES = {"": "–", "regenerate": "drawn again", "device": "on the device", "host": "on the host"}


def read_correlated(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The files' contents, in the order of their names."""
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("correlated-*.json"))]
    return [content for content in contents if isinstance(content, dict) and ("noise" in content or "steps" in content)]


def machine(content: dict[str, Any]) -> str:
    note = f" ({content['note']})" if content.get("note") else ""
    return f"{content['device']}, torch {content['torch']}{note}:"


def size(count: float) -> str:
    unit, power = next(((u, p) for u, p in (("GB", 9), ("MB", 6)) if count >= 10**p), ("kB", 3))
    return f"{count / 10**power:.1f} {unit}" if count else "–"


def milliseconds(row: dict[str, Any] | None) -> str:
    if row is None or "failed" in row:
        return "–" if row is None else "fails"
    return f"{row['ms']:.3g}" if row["ms"] < 100 else f"{row['ms']:.0f}"


def correlated_noise(found: Any = None, folder: Path = RESULTS) -> str:
    """Milliseconds to make one step's noise for so many entries, and what is kept for it."""
    out: list[str] = []
    for content in read_correlated(folder):
        rows = content.get("noise", [])
        counts = sorted({row["count"] for row in rows})
        if not counts:
            continue
        by = {(row["noise"], row["storage"], row["count"]): row for row in rows}
        head = ["noise", "its past", *(f"{count / 1e6:g}M, ms" for count in counts), "times `torch.randn`", "kept"]
        body = []
        for noise, storage in dict.fromkeys((row["noise"], row["storage"]) for row in rows):
            mine = [by.get((noise, storage, count)) for count in counts]
            last = mine[-1] or {}
            times = f"{last['times_randn']:.2f}" if "times_randn" in last else "–"
            cells = [milliseconds(row) for row in mine]
            place = PLACES[storage] if noise != "identity" else "–"
            body.append([f"`{noise}`", place, *cells, times, size(last.get("kept_bytes", 0))])
        out += [machine(content), "", *lines(head, body, left=2), ""]
    return "\n".join(out).strip() or NOTHING_CORRELATED


def correlated_steps(found: Any = None, folder: Path = RESULTS) -> str:
    """A private step with correlated noise over the same step with independent noise."""
    out: list[str] = []
    for content in read_correlated(folder):
        rows = content.get("steps", [])
        if not rows:
            continue
        head = ["", "noise", "its past", "ms", "time, times DP-SGD's", "kept", "memory added"]
        body, last = [], None
        for row in rows:
            label = f"{row['case']}, {row['parameters'] / 1e6:.3g}M parameters, batch {row['batch']}"
            label += f" by {row['at_once']}" if row["at_once"] != row["batch"] else ""
            ratio = "1.00" if row["noise"] == "identity" else "–"
            if "ratio" in row:
                low, high = row["ratio_quartiles"]
                ratio = f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}]"
            place = PLACES[row["storage"]] if row["noise"] != "identity" else "–"
            kept, added = size(row.get("kept_bytes", 0)), size(row.get("added_bytes", 0))
            shown = label if label != last else ""
            body.append([shown, f"`{row['noise']}`", place, milliseconds(row), ratio, kept, added])
            last = label
        out += [machine(content), "", *lines(head, body, left=3), ""]
    return "\n".join(out).strip() or NOTHING_CORRELATED


TABLES: dict[str, Callable[[dict[Machine, list[dict[str, Any]]]], str]] = {
    "steps": short,
    "steps in full": full,
    "correlated noise": correlated_noise,
    "correlated steps": correlated_steps,
}
MARKED = re.compile(r"(<!-- table: (?P<name>[^>]*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def filled(page: str, found: dict[Machine, list[dict[str, Any]]]) -> str:
    """The page with what belongs between its markers."""
    return MARKED.sub(lambda m: f"{m[1]}\n{TABLES[m['name']](found)}\n\n{m[3]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables between the markers of the pages")
    options = parser.parse_args()
    found = read()
    if not options.write:
        print("\n\n".join(f"{name}\n\n{render(found)}" for name, render in TABLES.items()))
        return
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = filled(old, found)
        page.write_text(new, encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: {'changed' if new != old else 'as it was'}")


if __name__ == "__main__":
    main()
