"""The samplers: their laws, that they are pure functions of (key, step), and what a batch costs."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from scipy import stats

from sordino.budget import Adjacency, Participation, Schedule
from sordino.errors import SordinoError
from sordino.sampling import SAMPLERS, Sampling, make_sampling
from sordino.sampling.poisson import draw_poisson

from .keystream import Keystream

NAMES = ["poisson", "cyclic-poisson:3", "fixed-order", "balls-in-bins", "balls-in-bins:fresh"]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(sampling: Sampling, key: int, population: int) -> list[np.ndarray]:
    stream = Keystream(key)
    return [sampling.draw(stream, t, population) for t in range(sampling.schedule.steps)]


def test_every_registered_sampler_is_in_the_suite() -> None:
    assert list(dict.fromkeys(name.partition(":")[0] for name in NAMES)) == SAMPLERS.names()
    assert all(make_sampling(name, Schedule(60, 10, 1)).name == name for name in NAMES)


class TestEverySampler:
    def test_batches_are_sorted_distinct_int64_indices(self, name: str) -> None:
        for batch in run(make_sampling(name, Schedule(103, 10, 2)), 0, 103):
            assert batch.dtype == np.int64 and batch.ndim == 1
            assert (np.diff(batch) > 0).all() and ((batch >= 0) & (batch < 103)).all()

    def test_a_batch_is_a_function_of_key_and_step(self, name: str) -> None:
        schedule = Schedule(500, 50, 2)
        first = run(make_sampling(name, schedule), 1, 500)
        again, stream = make_sampling(name, schedule), Keystream(1)
        for t in reversed(range(schedule.steps)):  # any order, another object, another stream object
            np.testing.assert_array_equal(again.draw(stream, t, 500), first[t])
        other = run(again, 2, 500)  # the table drawn for one key is not used for another
        assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))
        for t in range(schedule.steps):
            np.testing.assert_array_equal(again.draw(stream, t, 500), first[t])

    def test_nobody_exceeds_the_stated_participation(self, name: str) -> None:
        schedule = Schedule(103, 10, 3)
        sampling = make_sampling(name, schedule)
        p = sampling.participation
        assert p.steps == schedule.steps
        for population in (103, 60, 300):  # the data set may be smaller or larger than the stated N
            times: dict[int, list[int]] = {}
            for t, batch in enumerate(run(sampling, 5, population)):
                for i in batch:
                    times.setdefault(int(i), []).append(t)
            for steps in times.values():
                assert len(steps) <= p.epochs
                assert all(b - a >= p.separation for a, b in zip(steps, steps[1:], strict=False))
                if p.fixed:
                    gaps = [b - a for a, b in zip(steps, steps[1:], strict=False)]
                    assert all(gap % p.separation == 0 for gap in gaps)
                    assert "poisson" in name or set(gaps) <= {p.separation}
            if "poisson" not in name:  # everybody, every epoch
                assert len(times) == population and all(len(s) == 3 for s in times.values())

    def test_what_is_drawn_may_be_written_to(self, name: str) -> None:
        sampling, stream = make_sampling(name, Schedule(50, 10, 1)), Keystream(0)
        batch = sampling.draw(stream, 0, 50)
        kept = batch.copy()
        batch[:] = 0
        np.testing.assert_array_equal(sampling.draw(stream, 0, 50), kept)

    @pytest.mark.parametrize("step", [-1, 6])
    def test_a_step_past_the_last_is_refused(self, name: str, step: int) -> None:
        with pytest.raises(SordinoError, match="6 planned steps"):
            make_sampling(name, Schedule(30, 10, 2)).draw(Keystream(0), step, 20)

    def test_an_empty_population(self, name: str) -> None:
        assert len(make_sampling(name, Schedule(30, 10, 1)).draw(Keystream(0), 0, 0)) == 0

    def test_one_example_more_moves_nobody(self, name: str) -> None:
        """Where the neighbours are data sets with one example more: all the others' batches are as they were."""
        sampling = make_sampling(name, Schedule(100, 10, 2))
        if sampling.adjacency is Adjacency.ZERO_OUT:
            pytest.skip("nobody is added or removed")
        for population in (90, 99, 100, 137):
            before, after = run(sampling, 6, population), run(sampling, 6, population + 1)
            for batch, old in zip(after, before, strict=True):
                np.testing.assert_array_equal(batch[batch < population], old)


