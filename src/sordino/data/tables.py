"""CSV with a header, and Parquet: numbers in every column but the one with the label."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import SordinoError
from .base import Arrays, finite, labelled


def _label_column(path: Path, columns: list[str], label: str) -> int:
    if len(set(columns)) < len(columns):
        raise SordinoError(f"{path}: a column name appears twice among {', '.join(columns)}")
    if label in columns:
        return columns.index(label)
    near = difflib.get_close_matches(label, columns, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    shown = ", ".join(columns[:12]) + (", …" if len(columns) > 12 else "")
    raise SordinoError(f"{path} has no column label={label!r}; {hint}it has: {shown}")


def load_csv(path: Path, label: str = "label", classes: Sequence[str] | None = None) -> Arrays:
    """Comma-separated numbers under one line of column names."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            columns = next(reader, [])
            at = _label_column(path, columns, label)
            names, rows = [], []
            for row in reader:
                if not row:
                    continue
                if len(row) != len(columns):
                    raise SordinoError(
                        f"{path}, line {reader.line_num}: {len(row)} fields under {len(columns)} column names"
                    )
                names.append(row.pop(at))
                try:
                    rows.append(np.array(row, dtype=np.float32))
                except ValueError:
                    column, field = _first_bad(columns[:at] + columns[at + 1 :], row)
                    raise SordinoError(
                        f"{path}, line {reader.line_num}: {column}={field!r} is not a number; "
                        "encode categories as numbers and fill what is missing"
                    ) from None
    except UnicodeDecodeError as error:
        raise SordinoError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    if not rows:
        raise SordinoError(f"{path} has column names but no rows")
    return _arrays(path, np.stack(rows), np.array(names), classes)


def _first_bad(columns: list[str], row: list[str]) -> tuple[str, str]:
    for column, field in zip(columns, row, strict=True):
        try:
            float(field)
        except ValueError:
            return column, field
    return columns[0], row[0]  # pragma: no cover


def load_parquet(path: Path, label: str = "label", classes: Sequence[str] | None = None) -> Arrays:
    """One row an example; needs pyarrow."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise SordinoError(f"{path}: reading Parquet needs pyarrow; pip install 'sordino[parquet]'") from error
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise SordinoError(f"{path} cannot be read as Parquet; is it damaged or of another format?") from error
    columns = list(table.column_names)
    at = _label_column(path, columns, label)
    if table.num_rows == 0:
        raise SordinoError(f"{path} has columns but no rows")
    features = []
    for i, column in enumerate(columns):
        if i == at:
            continue
        values = table.column(i)
        if not (
            pa.types.is_floating(values.type) or pa.types.is_integer(values.type) or pa.types.is_boolean(values.type)
        ):
            raise SordinoError(
                f"{path}: column {column!r} is {values.type}, not a number; encode categories as numbers"
            )
        if values.null_count:
            raise SordinoError(f"{path}: column {column!r} lacks {values.null_count} values; fill or drop them")
        features.append(values.to_numpy().astype(np.float32))
    target = table.column(at)
    if target.null_count:
        raise SordinoError(f"{path}: column {label!r} lacks {target.null_count} values; fill or drop them")
    x = np.stack(features, axis=1) if features else np.zeros((table.num_rows, 0), np.float32)
    return _arrays(path, x, np.array(target.to_pylist()), classes)


def _arrays(path: Path, x: np.ndarray, y: np.ndarray, classes: Sequence[str] | None) -> Arrays:
    if x.shape[1] == 0:
        raise SordinoError(f"{path} has a label column and nothing else; features are needed")
    if y.dtype.kind in "US":
        try:
            whole = y.astype(np.int64)
            if (whole.astype(y.dtype) == y).all():
                y = whole
        except ValueError:
            pass
    targets, named = labelled(path, y, classes)
    return Arrays(finite(path, x), targets, named)
