"""What the pages say is true: code runs, commands exist, links lead somewhere, tables are measured.

A ```python block is run, in the order of its page, all blocks of a page in one namespace. If an ```output block
follows it, that is what it printed (``...`` stands for anything). In a ```console block, what follows ``$ `` is a
command.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def ids(page: Path) -> str:
    return page.name


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """(line, language, content) of every fenced block."""
    text = page.read_text(encoding="utf-8")
    return [(text[: m.start()].count("\n") + 1, m[1], m[2]) for m in FENCE.finditer(text)]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def commands(page: Path) -> list[str]:
    """The commands of the ```console blocks, continued lines joined, and those in the text that are whole."""
    found = []
    for _, language, content in blocks(page):
        if language == "console":
            joined = content.replace("\\\n", " ")
            found += [line[2:].strip() for line in joined.splitlines() if line.startswith("$ ")]
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        whole = re.match(r"python \S+\.py|python -m pytest|make [a-z]|sordino plan --(examples|list)", code)
        if whole and "|" not in code:
            found.append(code)
    return list(dict.fromkeys(found))


def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("table", ROOT / "benchmarks" / "table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", [p for p in PAGES if "```python" in p.read_text(encoding="utf-8")], ids=ids)
def test_the_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "__page__"}
    printed = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for line, language, content in blocks(page):
            where = f"{page.name}, line {line}"
            if language == "python":
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    exec(compile("\n" * line + content, str(page), "exec"), namespace)
                printed = out.getvalue()
            elif language == "output":
                assert printed is not None, f"{where}: nothing was run before"
                assert doctest.OutputChecker().check_output(content, printed, SAME), f"{where} printed\n{printed}"


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=ids)
def test_the_commands_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan` and `account` are run, the other verbs are parsed, scripts are asked for the options."""
    import typer

    from sordino.cli import main
    from sordino.cli.app import app

    group: Any = typer.main.get_command(app)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for command in commands(page):
        first, *rest = shlex.split(command.split(" > ")[0], comments=True)
        if first == "sordino":
            if rest[:1] in (["plan"], ["account"]):
                assert main(rest) == 0, f"{command}: {capsys.readouterr().err}"
                capsys.readouterr()
            elif rest and not rest[0].startswith("-"):
                verb = group.commands[rest[0]]
                verb.make_context(rest[0], list(rest[1:]))
        elif first == "make":
            assert all(name in targets for name in rest), command
        elif first in ("python", "python3"):
            if rest[:2] == ["-m", "pytest"]:
                assert all((ROOT / path).exists() for path in rest[2:] if not path.startswith("-")), command
                continue
            script = ROOT / rest[0]
            assert script.is_file(), command
            options = [word.partition("=")[0] for word in rest[1:] if word.startswith("-")]
            if options:
                done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True)
                assert all(re.search(rf"{re.escape(o)}\b", done.stdout) for o in options), command
        else:
            assert first in ("git", "cd", "pip"), f"{page.name}: {command} is not checked"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        text = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
        found.add(text.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_the_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        assert other.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(other), f"{page.name}: {target}; there are {sorted(anchors(other))}"


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    missing = [p.name for p in PAGES[1:] if p.name != "index.md" and f"({p.name})" not in index]
    assert not missing


def test_every_choice_has_a_page() -> None:
    from sordino.denoising import DENOISERS
    from sordino.geometry import GEOMETRIES
    from sordino.sampling import SAMPLERS
    from sordino.strategies import STRATEGIES

    homes = {"strategies": STRATEGIES, "sampling": SAMPLERS, "geometry": GEOMETRIES, "denoising": DENOISERS}
    for name, registry in homes.items():
        page = ROOT / "docs" / f"{name}.md"
        headings = re.findall(r"^## `([\w-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(headings) == set(registry.names()), page.name


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_the_tables_are_what_was_measured(page: Path) -> None:
    module, text = table(), page.read_text(encoding="utf-8")
    assert module.filled(text, module.read()) == text, "run: python benchmarks/table.py --write"
    if page in module.PAGES:
        assert module.MARKED.search(text), "the markers are gone"


def test_a_table_from_results(tmp_path: Path) -> None:
    module = table()
    assert "No figures" in module.short(module.read(tmp_path))
    row = {"ms": 100.0, "ratio": 1.0, "iqr": [1.0, 1.0], "peak_bytes": 100}
    results = {
        "plain": row,
        "sordino": {**row, "ratio": 1.5, "iqr": [1.4, 1.6], "peak_bytes": 120},
        "opacus hooks": {**row, "ratio": 3.0, "peak_bytes": 400},
        "opacus ghost": {**row, "ratio": 2.0, "peak_bytes": 200},
        "opacus ew": {"failed": "no"},
    }
    case = {"case": "mlp", "device": "cpu", "rounds": 7, "results": results}
    module_json = {"device": "2 CPU threads", "torch": "2.x", "results": [case]}
    (tmp_path / "a.json").write_text(json.dumps(module_json))
    (tmp_path / "b.json").write_text(json.dumps({"torch": "2.x", "results": {"secure": {}}}))  # another benchmark's
    short, full = module.short(module.read(tmp_path)), module.full(module.read(tmp_path))
    assert "| 100.0 | 1.50 | 1.20 | – | – | 2.00 (ghost) | 2.00 |" in short
    assert "1.50 [1.40, 1.60]" in full and "opacus ew | – | fails" in full
    page = "a\n<!-- table: steps -->\nold\n<!-- end of table -->\nb"
    once = module.filled(page, module.read(tmp_path))
    assert short in once and "old" not in once and module.filled(once, module.read(tmp_path)) == once
