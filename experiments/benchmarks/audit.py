"""What the audit before a run costs, and whether it ever fails a sound one.

The p-values of many sound audits (samplers, noises, sizes and seeds vary) are uniform, or larger:
then one is below `FALSE_ALARM` as rarely as is said. The audit's time is that of one process on one
core, without the compilation of the training program, which the run needs anyway.
"""

from __future__ import annotations

import itertools
import math
import resource
import sys
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

from dpsgd import LazyTables, Mechanism, RootKey, dpsgd
from dpsgd.audit.audit import audit_program
from dpsgd.audit.probe import held
from dpsgd.audit.report import FALSE_ALARM, AuditReport
from dpsgd.engine.feed import Layout
from dpsgd.engine.programs import shapes_of_rows
from dpsgd.runs.audit import audit_synthetic
from dpsgd.runs.optimizer import ADAM, Cosine
from experiments.benchmarks.case import Row, at, cases, figure
from experiments.benchmarks.programs import num_params
from experiments.benchmarks.timing import Spent
from experiments.tasks.clicks.model import functional
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import PRESETS
from experiments.tasks.clicks.synthetic import rows as synthetic
from samplers import (
    BallsAndBins,
    BatchSampler,
    Deterministic,
    Multistage,
    Poisson,
    Shuffle,
    UnitsThenPoisson,
    UnitTree,
    UserPoisson,
)

TIME_BARS = {"small": 5.0, "large lazy": 10.0, "large": 40.0}
"""CPU seconds of an audit at n = 88,000 and batch 1,024, by preset of the model of clicks."""
RUN_BAR = 1e-4
"""Probability, at most, that the audit of a sound run fails."""
N, D = 2_400, 12


def sound() -> Iterator[tuple[str, AuditReport]]:
    """Yields audits of sound programs without end, and what was audited."""
    rng = np.random.default_rng(0)
    rows = {
        "x": rng.normal(size=(64, D)).astype(np.float32),
        "y": rng.normal(size=64).astype(np.float32),
    }
    tree = UnitTree.from_columns({"shop": np.arange(N) // 80, "user": np.arange(N) // 4})
    samplers: list[BatchSampler] = [
        Poisson(N, 60, 3, max_batch_size=100),
        BallsAndBins(N, 60, 3, max_batch_size=100),
        BallsAndBins(N, 60, 3, assignment="fixed", max_batch_size=100),
        Poisson(N, 60, 3, max_batch_size=62),
        BallsAndBins(N, 60, 3, overflow="accumulate", max_batch_size=25),
        Shuffle(N, 60, 3),
        Deterministic(N, 60, 3),
        UserPoisson(N, 60, 3, max_contributions=4, max_batch_size=100),
        Multistage(tree, (5, 4, 3), steps=120),
        UnitsThenPoisson(tree, (5, 6), 0.5, steps=120, max_batch_size=100),
    ]

    def loss(params, example):
        hidden = jnp.tanh(example["x"] @ params["kernel"] + params["bias"])
        return jnp.square(jnp.dot(hidden, params["head"].astype(jnp.float32)) - example["y"])

    algorithm = dpsgd(loss, optax.adam(1e-3))
    for number, sampler in enumerate(itertools.cycle(samplers)):
        sigma, clip = np.exp(rng.uniform(np.log(0.3), np.log(5), 2)).tolist()
        params = {
            "kernel": 0.1 * rng.normal(size=(D, 9)).astype(np.float32),
            "bias": np.zeros(9, np.float32),
            "head": rng.normal(size=9).astype(jnp.bfloat16),
        }
        mechanism = Mechanism(sampler, sigma, clip)
        root = RootKey.from_insecure_seed(number)
        what = f"{type(sampler).__name__}, sigma {sigma:.3g}, C {clip:.3g}, seed {number}"
        yield what, audit_program(algorithm, mechanism, params, rows, root=root)


def false_alarms(*, audits: int = 300) -> Iterator[Row]:
    """Says how the p-values of so many sound audits are distributed."""
    found: dict[str, list[float]] = {}
    alarms = []
    for what, audit in itertools.islice(sound(), audits):
        for check in audit.checks:
            if check.pvalue is not None:
                found.setdefault(check.name, []).append(check.pvalue)
        alarms += [f"{check.name}: {what}" for check in audit.checks if not check.passed]
    for alarm in alarms:
        print("false alarm:", alarm, file=sys.stderr)
    pvalues = np.concatenate([np.array(values) for values in found.values()])
    # One-sided: that they are larger than uniform numbers is no fault.
    ks = {
        name: float(stats.kstest(values, "uniform", alternative="greater").pvalue)
        for name, values in found.items()
    }
    worst = min(ks, key=lambda name: ks[name])
    yield figure(f"sound audits that failed, of {audits}", len(alarms), at_most=0)
    of_a_run = len(found) * FALSE_ALARM
    yield figure("false alarm a run, by the number of checks", of_a_run, at_most=RUN_BAR)
    name = f"one-sided KS p-value of {len(found)} checks, the least times their number: {worst}"
    yield figure(name, min(1.0, ks[worst] * len(ks)), at_least=1e-3)
    least = min(1.0, float(pvalues.min() * pvalues.size))
    yield figure(f"least of {pvalues.size} p-values, times their number", least, at_least=1e-3)
    for level in (0.1, 0.01):
        share = float(np.mean(pvalues <= level))
        bar = level + 4 * math.sqrt(level * (1 - level) / audits)  # checks of one audit may agree
        yield figure(f"share of p-values up to {level}", share, at_most=round(bar, 4))


def generated(count: int) -> dict[str, np.ndarray]:
    """Returns so many rows of clicks, as a task has them."""
    columns = synthetic.in_memory(max(count, 2), seed=0).columns
    return {name: column[:count] for name, column in columns.items()}


def audit(preset: str, num_examples: int = 88_000, batch_size: int = 1_024) -> Iterator[Row]:
    """Measures the audit of a run, compiling its program, and its memory."""
    params, _, loss = functional(PRESETS[preset.split()[0]], DISPLAY_ADS, 0)
    mechanism = Mechanism(Poisson(num_examples, batch_size, 2), 1.0, 1.0)
    tables = LazyTables(Cosine(1.0, mechanism.num_steps)) if "lazy" in preset else None
    algorithm = dpsgd(loss, ADAM, tables=tables)
    state = held(algorithm.init(params, mechanism, generated(2)), params)
    data = shapes_of_rows(generated(2), num_examples)
    layout = Layout.choose(mechanism.sampler, data)
    compiling = Spent.on(lambda: layout.program(algorithm, mechanism, state, data))
    found: list[AuditReport] = []
    auditing = Spent.on(
        lambda: found.append(audit_synthetic(algorithm, mechanism, state, layout, generated))
    )
    size, peak = num_params(params), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    sizes = f"n = {num_examples:,}, batch {batch_size:,}"
    row = at(f"{preset} ({size / 1e6:.3g}M parameters), {sizes}")
    yield row("compiling the training program", compiling.cpu_seconds, "s")
    yield row("audit", auditing.cpu_seconds, "s", at_most=TIME_BARS[preset])
    yield row("memory at most so far", peak, "GiB")
    failed = sum(not check.passed for check in found[0].checks)
    yield row("checks that failed", failed, at_most=0)


CASES = [
    *cases(audit, over={"preset": TIME_BARS}, quick={}, exact=True),
    *cases(false_alarms, quick={"audits": 12}, seconds=900, exact=True),
]
