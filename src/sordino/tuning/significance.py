"""Is one method better than another, or are these runs luck? Two one-sided tests (NoiseCurve, A.3).

Both ask how likely an advantage at least this large would be if there were none. Larger scores are better; for a loss,
hand the two over in the other order.

* `paired_t_test`: run i of both shares its seed; the differences are normal with any spread.
* `permutation_test`: no distribution is assumed. Unpaired (the paper's): any of the runs might as well have come from
  either method, so all ways of dealing them out again are equally likely. Paired: every difference might as well have
  the other sign.

Equal advantages count as at least as large, so ties never make a p-value too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..asked import whole
from ..budget import significant_up
from ..errors import SordinoError

EXACT = 1_000_000  # as many re-assignments are all looked at; beyond, some are drawn
CHUNK = 1_000_000  # numbers at once while drawing


@dataclass(frozen=True)
class Significance:
    """The outcome of a test; prints as a sentence.

    `effect` is the mean advantage in the scores' own unit, `statistic` Student's t (None for permutations), and
    `smallest` the least p-value that so few runs could ever have given (0 for the t-test).
    """

    p_value: float
    effect: float
    method: str  # in words
    statistic: float | None = None
    smallest: float = 0.0

    def __str__(self) -> str:
        better = "better" if self.effect > 0 else "worse" if self.effect < 0 else "different"
        return f"p = {significant_up(self.p_value)}, {better} by {abs(self.effect):.4g} on average: {self.method}"


def paired_t_test(ours: Sequence[float], theirs: Sequence[float]) -> Significance:
    """Student's t-test of ours − theirs, run by run; one-sided: ours is better.

    >>> print(paired_t_test([78.3, 78.2, 78.4], [77.3, 77.4, 77.5]))
    p = 0.00205, better by 0.9 on average: paired t-test, one-sided, 3 pairs, t = 15.6
    """
    x, y = _scores("ours", ours), _scores("theirs", theirs)
    differences = _differences(x, y)
    n, effect = len(differences), float(differences.mean())
    spread = float(differences.std(ddof=1))
    words = f"paired t-test, one-sided, {n} pairs"
    if spread <= 1e-12 * float(np.abs([x, y]).max()):  # nothing but rounding
        if abs(effect) <= 1e-12 * float(np.abs([x, y]).max()):
            return Significance(1.0, 0.0, f"{words}, all equal", 0.0)
        raise SordinoError(
            f"all {n} differences are {effect:.6g}, and a t-test needs their spread; use "
            "permutation_test(ours, theirs, paired=True)"
        )
    from scipy import stats

    t = effect / (spread / math.sqrt(n))
    return Significance(float(stats.t.sf(t, n - 1)), effect, f"{words}, t = {t:.3g}", t)


def permutation_test(
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    paired: bool = False,
    draws: int = 100_000,
    seed: int = 0,
) -> Significance:
    """How many re-assignments of the runs have a mean advantage at least as large; one-sided: ours is better.

    All of them are looked at up to a million; beyond, `draws` are drawn, and the one that was observed counts with them
    (so p is at least 1/(draws + 1) and the test keeps its level).

    >>> print(permutation_test([78.3, 78.2, 78.4], [77.3, 77.4, 77.5]))
    p = 0.05, better by 0.9 on average: permutation test, one-sided, all 20 ways to divide 3 + 3 runs
    """
    x, y = _scores("ours", ours), _scores("theirs", theirs)
    draws, seed = whole("draws", draws, 1), whole("seed", seed, 0)
    if paired:
        differences = _differences(x, y)
        ways, effect = 2 ** len(differences), float(differences.mean())
        words = f"the signs of {len(differences)} differences"
    else:
        ways, effect = math.comb(len(x) + len(y), len(x)), float(x.mean() - y.mean())
        words = f"{len(x)} + {len(y)} runs"
    rounding = 16 * np.finfo(float).eps * float(np.abs(np.concatenate([x, y])).max()) * (len(x) + len(y))
    exact = ways <= EXACT
    if paired:
        sums = _signed_sums(differences) if exact else _drawn_signs(differences, draws, seed)
        extreme = int((sums >= differences.sum() - rounding).sum())
    else:
        # with all runs given, the sum of ours decides the difference of the means; the sum of theirs is what is left
        pooled = np.concatenate([x, y])
        sums = _subset_sums(pooled, len(x)) if exact else _drawn_subsets(pooled, len(x), draws, seed)
        extreme = int((sums >= x.sum() - rounding).sum())
    if exact:
        how = f"all {ways} ways to {'choose' if paired else 'divide'} {words}"
        return Significance(extreme / ways, effect, f"permutation test, one-sided, {how}", smallest=1 / ways)
    p = (1 + extreme) / (1 + draws)
    how = f"{draws} of {float(ways):.2g} ways to {'choose' if paired else 'divide'} {words}, drawn with seed {seed}"
    return Significance(p, effect, f"permutation test, one-sided, {how}", smallest=1 / (1 + draws))


def _scores(name: str, values: Sequence[float]) -> np.ndarray:
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise SordinoError(f"{name} must be a sequence of numbers, one a run") from None
    if found.ndim != 1:
        raise SordinoError(f"{name} has shape {found.shape}; it must be one number a run")
    if len(found) < 2:
        raise SordinoError(f"{name} has {len(found)} run(s), and a test needs at least 2; train with more seeds")
    bad = np.flatnonzero(~np.isfinite(found))
    if len(bad):
        raise SordinoError(
            f"{name}[{bad[0]}] is {found[bad[0]]}; give a failed run the score of an untrained model, or leave it out"
        )
    return found


def _differences(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if len(x) != len(y):
        raise SordinoError(
            f"{len(x)} runs of ours and {len(y)} of theirs do not pair up; leave out those without a partner, or use "
            "permutation_test(ours, theirs)"
        )
    return x - y


def _subset_sums(values: np.ndarray, size: int) -> np.ndarray:
    """The sums of all C(n, size) subsets."""
    total, complement = values.sum(), size > len(values) // 2
    wanted = len(values) - size if complement else size
    sums = [np.zeros(1), *(np.empty(0) for _ in range(wanted))]
    for value in values:
        for k in range(wanted, 0, -1):
            sums[k] = np.concatenate([sums[k], sums[k - 1] + value])
    return total - sums[wanted] if complement else sums[wanted]


def _signed_sums(differences: np.ndarray) -> np.ndarray:
    """±d₁ ± d₂ … for all 2ⁿ signs."""
    sums = np.zeros(1)
    for d in np.abs(differences):
        sums = np.concatenate([sums + d, sums - d])
    return sums


def _drawn_subsets(values: np.ndarray, size: int, draws: int, seed: int) -> np.ndarray:
    rng, rows = np.random.default_rng(seed), max(1, CHUNK // len(values))
    parts = []
    for done in range(0, draws, rows):
        dealt = rng.permuted(np.tile(values, (min(rows, draws - done), 1)), axis=1)
        parts.append(dealt[:, :size].sum(axis=1))
    return np.concatenate(parts)


def _drawn_signs(differences: np.ndarray, draws: int, seed: int) -> np.ndarray:
    rng, rows = np.random.default_rng(seed), max(1, CHUNK // len(differences))
    parts = []
    for done in range(0, draws, rows):
        signs = rng.integers(0, 2, (min(rows, draws - done), len(differences))) * 2 - 1
        parts.append(signs @ differences)
    return np.concatenate(parts)
