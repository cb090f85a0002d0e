"""Certified accounting of balls-and-bins against its bars and its peer, in CPU time.

The peer is PLD_accounting (V. Feldman, M. Shenfeld, arXiv:2602.17284), its geometric method; it is
no dependency of this project. Where it is not importable here, name an interpreter that has it:

    python -m venv peer && peer/bin/pip install PLD_accounting==2.0 numba
    scripts/bench accounting --peer-python peer/bin/python --json accounting.json

    scripts/bench accounting --hard --json hard.json

asks what accountants break at, and compares Poisson's with dp_accounting's (see `accounting_hard`).

Both sides compute both ends of an interval for epsilon. Each ratio is the median over the
repetitions of the ratios within one; compilation and imports are left out on both sides, caches are
emptied on ours.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from accounting import BallsAndBinsProfile, Bound, calibrate
from accounting.profiles import balls_and_bins, shuffle
from experiments.benchmarks import accounting_hard
from experiments.benchmarks.rows import Row, options_of, positive, report

DELTA = 2.7e-8
PEER_PACKAGE = "PLD_accounting"

# The peer's side of the conversation: a JSON line in, {sigma, steps, discretization}, a JSON line
# out.
_PEER = """
import importlib.metadata, json, sys, time
import PLD_accounting as peer

def interval(sigma, steps, discretization):
    options = {} if discretization is None else {"loss_discretization": discretization}
    config = peer.AllocationSchemeConfig(
        convolution_method=peer.ConvolutionMethod.GEOM, **options)
    params = peer.PrivacyParams(sigma=sigma, num_steps=steps, delta=DELTA)
    begin = time.process_time()
    upper, lower = (
        peer.gaussian_allocation_epsilon_configurable(params=params, config=config, bound_type=side)
        for side in (peer.BoundType.DOMINATES, peer.BoundType.IS_DOMINATED))
    return {"lower": lower, "upper": upper, "seconds": time.process_time() - begin}

interval(1.0, 3, 0.1)
print(json.dumps({"version": importlib.metadata.version("PLD_accounting"),
                  "numba": peer.has_numba()}), flush=True)
for line in sys.stdin:
    print(json.dumps(interval(**json.loads(line))), flush=True)
"""


class Peer:
    """The peer in an interpreter of its own, warm, answering one question after the other."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, "-W", "ignore", "-c", _PEER.replace("DELTA", repr(DELTA))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.description = self._read()

    def interval(
        self, sigma: float, steps: int, discretization: float | None
    ) -> tuple[Bound, float]:
        """Returns the peer's interval for epsilon and its CPU seconds."""
        assert self._process.stdin is not None
        question = {"sigma": sigma, "steps": steps, "discretization": discretization}
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        return Bound(answer["lower"], answer["upper"]), answer["seconds"]

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer's process ended with status {self._process.wait()}")
        return json.loads(line)


def seconds(work: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the result and the CPU seconds of `work`, with the accountants' caches emptied."""
    for module in (balls_and_bins, shuffle):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    begin = time.process_time()
    result = work()
    return result, time.process_time() - begin


def median_seconds(work: Callable[[], Any], repetitions: int) -> tuple[Any, float]:
    """Returns a result and the median CPU seconds of several runs of `work`."""
    runs = [seconds(work) for _ in range(repetitions)]
    return runs[0][0], statistics.median(spent for _, spent in runs)


def against_peer(
    peer: Peer | None, sigma: float, steps: int, discretization: float | None, repetitions: int
) -> list[Row]:
    """Compares our CPU time with the peer's at one discretization, for a tenth of its width."""
    profile = BallsAndBinsProfile(sigma, steps)
    faster, narrower, above = [], [], []
    for _ in range(repetitions):
        if peer is None:
            break
        theirs, theirs_spent = peer.interval(sigma, steps, discretization)
        tolerance = min(1e-3, theirs.width / 10.0)
        ours, spent = seconds(functools.partial(profile.epsilon, DELTA, tolerance))
        faster.append(theirs_spent / spent)
        narrower.append(theirs.width / ours.width)
        above.append(ours.upper - theirs.upper)
    grid = "default" if discretization is None else f"{discretization:g}"
    label = f"peer (grid {grid}) / ours, sigma {sigma:g}, T {steps}"
    return [
        Row.at_least(f"CPU time, {label}", _median(faster), "x", 8.0),
        Row.at_least(f"interval's width, {label}", _median(narrower), "x", 10.0),
        Row.at_most(
            f"our upper end - peer's (grid {grid}), sigma {sigma:g}, T {steps}",
            max(above, default=None),
            "epsilon",
            0.0,
        ),
    ]


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and returns 1 if a bar does not hold."""
    parser = options_of("accounting", __doc__)
    parser.add_argument(
        "--peer-python", metavar="PATH", help=f"an interpreter that has {PEER_PACKAGE}"
    )
    parser.add_argument("--repetitions", type=positive, default=3, help="runs for each median")
    parser.add_argument(
        "--hard", action="store_true", help="the questions at which accountants break instead"
    )
    parser.add_argument(
        "--points", type=int, default=1000, metavar="N", help="random points of --hard; 0 for none"
    )
    options = parser.parse_args(argv)
    if options.hard:
        rows = list(accounting_hard.examples()) + accounting_hard.deltas()
        if options.points:
            peer_points = max(1, options.points // 5)
            rows += accounting_hard.against_dp_accounting(peer_points, seconds)
            rows += accounting_hard.random_points(options.points)
        return report(rows, options.json)

    python = options.peer_python
    if python is None and importlib.util.find_spec(PEER_PACKAGE) is not None:
        python = sys.executable
    peer = None if python is None else Peer(python)
    if peer is None:
        print(f"{PEER_PACKAGE} is not importable here; name an interpreter with --peer-python")
    else:
        found = peer.description
        print(f"peer: {PEER_PACKAGE} {found['version']}, numba {'on' if found['numba'] else 'off'}")

    rows = against_peer(peer, 1.0, 565, None, options.repetitions)
    rows += against_peer(peer, 0.5, 36_000, 0.05, options.repetitions)
    for sigma, bar in ((0.5, 1.5), (0.1, 20.0)):
        profile = BallsAndBinsProfile(sigma, 36_000)
        bound, spent = median_seconds(
            functools.partial(profile.epsilon, DELTA), options.repetitions
        )
        rows.append(Row.at_most(f"CPU time, interval, sigma {sigma:g}, T 36000", spent, "s", bar))
        rows.append(
            Row.at_most(f"interval's width, sigma {sigma:g}, T 36000", bound.width, "epsilon", 1e-3)
        )
    noise, spent = median_seconds(
        lambda: calibrate(lambda s: BallsAndBinsProfile(s, 36_000), epsilon=5.0, delta=DELTA),
        options.repetitions,
    )
    rows.append(Row.at_most("CPU time, calibrate to epsilon 5, T 36000", spent, "s", 10.0))
    rows.append(Row("noise multiplier found, epsilon 5, T 36000", noise, ""))
    if peer is not None:
        peer.close()
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
