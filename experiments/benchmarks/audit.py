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
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

from dpsgd import LazyTables, Mechanism, RootKey, Secure, dpsgd
from dpsgd.audit.audit import audit_program
from dpsgd.audit.report import FALSE_ALARM, AuditReport
from dpsgd.engine.feed import Layout
from dpsgd.noise.base import Independent
from dpsgd.runs.audit import audit_synthetic
from dpsgd.runs.optimizer import ADAM, Cosine
from experiments.benchmarks.rows import Row, options_of, positive, report
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

TIME_BARS = {"small": 5.0, "paper lazy": 10.0, "paper": 40.0}
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
        noise = Secure() if number % 37 == 36 else Independent()
        sigma, clip = np.exp(rng.uniform(np.log(0.3), np.log(5), 2)).tolist()
        params = {
            "kernel": 0.1 * rng.normal(size=(D, 9)).astype(np.float32),
            "bias": np.zeros(9, np.float32),
            "head": rng.normal(size=9).astype(jnp.bfloat16),
        }
        mechanism = Mechanism(sampler, sigma, clip, noise)
        root = RootKey.from_insecure_seed(number)
        what = f"{type(sampler).__name__}, sigma {sigma:.3g}, C {clip:.3g}, {noise}, seed {number}"
        yield what, audit_program(algorithm, mechanism, params, rows, root=root)


def calibration(audits: int) -> list[Row]:
    """Returns how the p-values of so many sound audits are distributed."""
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
    rows = [
        Row.at_most(f"sound audits that failed, of {audits}", len(alarms), "", 0),
        Row.at_most(
            "false alarm a run, by the number of checks", len(found) * FALSE_ALARM, "", RUN_BAR
        ),
        Row.at_least(
            f"one-sided KS p-value of {len(found)} checks, the least times their number: {worst}",
            min(1.0, ks[worst] * len(ks)),
            "",
            1e-3,
        ),
        Row.at_least(
            f"least of {pvalues.size} p-values, times their number",
            min(1.0, float(pvalues.min() * pvalues.size)),
            "",
            1e-3,
        ),
    ]
    for level in (0.1, 0.01):
        share = float(np.mean(pvalues <= level))
        bar = level + 4 * math.sqrt(level * (1 - level) / audits)  # checks of one audit may agree
        rows.append(Row.at_most(f"share of p-values up to {level}", share, "", round(bar, 4)))
    return rows


class _Rows:
    """Generated rows of clicks, as a task has them."""

    def __init__(self, params, loss):
        self.params, self.loss = params, loss

    def init(self, seed: int):
        """Returns the parameters, whatever the seed is."""
        del seed
        return self.params

    def generated(self, count: int):
        """Returns so many rows."""
        columns = synthetic.in_memory(max(count, 2), seed=0).columns
        return {name: column[:count] for name, column in columns.items()}


def seconds(preset: str, num_examples: int, batch_size: int) -> list[Row]:
    """Returns the CPU seconds of the audit of a run, and of compiling its program; its memory."""
    params, _, loss = functional(PRESETS[preset.split()[0]], DISPLAY_ADS, 0)
    mechanism, task = Mechanism(Poisson(num_examples, batch_size, 2), 1.0, 1.0), _Rows(params, loss)
    tables = LazyTables(Cosine(1.0, mechanism.num_steps)) if "lazy" in preset else None
    algorithm = dpsgd(loss, ADAM, tables=tables)
    state = algorithm.init(params, mechanism, *([task.generated(2)] if tables else []))
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    data = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((num_examples, *x.shape[1:]), x.dtype), task.generated(2)
    )
    layout = Layout.of(mechanism.sampler, data)
    begin = time.process_time()
    layout.program(algorithm, mechanism, state, data)
    compiled = time.process_time()
    audit = audit_synthetic(algorithm, mechanism, state, layout, task.generated)
    end = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    at = f"{preset} ({size / 1e6:.3g}M parameters), n = {num_examples:,}, batch {batch_size:,}"
    return [
        Row(f"compiling the training program, {at}", compiled - begin, "s"),
        Row.at_most(f"audit, {at}", end - compiled, "s", TIME_BARS[preset]),
        Row(f"memory at most so far, {at}", peak, "GiB"),
        Row.at_most(f"checks that failed, {at}", sum(not c.passed for c in audit.checks), "", 0),
    ]


def main(argv: list[str] | None = None) -> int:
    """Audits, and returns 1 if a bar does not hold."""
    parser = options_of("audit", __doc__ or "", quick="twelve audits, and the small preset's time")
    parser.add_argument("--audits", type=positive, default=300, help="sound ones, for p-values")
    parser.add_argument("--presets", nargs="*", choices=TIME_BARS, default=list(TIME_BARS))
    options = parser.parse_args(argv)
    if options.quick:
        options.audits, options.presets = 12, ["small"]
    rows = []
    for preset in options.presets:
        rows += seconds(preset, 88_000, 1_024)
    return report(rows + calibration(options.audits), options.json)


if __name__ == "__main__":
    sys.exit(main())
