"""What correlated noise costs and buys, beside its reference, simulations, peers and real rows.

`reference`: an epoch of 36,000 steps, whose noise multiplier and error of prefix sums are known.
`simulation`: who takes part, noise, and gradients chosen in view of what was released: its delta is
never above the certified one, and attained by constant gradients; `counterexamples`: samplers under
which correlated noise costs more, which are refused. `step`: SGD with momentum on the click model,
in CPU time and by the memory of the compiled program. `peers`: jax_privacy 2.0 at the same epsilon,
by its own accountant. `models`: AUC on a store's rows; `--written FOLDER` keeps what runs gave.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optax
from scipy import special

from accounting import BallsAndBinsProfile, GaussianProfile, calibrate
from accounting import epsilon as epsilon_of
from dpsgd import BandedToeplitz, Independent, Mechanism, Noise, dpsgd
from dpsgd.engine.feed import Layout
from dpsgd.engine.programs import shapes_of_rows
from dpsgd.noise.planning import Goal, history_bytes, plan
from dpsgd.noise.strategies import Workload, banded_square_root, optimized
from experiments.benchmarks.case import Estimate, Row, at, cases, figure
from experiments.benchmarks.models import (
    Models,
    Setting,
    adam_default,
    auc,
    best_independent,
    few_steps,
    gain,
)
from experiments.benchmarks.programs import (
    SIZES,
    Program,
    copies_of,
    num_params,
    one_step,
    problem,
)
from experiments.benchmarks.timing import in_turns
from samplers import BallsAndBins, BatchSampler, Deterministic, Poisson, Shuffle

STEPS, DELTA = 36_000, 2.7e-8
REFERENCE = {
    1: {1.0: (0.5520, 1.0), 5.0: (0.4150, 1.0)},
    16: {1.0: (0.7089, 0.4001), 5.0: (0.4894, 0.3674)},
    64: {1.0: (0.8333, 0.2601), 5.0: (0.5398, 0.2241)},
    256: {1.0: (1.0190, 0.1757), 5.0: (0.6035, 0.1384)},
    1024: {1.0: (1.3226, 0.1322), 5.0: (0.6858, 0.0911)},
}
"""By bands and epsilon: noise multiplier of cyclic balls-and-bins, and error of the banded square
root over that of independent noise."""
MOST_OFF = 0.5
"""Percent."""
SURE = 5.4
"""Standard errors: more than so many are off once in 10^7 times."""
MOST_SLOWER = 1.6
BARRED = 1024
"""Batch for which a step may be so much slower: the usual one."""
BANDS = 16


def one_epoch(bands: int) -> BallsAndBins:
    """Returns the sampler of the reference; its batches do not matter."""
    return BallsAndBins(STEPS * 1024, 1024, cycle_length=bands, overflow="accumulate")


# ------------------------------------------------------------------------------- the reference


def error_at(
    noise: Noise, workload: Workload, sampler: BatchSampler, *, epsilon: float, delta: float
) -> tuple[float, float]:
    """Returns the sigma of a guarantee, and the root mean square error of iterates under it."""
    sigma = calibrate(lambda sigma: noise.privacy(sampler, sigma), epsilon=epsilon, delta=delta)
    return sigma, sigma * math.sqrt(workload.mean_square(noise))


def reference(bands: tuple[int, ...] = tuple(REFERENCE)) -> Iterator[Row]:
    """Measures noise multiplier and error beside the reference, and the error of the best noise."""
    alone: dict[float, float] = {}
    for b in sorted({1, *bands}):
        sampler, root = one_epoch(b), banded_square_root(b)
        workload = Workload(sampler.num_steps)
        better = workload.mean_square(optimized(workload, b)) / workload.mean_square(root)
        for epsilon, (sigma, rmse) in REFERENCE[b].items():
            noise_multiplier, error = error_at(
                root, workload, sampler, epsilon=epsilon, delta=DELTA
            )
            relative = error / alone.setdefault(epsilon, error)
            row = at(f"T {sampler.num_steps}, b {b}, epsilon {epsilon:g}")
            figures = [("noise multiplier", noise_multiplier, sigma)]
            if b > 1:
                figures.append(("error / that of b 1", relative, rmse))
            for name, value, known in figures:
                yield row(name, value)
                off = 100 * abs(value / known - 1)
                yield row(f"{name}, off the reference", off, "%", at_most=MOST_OFF)
            yield row("error / that of b 1, optimised", relative * math.sqrt(better))
        name = f"error, optimised / banded square root, T {sampler.num_steps}, b {b}"
        yield figure(name, math.sqrt(better), "x", at_most=1.0)


# ------------------------------------------------------------------------------ the simulation

SIMULATED = BandedToeplitz((1.0, 0.5))
SIGMA, EPSILONS = 0.8, (0.25, 1.0)


def _ones(past: np.ndarray) -> np.ndarray:
    return np.ones(len(past))


GRADIENTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "constant": _ones,
    "alternating": lambda past: np.full(len(past), (-1.0) ** (past.shape[1] // 2)),
    "of the last release's sign": lambda past: (
        np.where(past[:, -1] < 0, -1.0, 1.0) if past.size else _ones(past)
    ),
    "large after large releases": lambda past: np.where(past.sum(axis=1) > 0, 1.0, 0.2),
    "small once it shows": lambda past: np.where(past.max(axis=1, initial=-9.0) > 1.2, 0.1, 1.0),
}
"""What an example contributes, given all releases before, as an adversary chooses it: in [-1, 1]"""


def _mean(values: np.ndarray) -> Estimate:
    return Estimate(values.mean(), values.std() / math.sqrt(values.size))


def _surely(estimate: Estimate) -> float:
    """Returns what an estimate is at least."""
    assert estimate.error is not None
    return estimate - SURE * estimate.error


def whole_mechanism(
    gradient: Callable[[np.ndarray], np.ndarray], group: int, epochs: int, draws: int, seed: int
) -> dict[tuple[float, str], Estimate]:
    """Simulates cyclic balls-and-bins of 8 steps and 2 groups under noise of 2 bands.

    The loss of a run is a product over the possible steps of the example, by the chain rule; the
    bin of each epoch is averaged out. The gradient of an example of this group is made of all rows
    of M S + sigma z before the step, [draws, steps].
    """
    rng, steps = np.random.default_rng(seed), 8 * epochs
    matrix = SIMULATED.whiten(np.eye(steps))
    own = np.arange(group, steps, 2)
    found = {}
    for present in (True, False):
        chosen = 2 * rng.integers(4, size=(draws, epochs)) + group + 8 * np.arange(epochs)
        takes_part = np.zeros((draws, steps), bool)
        if present:
            np.put_along_axis(takes_part, chosen, True, axis=1)
        rows, given = np.zeros((draws, steps)), np.zeros((draws, steps))
        for t in range(steps):
            if t % 2 == group:
                given[:, t] = gradient(rows[:, :t])
            near = slice(max(0, t - 1), t + 1)
            moved = (given[:, near] * takes_part[:, near]) @ matrix[t, near]
            rows[:, t] = moved + SIGMA * rng.normal(size=draws)
        columns, sizes = matrix[:, own], given[:, own]
        lengths = sizes**2 * np.sum(columns**2, axis=0)
        logs = ((rows @ columns) * sizes - lengths / 2) / SIGMA**2
        bins = logs.reshape(draws, epochs, 4) - math.log(4)
        loss = special.logsumexp(bins, axis=2).sum(axis=1) * (1 if present else -1)
        for epsilon in EPSILONS:
            delta = np.maximum(0.0, -np.expm1(epsilon - loss))
            found[epsilon, "removed" if present else "added"] = _mean(delta)
    return found


def simulation(*, draws: int = 300_000) -> Iterator[Row]:
    for epochs, (what, gradient) in itertools.product((1, 2), GRADIENTS.items()):
        certified = {
            epsilon: BallsAndBinsProfile(SIGMA, 4, epochs).delta(epsilon) for epsilon in EPSILONS
        }
        surely, near = 0.0, []
        for group in (0, 1):
            found = whole_mechanism(gradient, group, epochs, draws, seed=group)
            for epsilon, bound in certified.items():
                both = [s for (at, _), s in found.items() if at == epsilon]
                surely = max(surely, *(_surely(s) / bound.upper for s in both))
                if group == 0:
                    near.append(max(both) / bound.upper)
        name = f"simulated / certified delta, E {epochs}, gradients {what}"
        yield figure(f"{name}, less {SURE} standard errors", surely, "x", at_most=1.0)
        if what == "constant":
            yield figure(f"{name}, first group", min(near), "x", at_least=0.99)


# ---------------------------------------------------------------------- the counterexamples


@dataclass(frozen=True)
class ChangingGroups(BallsAndBins):
    """Balls-and-bins with groups that change from epoch to epoch; so steps may be neighbours."""

    @property
    def separation(self) -> int:
        """One step: from the last of an epoch to the first of the next."""
        return 1


def simulated_delta(
    epochs: list[tuple[int, ...]], num_steps: int, epsilon: float, draws: int
) -> Estimate:
    """Returns delta of constant gradients where one of each epoch's steps is drawn: the larger."""
    rng, matrix = np.random.default_rng(1), SIMULATED.whiten(np.eye(num_steps))
    outcomes = [list(steps) for steps in itertools.product(*epochs)]
    means = np.stack([matrix[:, steps].sum(axis=1) for steps in outcomes])

    def loss(rows: np.ndarray) -> np.ndarray:
        logs = rows @ means.T / SIGMA**2 - np.sum(means**2, axis=1) / (2 * SIGMA**2)
        return special.logsumexp(logs, axis=1) - math.log(len(outcomes))

    noise = SIGMA * rng.normal(size=(draws, num_steps))
    took = means[rng.integers(len(outcomes), size=draws)] + noise
    both = loss(took), -loss(noise)
    return max(_mean(np.maximum(0.0, -np.expm1(epsilon - x))) for x in both)


