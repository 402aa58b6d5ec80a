"""The fitted tail: recovers its own numbers, checks whether it bounds, says what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from sordino import SordinoError
from sordino.curvature.tail import Tail, fit_tail


@pytest.mark.parametrize(("c", "alpha"), [(1.3, 1.2), (3.0, 0.7), (0.2, 2.5)])
def test_its_own_numbers_come_back(c: float, alpha: float) -> None:
    true = Tail(c, alpha, last=5000, smallest=1e-6)
    place = np.arange(1, 301)
    found = fit_tail(true(place), 5000)
    assert (found.c, found.alpha) == (pytest.approx(c, rel=1e-5), pytest.approx(alpha, rel=1e-5))
    assert found.error < 1e-6 and found.violation < 1e-5
    rest = found.after(true(place))
    assert len(rest) == 4700 and rest[-1] == pytest.approx(1e-6) and (np.diff(rest) <= 0).all()
    np.testing.assert_allclose(rest, true(np.arange(301, 5001)), rtol=1e-4)
    assert float(true(5001)) == 0


def test_whether_it_bounds_is_reported_and_upper_makes_it_so() -> None:
    rng = np.random.default_rng(0)
    values = np.sort(5 * np.arange(1, 201) ** -1.1 * np.exp(0.2 * rng.standard_normal(200)))[::-1]
    plain, lifted = fit_tail(values, 3000), fit_tail(values, 3000, upper=True)
    held = np.arange(101, 201)
    assert plain.violation == pytest.approx((values[100:] / plain(held)).max() - 1)
    assert plain.violation > 0 and not plain.bounds()
    assert lifted.bounds() and (lifted(held) >= values[100:] * (1 - 1e-9)).all()
    assert lifted.error >= plain.error
    # no pair bounds it with a smaller error: a grid around the optimum
    place = np.arange(1, 201)
    for alpha in lifted.alpha * np.linspace(0.8, 1.2, 41):
        inside = np.log(3000 / place) ** alpha
        c = (np.log(values / 1e-6) / inside)[100:].max()
        best = max(c, float(inside @ np.log(values / 1e-6) / (inside @ inside)))
        assert np.sqrt(np.square(np.log(values / 1e-6) - best * inside).mean()) >= lifted.error - 1e-9


def test_a_spike_does_not_lift_the_tail_above_the_last_computed() -> None:
    values = np.r_[5 / np.arange(1, 30), 1e-3]
    assert float(fit_tail(values, 500)(31)) > 0.01
    assert fit_tail(values, 500, upper=True).after(values).max() == 1e-3


@pytest.mark.parametrize(
    ("values", "last", "smallest", "text"),
    [
        (np.ones(5), 100, 1e-6, "at least 8 eigenvalues, and 5 were computed"),
        (np.ones(20), 20, 1e-6, "p₊=20 is not beyond the 20 eigenvalues"),
        (np.r_[np.ones(19), 1e-7], 100, 1e-6, "1e-07, is not above the tail's last, 1e-06"),
        (np.ones(20), 100, 0.0, "smallest=0.0"),
    ],
)
def test_bad_requests(values: np.ndarray, last: int, smallest: float, text: str) -> None:
    with pytest.raises(SordinoError, match=text):
        fit_tail(values, last, smallest)