class TestPoisson:
    def test_constants(self) -> None:
        s = make_sampling("poisson", Schedule(1000, 30, 2))
        assert s.rate == 0.03 and s.adjacency is Adjacency.ADD_REMOVE
        assert s.participation == Participation(steps=68, epochs=68, separation=1)

    def test_batch_sizes_are_binomial(self) -> None:
        n, q, stream = 400, 0.05, Keystream(3)
        sizes = [len(draw_poisson(stream, t, "poisson", n, q)) for t in range(3000)]
        expected = stats.binom.pmf(np.arange(n + 1), n, q) * len(sizes)
        keep = expected > 8
        observed = np.bincount(sizes, minlength=n + 1)
        counts = np.append(observed[keep], observed[~keep].sum())
        assert stats.chisquare(counts, np.append(expected[keep], expected[~keep].sum())).pvalue > 1e-4

    @pytest.mark.parametrize("rate", [1e-3, 0.02, 0.3, 0.5, 0.9, 0.999])
    def test_everyone_is_included_at_the_rate_and_independently(self, rate: float) -> None:
        n, rounds, stream = 60, 3000, Keystream(int(rate * 1000))
        member = np.zeros((rounds, n))
        for t in range(rounds):
            member[t, draw_poisson(stream, t, "poisson", n, rate)] = 1
        sd = math.sqrt(rate * (1 - rate) / rounds)
        assert np.abs(member.mean(axis=0) - rate).max() < 5 * sd  # the first and the last like all others
        assert abs(member.mean() - rate) < 4.5 * sd / math.sqrt(n)
        centred = (member - rate) / math.sqrt(rate * (1 - rate))
        pairs = (centred.T @ centred / rounds)[np.triu_indices(n, 1)]  # examples within a step
        lag = (centred[1:] * centred[:-1]).mean(axis=0)  # one example, consecutive steps
        if rate * (1 - rate) * rounds > 50:
            assert np.abs(pairs).max() < 6.5 / math.sqrt(rounds) and np.abs(lag).max() < 5.5 / math.sqrt(rounds)

    def test_gaps_are_geometric(self) -> None:
        q = 0.01
        drawn = draw_poisson(Keystream(9), 0, "poisson", 5_000_000, q)
        gaps = np.diff(drawn) - 1
        edges = np.arange(0, 1000, 20)  # well past 1/q = 100, where a gap is cut and drawn anew
        expected = len(gaps) * np.diff(np.append(1 - (1 - q) ** edges, 1.0))
        observed = np.histogram(gaps, np.append(edges, 10**9))[0]
        assert stats.chisquare(observed, expected).pvalue > 1e-4

    def test_rate_one_takes_everybody(self) -> None:
        s = make_sampling("poisson", Schedule(50, 50, 2))
        np.testing.assert_array_equal(s.draw(Keystream(0), 1, 50), np.arange(50))
        np.testing.assert_array_equal(s.draw(Keystream(0), 1, 7), np.arange(7))

    def test_an_example_at_the_end_changes_nobody_else(self) -> None:
        for population in (1000, 1001, 1500):
            batch = draw_poisson(Keystream(4), 0, "poisson", population, 0.03)
            np.testing.assert_array_equal(batch[batch < 1000], draw_poisson(Keystream(4), 0, "poisson", 1000, 0.03))

    def test_the_rate_is_the_stated_one_whatever_the_data_set(self) -> None:
        s, stream = make_sampling("poisson", Schedule(1000, 100, 200)), Keystream(8)
        sizes = [len(s.draw(stream, t, 3000)) for t in range(2000)]
        assert np.mean(sizes) == pytest.approx(300, abs=5 * math.sqrt(270 / 2000))

    def test_work_is_of_the_order_of_the_batch(self) -> None:
        stream, n = Keystream(0), 10_000_000
        s = make_sampling("poisson", Schedule(n, 100, 1))
        s.draw(stream, 0, n)
        stream.asked = 0
        start = time.perf_counter()
        batches = [s.draw(stream, t, n) for t in range(100)]
        seconds = (time.perf_counter() - start) / 100
        assert stream.asked / 100 < 800  # words; 2 a gap
        assert seconds < 0.01
        assert np.mean([len(b) for b in batches]) == pytest.approx(100, abs=5)


