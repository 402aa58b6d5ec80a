"""How long it takes to find the noise for a budget, and how much noise: ours beside dp-accounting used directly.

    python benchmarks/accounting.py [--json] [--repeats 3]

The query is (8, 1e-5) with Poisson sampling, q = .01, T = 2000. "naive" is dp-accounting's PLD at one fixed
discretisation, bisected to a relative 1e-4, as its own calibration helper does. Every σ is checked by an accountant of
its own: PLD at a tenth of the grid.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable

EPSILON, DELTA, RATE, STEPS = 8.0, 1e-5, 0.01, 2000


def sordino(accountant: str) -> float:
    from sordino import Budget
    from sordino.accounting import calibrate, subsampled
    from sordino.budget import Schedule
    from sordino.sampling import make_sampling
    from sordino.strategies import make_strategy

    for cached in (subsampled._compose, subsampled._one_step, subsampled._rdp):
        cached.cache_clear()
    schedule = Schedule(examples=round(1 / RATE) * 100, batch_size=100, epochs=round(STEPS * RATE))
    assert schedule.steps == STEPS
    strategy, sampling = make_strategy("identity", STEPS), make_sampling("poisson", schedule)
    return calibrate(strategy, sampling, Budget(EPSILON, DELTA), accountant=accountant)


def pld_epsilon(sigma: float, interval: float) -> float:
    from dp_accounting.pld import privacy_loss_distribution as pld

    one = pld.from_gaussian_mechanism(
        sigma, sampling_prob=RATE, value_discretization_interval=interval, use_connect_dots=True
    )
    return float(one.self_compose(STEPS).get_epsilon_for_delta(DELTA))


def rdp_epsilon(sigma: float) -> float:
    from dp_accounting import dp_event
    from dp_accounting.rdp import rdp_privacy_accountant

    accountant = rdp_privacy_accountant.RdpAccountant()
    accountant.compose(dp_event.PoissonSampledDpEvent(RATE, dp_event.GaussianDpEvent(sigma)), STEPS)
    return float(accountant.get_epsilon(DELTA))


def bisect(epsilon: Callable[[float], float]) -> float:
    low, high = 0.1, 10.0
    while high / low > 1 + 1e-4:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if epsilon(middle) <= EPSILON else (middle, high)
    return high


ROUTES: dict[str, Callable[[], float]] = {
    "sordino pld": lambda: sordino("pld"),
    "sordino rdp": lambda: sordino("rdp"),
    "dp-accounting pld, naive, 1e-3": lambda: bisect(lambda sigma: pld_epsilon(sigma, 1e-3)),
    "dp-accounting pld, naive, 1e-4": lambda: bisect(lambda sigma: pld_epsilon(sigma, 1e-4)),
    "dp-accounting rdp, naive": lambda: bisect(rdp_epsilon),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    try:
        from absl import logging

        logging.set_verbosity(logging.ERROR)
    except ImportError:
        pass
    pld_epsilon(1.0, 1e-2), rdp_epsilon(1.0)  # imports are not timed

    rows = []
    for name, route in ROUTES.items():
        seconds = []
        for _ in range(arguments.repeats):
            start = time.perf_counter()
            sigma = route()
            seconds.append(time.perf_counter() - start)
        rows.append(
            {
                "route": name,
                "noise_multiplier": sigma,
                "epsilon_checked": pld_epsilon(sigma, 5e-5),
                "seconds": statistics.median(seconds),
                "seconds_min": min(seconds),
                "seconds_max": max(seconds),
            }
        )
    query = {"epsilon": EPSILON, "delta": DELTA, "rate": RATE, "steps": STEPS}
    if arguments.json:
        json.dump({"query": query, "rows": rows}, sys.stdout, indent=2)
        print()
        return
    print(f"σ for (ε, δ) = ({EPSILON:g}, {DELTA:g}), Poisson q = {RATE}, T = {STEPS}")
    for row in rows:
        print(
            f"{row['route']:32s} σ {row['noise_multiplier']:.5f}   ε of that σ {row['epsilon_checked']:.4f}   "
            f"{row['seconds']:.2f} s ({row['seconds_min']:.2f}–{row['seconds_max']:.2f})"
        )


if __name__ == "__main__":
    main()