def counterexamples(*, draws: int = 300_000) -> Iterator[Row]:
    """Measures what wrong samplers cost over what they would with minimum separation."""
    changing = simulated_delta([(1, 3), (4, 6)], 8, 1.0, draws)
    plain = simulated_delta([tuple(range(8))], 8, 1.0, draws)
    # Last in one epoch and first in the next: the sum of two neighbouring columns.
    length = float(np.linalg.norm(SIMULATED.whiten(np.eye(8))[:, 3:5].sum(axis=1)))
    shuffled = GaussianProfile(SIGMA / length).delta(1.0).lower
    as_cyclic = BallsAndBinsProfile(SIGMA, 2, 2), BallsAndBinsProfile(SIGMA, 8)
    cases: list[tuple[str, BatchSampler, float, float]] = [
        (
            "groups that change from epoch to epoch / cyclic",
            ChangingGroups(16, 4, 2, cycle_length=2),
            _surely(changing),
            as_cyclic[0].delta(1.0).upper,
        ),
        (
            "shuffling that is redrawn / a fixed order",
            Shuffle(16, 4, 2),
            shuffled,
            GaussianProfile(SIGMA / math.sqrt(2)).delta(1.0).upper,
        ),
        (
            "bands over plain balls-and-bins / these bins",
            BallsAndBins(32, 4),
            _surely(plain),
            as_cyclic[1].delta(1.0).upper,
        ),
    ]
    for name, sampler, delta, wrong in cases:
        yield figure(f"delta(1), {name}", delta / wrong, "x", at_least=1.0)
        try:
            Mechanism(sampler, SIGMA, 1.0, noise=SIMULATED).privacy()
            refused = False
        except ValueError:
            refused = True
        yield figure(f"refused: {name.split(' /')[0]}", float(refused), at_least=1.0)