class TestFixedOrder:
    def test_constants(self) -> None:
        s = make_sampling("fixed-order", Schedule(103, 10, 3))
        assert s.rate is None and s.adjacency is Adjacency.ZERO_OUT
        assert s.participation == Participation(steps=33, epochs=3, separation=11, fixed=True)

    def test_every_epoch_is_the_same_and_the_last_batch_short(self) -> None:
        batches = run(make_sampling("fixed-order", Schedule(103, 10, 3)), 0, 103)
        assert [len(b) for b in batches] == ([10] * 10 + [3]) * 3
        for t in range(11):
            np.testing.assert_array_equal(batches[t], batches[t + 11])
        assert sorted(np.concatenate(batches[:11])) == list(range(103))

    def test_a_larger_data_set_wraps_round(self) -> None:
        batches = run(make_sampling("fixed-order", Schedule(20, 10, 1)), 0, 45)
        assert [len(b) for b in batches] == [25, 20]

    def test_positions_are_uniform(self) -> None:
        where = np.zeros((2000, 12), dtype=int)
        for key in range(2000):
            for t, batch in enumerate(run(make_sampling("fixed-order", Schedule(12, 4, 1)), key, 12)):
                where[key, batch] = t
        for i in range(12):
            assert stats.chisquare(np.bincount(where[:, i], minlength=3)).pvalue > 1e-5


class TestBallsInBins:
    def test_constants(self) -> None:
        s = make_sampling("balls-in-bins", Schedule(103, 10, 3))
        assert s.rate is None and s.adjacency is Adjacency.ADD_REMOVE
        assert s.participation == Participation(steps=33, epochs=3, separation=11, fixed=True)

    def test_bins_are_uniform_and_independent(self) -> None:
        s = make_sampling("balls-in-bins", Schedule(7, 1, 1))
        bins = np.zeros((4000, 7), dtype=int)
        for key in range(4000):
            for t, batch in enumerate(run(s, key, 7)):
                bins[key, batch] = t
        assert stats.chisquare(np.bincount(bins.ravel(), minlength=7)).pvalue > 1e-4
        for i in range(1, 7):  # bins of different examples; a permutation would never repeat one
            table = np.histogram2d(bins[:, 0], bins[:, i], bins=7)[0]
            assert stats.chi2_contingency(table).pvalue > 1e-5

    def test_bin_sizes_are_binomial_not_equal(self) -> None:
        s = make_sampling("balls-in-bins", Schedule(4000, 4, 1))
        sizes = [len(b) for b in run(s, 0, 4000)]
        expected = stats.binom.pmf(np.arange(12), 4000, 1 / 1000) * 1000
        observed = np.bincount(np.minimum(sizes, 12), minlength=13)
        assert stats.chisquare(observed, np.append(expected, 1000 - expected.sum())).pvalue > 1e-4

    def test_the_bin_is_drawn_once_and_kept(self) -> None:
        batches = run(make_sampling("balls-in-bins", Schedule(100, 10, 4)), 2, 100)
        for t in range(30):
            np.testing.assert_array_equal(batches[t], batches[t + 10])

    def test_the_range_reduction_is_exact(self) -> None:
        class Fixed:
            def __init__(self, values: list[int]) -> None:
                self.values = values

            def words(self, step: int, name: str, offset: int, length: int) -> np.ndarray:
                out = [w for v in self.values for w in (v >> 32, v & 0xFFFFFFFF)]
                return np.array(out[offset : offset + length], dtype=np.uint32)

        from sordino.sampling.bins import draw_bins

        values = [0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 6148914691236517205, 6148914691236517206]
        for bins in (1, 2, 3, 391, 2**31 - 1, 2**32 - 1):
            assert draw_bins(Fixed(values), 0, "x", len(values), bins).tolist() == [v * bins >> 64 for v in values]


