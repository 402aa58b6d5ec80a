"""One step of correlated noise over kept vectors: what is computed, in which order, rounded where.

Beside the sums there are m kept vectors v_0 … v_{m−1}, float32 whatever the sums' dtype.
A `Move` draws z, row `row` of Z, and does one of two things, element by element:

*A recurrence* (banded C, a BLT: the noise is never seen again, so its effects are kept),

    x   = fresh·z,  then  x += read_i·v_i  for i in the order of `reads`
    v_i = put_i·x  if keep_i = 0,  else  v_i = keep_i·v_i + put_i·x
    sum += scale·x                              in the sum's dtype, all above in float32

*A replay* (banded C⁻¹: past rows of Z, that might as well be drawn again, lie in v),

    sum += fresh·z + read_1·v_1,  then  sum += read_2·v_2 + read_3·v_3,  the next two, ...
    v_i = z                                     products and sums in the sum's dtype

which is what `add_many_normals_` does with the rows drawn: the same bits. No product is
fused with a sum. The reads come before the writes. The GPU's twin is `triton_moves`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .boxmuller import TILE, Scratch
from .chunks import Chunk, draw


@dataclass(frozen=True)
class Move:
    """One step, or the filling of a vector. `key` is a secret: it is not shown."""

    key: bytes = field(repr=False)
    row: int
    fresh: float
    reads: tuple[tuple[int, float], ...] = ()  # (i, read_i), none of them 0
    writes: tuple[tuple[int, float, float], ...] = ()  # (i, keep_i, put_i), none of them (1, 0); of a replay (i, 0, 1)
    scale: float | None = None  # None: nothing is added to the sums
    replay: bool = False  # the coefficients have the scale in them already

    @property
    def adds(self) -> bool:
        return self.scale is not None

    @property
    def touched(self) -> tuple[int, ...]:
        """The vectors that must be at hand."""
        return tuple(sorted({i for i, _ in self.reads} | {i for i, keep, _ in self.writes if keep}))

    @property
    def changed(self) -> tuple[int, ...]:
        return tuple(sorted({i for i, _, _ in self.writes}))


def fill(key: bytes, row: int, vector: int) -> Move:
    """``v_i = z``, and nothing else."""
    return Move(key, row, 1.0, writes=((vector, 0.0, 1.0),))


def move_on_cpu(move: Move, scratch: Scratch, chunk: Chunk, kept: np.ndarray) -> None:
    """The move for one chunk of tiles; `kept` is (m, tiles·TILE) and begins with the chunk's first tile."""
    z = draw(scratch, chunk, move.key, move.row)
    kept = kept[:, : z.size]
    if move.replay:
        _replay(move, scratch, chunk, kept, z)
    else:
        _recur(move, scratch, chunk, kept, z)


def _recur(move: Move, scratch: Scratch, chunk: Chunk, kept: np.ndarray, x: np.ndarray) -> None:
    product = scratch.second(x.size)
    if move.fresh != 1.0:
        np.multiply(x, _f32(move.fresh), x)
    for i, read in move.reads:
        np.multiply(kept[i], _f32(read), product)
        np.add(x, product, x)
    for i, keep, put in move.writes:
        v = kept[i]
        if keep == 0.0:
            np.multiply(x, _f32(put), v)
            continue
        if keep != 1.0:
            np.multiply(v, _f32(keep), v)
        np.multiply(x, _f32(put), product)
        np.add(v, product, v)
    if move.scale is None:
        return
    np.multiply(x, _f32(move.scale), product)
    for out, mine in _windows(chunk):
        if out.dtype == np.float32:
            np.add(out, product[mine], out)
        else:
            out += np.multiply(x[mine], move.scale, dtype=np.float64)


def _replay(move: Move, scratch: Scratch, chunk: Chunk, kept: np.ndarray, z: np.ndarray) -> None:
    terms = [(z, move.fresh), *((kept[i], read) for i, read in move.reads)]
    product, total = scratch.second(z.size), scratch.third(z.size)
    for out, mine in _windows(chunk) if move.adds else ():
        wide = out.dtype != np.float32
        for pair in (terms[k : k + 2] for k in range(0, len(terms), 2)):
            n = mine.stop - mine.start
            first = None if wide else total[:n]
            added = _times(pair[0][0][mine], pair[0][1], out.dtype, first)
            for v, read in pair[1:]:
                added += _times(v[mine], read, out.dtype, None if wide else product[:n])
            out += added
    for i, _, _ in move.writes:
        np.copyto(kept[i], z)


def _times(v: np.ndarray, coefficient: float, dtype: Any, out: np.ndarray | None) -> np.ndarray:
    return np.multiply(v, np.array(coefficient, dtype), out=out, dtype=dtype)


def _windows(chunk: Chunk) -> Sequence[tuple[np.ndarray, slice]]:
    """What of each tensor lies in the chunk, and where in the chunk."""
    found, place = [], 0
    for span in chunk.spans:
        low, high, begin = span.window()
        if span.part.out is not None and high > low:
            found.append((span.part.out[low:high], slice(place + begin, place + begin + high - low)))
        place += span.tiles * TILE
    return found


def _f32(value: float) -> np.ndarray:
    return np.array(value, np.float32)