# -------------------------------------------------------------------------------- the peers


def cyclic_poisson() -> Iterator[Row]:
    """Measures how far epsilon of cyclic Poisson sampling lies from dp_accounting's."""
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    for sampler, sigma in (
        (Poisson(4000, 40, 3, cycle_length=8, overflow="accumulate"), 1.0),
        (Poisson(88_000, 1000, 10, cycle_length=8, overflow="accumulate"), 1.2),
        (Poisson(STEPS * 1024, 1024, cycle_length=16, overflow="accumulate"), 0.71),
    ):
        step = from_gaussian_mechanism(
            sigma, sampling_prob=sampler.sampling_prob, value_discretization_interval=1e-4
        )
        delta = 1 / sampler.num_examples
        theirs = step.self_compose(sampler.num_steps // sampler.cycle_length)
        noise = banded_square_root(sampler.cycle_length)
        ours = epsilon_of(noise.privacy(sampler, sigma), delta).upper
        off = abs(ours - theirs.get_epsilon_for_delta(delta))
        row = at(f"{sampler.num_steps} steps, b {sampler.cycle_length}, sigma {sigma:g}")
        yield row("epsilon, cyclic Poisson, off dp_accounting", off, "epsilon", at_most=1e-3)


def band_mf(bands: int = BANDS) -> Iterator[Row]:
    """Measures the noise per update beside that of jax_privacy at the same epsilon."""
    from jax_privacy.accounting import accountants, analysis
    from jax_privacy.accounting.calibrate import calibrate_noise_multiplier
    from jax_privacy.matrix_factorization import toeplitz

    accountant = analysis.DpsgdTrainingAccountant(accountants.PldAccountantConfig())
    sampler = one_epoch(bands)
    steps = sampler.num_steps
    workload = Workload(steps)
    column = toeplitz.optimize_banded_toeplitz(n=steps, bands=bands)
    # Of one step: their columns have norm 1, as ours have.
    theirs_error = math.sqrt(float(toeplitz.loss(column, steps)))
    noise = optimized(workload, bands)
    for epsilon in (1.0, 5.0):
        sigma = calibrate_noise_multiplier(
            target_epsilon=epsilon,
            accountant=accountant,
            batch_sizes=1024,
            num_updates=steps,
            num_samples=STEPS * 1024,
            target_delta=DELTA,
            cycle_length=bands,
            tol=1e-4,
        )
        own, error = error_at(noise, workload, sampler, epsilon=epsilon, delta=DELTA)
        row, theirs = at(f"T {steps}, b {bands}, epsilon {epsilon:g}"), sigma * theirs_error
        yield row("noise multiplier, ours", own)
        yield row("noise multiplier, jax_privacy", sigma)
        yield row("error of prefix sums, ours", error)
        yield row("error of prefix sums, jax_privacy", theirs)
        name = "error of prefix sums, ours / jax_privacy's BandMF"
        yield row(name, error / theirs, "x", at_most=1.0)


# ------------------------------------------------------------------------- time and memory


def step(batch_size: int, size: str = "8M", *, rounds: int = 9) -> Iterator[Row]:
    """Measures time and memory of a step of SGD with momentum, with bands over without."""
    made, sgd = problem(SIZES[size], batch_size), optax.sgd(1e-3, momentum=0.9)
    algorithm, count = dpsgd(made.loss_fn, sgd), num_params(made.params)
    programs, temporary, kept = {}, {}, {}
    for b in (1, BANDS):
        noise: Noise = banded_square_root(b) if b > 1 else Independent()
        mechanism = Mechanism(Deterministic(batch_size * BANDS, batch_size), 1.0, 1.0, noise)
        private, (state, *inputs) = one_step(made.loss_fn, sgd, mechanism, made.params, made.batch)
        # The memory is that of the program that trains.
        data = shapes_of_rows(made.batch, BANDS * batch_size)
        layout = Layout.of(mechanism.sampler, data, data_on="device")
        memory = layout.program(algorithm, mechanism, state, data).memory_analysis()
        temporary[b], kept[b] = memory.temp_size_in_bytes, memory.argument_size_in_bytes
        programs[f"b {b}"] = Program(private, copies_of(state), *inputs)
        del state
    seconds = in_turns(programs, rounds)
    row = at(f"{size} parameters, batch {batch_size}")
    yield row("step of SGD, b 1", seconds.median("b 1"), "s")
    yield row(f"step of SGD, b {BANDS}", seconds.median(f"b {BANDS}"), "s")
    bar = MOST_SLOWER if batch_size == BARRED else None
    ratio = seconds.ratio(f"b {BANDS}", "b 1")
    yield row(f"step of SGD, b {BANDS} / b 1", ratio, "x", at_most=bar)
    history = history_bytes(BANDS - 1, count)
    yield row(f"history of b {BANDS}", history / 1e6, "MB")
    more = (kept[BANDS] - kept[1]) / history
    yield row(f"state of b {BANDS} beyond b 1 / its history", more, "x", at_most=1.001)
    extra = (temporary[BANDS] - temporary[1]) / history
    # The noise of this step is one more vector.
    name = f"temporary memory of b {BANDS} beyond b 1 / its history"
    yield row(name, extra, "x", at_most=0.1)


# ---------------------------------------------------------------------------------- real rows

MANY_STEPS = (
    ("704 steps an epoch, 3 epochs", Setting(8.0, 125, 3, 0.05), 16, 0.006),
    ("176 steps an epoch, 10 epochs", Setting(8.0, 500, 10, 0.2), 8, 0.003),
)
"""Many steps: what they are called, their setting, bands, and how much better AUC must be."""
EPSILONS_OF_MODELS = 8.0, 3.0, 1.0


def models(
    *, store: str | None = None, seeds: int = 5, written: str | None = None
) -> Iterator[Row]:
    made = Models.of(store, seeds, written, model="small")
    for what, setting, bands, bar in MANY_STEPS:
        banded = replace(setting, bands=bands)
        for each in (setting, banded):
            yield from auc(made, each)
        name = f"AUC of b {bands} minus b 1, test rows, epsilon {setting.epsilon:g}, {what}"
        yield gain(made, banded, setting, name, bar)
    rows = len(made.task.columns()["label"])
    for epsilon in EPSILONS_OF_MODELS:
        for what, setting in few_steps(epsilon).items():
            yield from auc(made, setting, f"88 steps an epoch, {what}")
        yield planned(epsilon, rows)
    for epsilon in EPSILONS_OF_MODELS:
        banded = few_steps(epsilon)["SGD with 22 bands"]
        for what, other in (
            ("Adam's default", adam_default(epsilon)),
            ("the best of SGD with independent noise", best_independent(epsilon)),
        ):
            yield from auc(made, other, what)
            name = f"AUC of SGD with 22 bands minus {what}, test rows, epsilon {epsilon:g}"
            yield gain(made, banded, other, name)


def planned(epsilon: float, num_examples: int) -> Row:
    """Returns the bands that the planner chooses for 88 steps an epoch, among those tried."""
    sampler = BallsAndBins(num_examples, 1000, 10)
    found = plan(sampler, Goal(epsilon, 1 / num_examples, momentum=0.9), (8, 22))
    chosen = min(found, key=lambda candidate: candidate.error)
    return figure(f"bands that the planner chooses, epsilon {epsilon:g}", chosen.bands)


FEW: dict[str, Any] = {"quick": {"draws": 20_000}, "exact": True}
CASES = [
    *cases(reference, quick={"bands": (16,)}, exact=True),
    *cases(simulation, **FEW),
    *cases(counterexamples, "simulation, counterexamples", **FEW),
    *cases(cyclic_poisson, "peers, cyclic Poisson", needs=("dp_accounting",), exact=True),
    *cases(band_mf, "peers, BandMF", needs=("jax_privacy",), exact=True),
    *cases(step, over={"batch_size": (256, BARRED)}, quick={"size": "1M", "rounds": 1}),
    *cases(models, seconds=1_800, needs=("--store",)),
]