class TestFreshBins:
    def test_constants(self) -> None:
        s = make_sampling("balls-in-bins:fresh", Schedule(103, 10, 3))
        assert s.rate is None and s.adjacency is Adjacency.ADD_REMOVE
        assert s.participation == Participation(steps=33, epochs=3, separation=1)

    def test_every_epoch_draws_its_own_bins_independently(self) -> None:
        s = make_sampling("balls-in-bins:fresh", Schedule(3000, 1000, 2))
        bins = np.zeros((2, 3000), dtype=int)
        for t, batch in enumerate(run(s, 1, 3000)):
            bins[t // 3, batch] = t % 3
        table = np.histogram2d(bins[0], bins[1], bins=3)[0]
        assert stats.chi2_contingency(table).pvalue > 1e-4
        assert stats.chisquare(table.ravel()).pvalue > 1e-4

    def test_two_appearances_may_be_one_step_apart(self) -> None:
        batches = run(make_sampling("balls-in-bins:fresh", Schedule(100, 10, 2)), 2, 100)
        assert np.intersect1d(batches[9], batches[10]).size > 0


class TestCyclicPoisson:
    def test_constants(self) -> None:
        s = make_sampling("cyclic-poisson:4", Schedule(1000, 30, 2))
        assert s.rate == 0.12 and s.adjacency is Adjacency.ADD_REMOVE
        assert s.participation == Participation(steps=68, epochs=17, separation=4, fixed=True)
        assert make_sampling("cyclic-poisson:5", Schedule(1000, 30, 2)).participation.epochs == 14  # ⌈68/5⌉
        assert make_sampling("cyclic-poisson", Schedule(1000, 30, 2), 4).name == "cyclic-poisson:4"

    def test_each_part_is_a_poisson_batch_of_its_own(self) -> None:
        """The rate of an example of the part whose turn it is, and 0 of all others; coins are independent."""
        schedule = Schedule(200, 10, 400)
        s = make_sampling("cyclic-poisson:4", schedule)  # q = .2
        member = np.zeros((schedule.steps, 200), dtype=bool)
        for t, batch in enumerate(run(s, 0, 200)):
            member[t, batch] = True
        turn = member.reshape(-1, 4, 200).sum(axis=0)
        assert ((turn > 0).sum(axis=0) == 1).all()  # everybody has one turn in four
        part = turn.argmax(axis=0)
        times = turn.max(axis=0)
        rounds = schedule.steps // 4
        assert stats.kstest((times - 0.2 * rounds) / math.sqrt(0.16 * rounds), "norm").pvalue > 1e-4
        assert times.mean() == pytest.approx(0.2 * rounds, abs=4.5 * math.sqrt(0.16 * rounds / 200))
        for i in range(4):
            mine = (member[i::4][:, part == i] - 0.2) / 0.4
            pairs = (mine.T @ mine / len(mine))[np.triu_indices(mine.shape[1], 1)]
            assert np.abs(pairs).max() < 5.5 / math.sqrt(len(mine))
            assert np.abs((mine[1:] * mine[:-1]).mean(axis=0)).max() < 5.5 / math.sqrt(len(mine))

    def test_parts_are_uniform_and_their_realised_size_changes_no_rate(self) -> None:
        s = make_sampling("cyclic-poisson:2", Schedule(16, 2, 125))  # q = .25, parts of 8 or so
        hits, chances, sizes = 0, 0, []
        for key in range(60):
            member = np.zeros((1000, 16), dtype=bool)
            for t, batch in enumerate(run(s, key, 16)):
                member[t, batch] = True
            odd = member[1::2].any(axis=0)
            sizes.append(int(odd.sum()))
            if odd.sum() != 8:  # with a rate from the realised size these would deviate
                hits += int(member[1::2][:, odd].sum())
                chances += 500 * int(odd.sum())
        assert hits / chances == pytest.approx(0.25, abs=4.5 * math.sqrt(0.1875 / chances))
        assert np.mean(sizes) == pytest.approx(8, abs=4.5 * 2 / math.sqrt(60)) and 1.2 < np.std(sizes) < 2.9

    def test_one_part_is_poisson_in_law(self) -> None:
        s = make_sampling("cyclic-poisson:1", Schedule(400, 20, 100))
        sizes = np.minimum([len(batch) for batch in run(s, 3, 400)], 40)
        expected = stats.binom.pmf(np.arange(41), 400, 0.05) * len(sizes)
        keep = expected > 8
        observed = np.bincount(sizes, minlength=41)
        counts = np.append(observed[keep], observed[~keep].sum())
        assert stats.chisquare(counts, np.append(expected[keep], len(sizes) - expected[keep].sum())).pvalue > 1e-4

    def test_work_is_of_the_order_of_the_batch(self) -> None:
        stream, n = Keystream(0), 1_000_000
        s = make_sampling("cyclic-poisson:16", Schedule(n, 100, 1))
        s.draw(stream, 0, n)
        stream.asked = 0
        batches = [s.draw(stream, t, n) for t in range(100)]
        assert stream.asked / 100 < 800
        assert np.mean([len(b) for b in batches]) == pytest.approx(100, abs=5)

    def test_no_stream_is_used_twice(self) -> None:
        class Noting(Keystream):
            streams: set[tuple[int, str]] = set()

            def words(self, step: int, name: str, offset: int, length: int) -> np.ndarray:
                self.streams.add((step, name))
                return super().words(step, name, offset, length)

        stream = Noting(0)
        for name in NAMES:
            sampling = make_sampling(name, Schedule(40, 10, 2))
            for t in range(8):
                sampling.draw(stream, t, 40)
        drawn = {(step, name) for step, name in stream.streams if step < 2**32 - 1}
        steps = {name: sorted(t for t, n in drawn if n == name) for _, name in drawn}
        assert steps == {
            "poisson": list(range(8)),
            "cyclic-poisson": list(range(8)),
            "cyclic-poisson/parts": [0],
            "fixed-order": [0],
            "balls-in-bins": [0],
            "balls-in-bins:fresh": [0, 1],
        }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poison", "did you mean 'poisson'"),
        ("poisson:0.1", "takes no argument"),
        ("fixed-order:2", "takes no argument"),
        ("balls-in-bins:stale", "'balls-in-bins:fresh'"),
        ("shuffle", "not known"),
        (3, "a name"),
    ],
)
def test_bad_names(text: object, message: str) -> None:
    with pytest.raises(SordinoError, match=message):
        make_sampling(text, Schedule(10, 5, 1))  # type: ignore[arg-type]


def test_poisson_sampling_off_keeps_the_poisson_epsilon() -> None:
    """Whoever draws is whoever is accounted for: the accountant takes the sampler itself, not a name or a flag."""
    from sordino.plan import plan

    p = plan(noise_multiplier=1.0, delta=1e-5, examples=1000, batch_size=10, epochs=1, sampling="fixed-order")
    poisson = plan(noise_multiplier=1.0, delta=1e-5, examples=1000, batch_size=10, epochs=1)
    assert p.sampling.draw(Keystream(0), 0, 1000).size == 10
    assert p.account().epsilon > 2 * poisson.account().epsilon
    assert p.guarantee().adjacency is p.sampling.adjacency is Adjacency.ZERO_OUT
