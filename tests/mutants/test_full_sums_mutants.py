"""Planted bugs of sums over all rows: what they clip, add, read, declare and cost.

Those of a release are planted into its algorithm; those around it into the library, where they
would be made.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planting import Fault, after, before, plant
from scipy import optimize, special

from dpsgd import (
    Mechanism,
    Platt,
    Refinement,
    dpsgd,
)
from dpsgd.audit.audit import audit_queries
from dpsgd.audit.runtime.differential import STEP
from dpsgd.audit.runtime.flow import LEAVES
from dpsgd.core.gaussian import add_gaussian_noise
from dpsgd.core.queries import FullSums
from dpsgd.engine import queries
from dpsgd.engine.loop import train_blocks
from dpsgd.noise.keys import RootKey
from samplers import Deterministic, Poisson
from tests.dpsgd.mixing import shared

pytestmark = [pytest.mark.mutants, pytest.mark.usefixtures("unoptimised")]

N = 300
SUMS = FullSums(4, 6.0, 2.2361)
MECHANISM = Mechanism(Poisson(N, 50), 1.0, 1.0, full_sums=SUMS)
PARAMS = {"w": jnp.full(8, 0.3), "b": jnp.zeros(())}
RNG = np.random.default_rng(0)
ROWS = {
    "x": RNG.normal(size=(64, 8)).astype(np.float32),
    "y": RNG.integers(0, 2, 64).astype(np.float32),
}
CURVED = 2  # coordinates from here on are the Hessian's


def logit(params, example):
    return jnp.dot(params["w"], example["x"]) + params["b"]


def label(example):
    return example["y"]


def rescaled(params, a, c):
    return {"w": a * params["w"], "b": a * params["b"] + c}


PLATT = Platt(logit, label, rescaled)


def of_noise(change):
    """A fault of the noise: `change(noise, noise of the sum before)` takes its place."""

    def update(sound, state, total, key, scales):
        zeros = jax.tree.map(jnp.zeros_like, total)
        noise, previous_noise = (
            add_gaussian_noise(zeros, key, step, scales.noise_stddev)["sum"]
            for step in (state.step, jnp.maximum(state.step, 1) - 1)
        )
        noised = total | {"sum": total["sum"] + change(noise, previous_noise)}
        # The least noise there is, 2^-100: without any, it would be another program.
        faint = dataclasses.replace(scales, noise_stddev=jnp.zeros_like(scales.noise_stddev))
        return sound.update(state, noised, key, faint)

    return {"update": update}


def of_sum(change):
    """A fault of the sum: `change(params, batch, weights, scales)` takes its place."""

    def clipped_sum(sound, *inputs):
        total, log = sound.clipped_sum(*inputs)
        return total | {"sum": change(*inputs)}, log

    return {"clipped_sum": clipped_sum}


def of_arguments(change):
    """A fault of the sum's arguments: `change(weights, scales)` takes their place."""

    def clipped_sum(sound, params, batch, weights, scales):
        return sound.clipped_sum(params, batch, *change(weights, scales))

    return {"clipped_sum": clipped_sum}


def divided_by(count):
    """A fault of the divisor: a count of the batch takes its place."""
    logs = []  # of the sum, for the update after it

    def clipped_sum(sound, *inputs):
        total, log = sound.clipped_sum(*inputs)
        logs.append(log)
        return total, log

    def update(sound, state, total, key, scales):
        divisor = jnp.maximum(1, getattr(logs.pop(), count))
        divided = dataclasses.replace(scales, expected_batch_size=divisor)
        return sound.update(state, total, key, divided)

    return {"clipped_sum": clipped_sum, "update": update}


def shown_to_the_fold(sound, state, total, key, scales):
    """The next state has a hundredth of the mean without its noise."""
    next_state, gradient = sound.update(state, total, key, scales)
    moved = next_state.raw_params["state"] + 1e-2 / N * total["sum"][:CURVED]
    return next_state._replace(raw_params=next_state.raw_params | {"state": moved}), gradient


def clipped(vectors, scales):
    norms = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors * jnp.minimum(1, scales.l2_clip_norm / jnp.maximum(norms, 1e-30))


def parts_clipped_separately(params, batch, weights, scales):
    """An example may then add the square root of 2 times C."""
    vectors = jax.vmap(PLATT.statistic, (None, 0))(params["state"], batch)
    vectors = jnp.where(jnp.isfinite(vectors).all(axis=1, keepdims=True), vectors, 0)
    pieces = [clipped(piece, scales) for piece in jnp.split(vectors, [CURVED], axis=1)]
    return weights @ jnp.concatenate(pieces, axis=1)


def statistic_of_the_mean_row(params, batch, weights, scales):
    count = jnp.maximum(1, weights.sum())
    mean_row = jax.tree.map(lambda x: weights @ jnp.nan_to_num(x) / count, batch)
    return count * clipped(PLATT.statistic(params["state"], mean_row), scales)


def unclipped(weights, scales):
    return weights, dataclasses.replace(scales, l2_clip_norm=2.0**40 + 0 * scales.l2_clip_norm)


def with_padding(weights, scales):
    return jnp.ones_like(weights), scales


RELEASES = {
    "no noise on the Hessian": of_noise(lambda z, previous: z.at[CURVED:].set(0)),
    "half the noise on the Hessian": of_noise(lambda z, previous: z.at[CURVED:].multiply(0.5)),
    "less noise on one number": of_noise(lambda z, previous: z.at[CURVED].multiply(0.7)),
    "the noise of the sum before": of_noise(lambda z, previous: previous),
    "half of the noise of the sum before": of_noise(
        lambda z, previous: (z + previous) / math.sqrt(2)),
    "one noise for gradient and Hessian": of_noise(
        lambda z, previous: z.at[CURVED : 2 * CURVED].set(z[:CURVED])),
    "gradient and Hessian clipped separately": of_sum(parts_clipped_separately),
    "the statistic of the mean row": of_sum(statistic_of_the_mean_row),
    "not clipped": of_arguments(unclipped),
    "padding is summed": of_arguments(with_padding),
    "divided by the clipped": divided_by("clipped_count"),
    "divided by the present": divided_by("batch_size"),
    "the fold sees the sum": {"update": shown_to_the_fold},
}  # fmt: skip
BY_THE_TRACE = {"the fold sees the sum"}
"""Faults that the flow of data shows; a comparison of releases shows the others."""


def planted(**faults):
    """Returns what `dpsgd` is, of which the sum or the update has a bug."""

    def build(loss_fn, optimizer):
        sound = dpsgd(loss_fn, optimizer)
        patched = {name: functools.partial(fault, sound) for name, fault in faults.items()}
        if update := patched.get("update"):
            update.optimizer = optimizer
        return sound._replace(**patched)

    return build


def audited(of=MECHANISM):
    root = RootKey.from_insecure_seed(0)
    report = audit_queries(PLATT, of, PARAMS, ROWS, root=root)
    assert all(check.name.startswith("sums over all rows: ") for check in report.checks)
    return report


def failed(found):
    checks = (check.name for check in found.checks if not check.passed)
    return {name.removeprefix("sums over all rows: ") for name in checks}


def test_without_a_bug_the_same_audit_of_sums_passes():
    report = audited()
    assert report.passed, report.lines()
    assert not report.left_out, report.left_out


@pytest.mark.short("half of the noise of the sum before", "the fold sees the sum*")
@pytest.mark.parametrize("bug", RELEASES)
def test_a_planted_bug_of_a_release_is_caught(bug, monkeypatch):
    monkeypatch.setattr(queries, "dpsgd", planted(**RELEASES[bug]))
    assert (LEAVES if bug in BY_THE_TRACE else STEP) in failed(audited())


# Bugs around a release: what it costs, declares and reads, and under which key and scales it is.


def gaussian_epsilon(mu, delta):
    """Epsilon of one Gaussian release whose mean an example moves by mu standard deviations.

    Source: B. Balle, Y.-X. Wang, Improving the Gaussian Mechanism (2018), Theorem 8.
    """

    def excess(epsilon):
        a, b = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
        return special.ndtr(a) - math.exp(epsilon) * special.ndtr(b) - delta

    return optimize.brentq(excess, 0, 50 * (mu + mu**2))


def costs_are_those_of_one_gaussian_release():
    # In a known order an example takes part once an epoch: all that is released is Gaussian.
    epochs, sigma, count, of_sum = 2, 2.5, 3, 6.0
    order = Deterministic(100, 25, epochs)
    priced = Mechanism(order, sigma, 1.0, full_sums=FullSums(count, of_sum))
    last = order.num_steps
    costs = {
        "a run": (priced.privacy(), epochs, count),
        "the sums alone": (priced.privacy_of([range(last, last + count)]), 0, count),
        "one sum": (priced.privacy_of([range(last, last + 1)]), 0, 1),
        "a run whose sums were released again": (
            priced.privacy_of([range(last + count), range(last, last + count)]), epochs, 2 * count),
        "a run that was stopped": (priced.privacy_of([range(last)]), epochs, 0),
        "a run under the sums' mechanism": (priced.sums_mechanism().privacy(), 0, count),
    }  # fmt: skip
    for name, (cost, steps, sums) in costs.items():
        mu = math.sqrt(steps / sigma**2 + sums / of_sum**2)
        for delta in (1e-3, 1e-6):
            bound, exact = cost.epsilon(delta), gaussian_epsilon(mu, delta)
            assert bound.upper >= exact * (1 - 1e-9), (name, bound, exact)
            assert bound.upper <= exact * 1.001, (name, bound, exact)
            assert bound.lower <= exact * (1 + 1e-9), (name, bound, exact)


def every_sum_is_declared_before_its_noise():
    declared, mechanism = [], whole()
    queries.refine(KEPT, mechanism, PARAMS, ROWS, declare=declared.append)
    assert declared == [range(mechanism.sampler.num_steps, mechanism.num_steps)]


def noise_is_none_of_the_steps():
    # The same program under the run's own key is what the steps would have drawn from.
    mechanism = whole()
    params = queries.refine(KEPT, mechanism, PARAMS, ROWS, insecure_seed=3).params
    algorithm, sums, state, read, _ = queries.sums_run(
        KEPT, mechanism.sums_mechanism(), PARAMS, ROWS
    )
    *_, block = train_blocks(algorithm, sums, state, read, insecure_seed=3)
    assert np.abs(np.asarray(params) - np.asarray(block.state.params["state"])).min() > 0


def each_row_is_read_by_itself():
    read = queries.read_rows(KEPT, PARAMS, ROWS)
    for row in (0, 7):
        alone = jax.tree.map(lambda column, row=row: column[row : row + 1], ROWS)
        np.testing.assert_array_equal(queries.read_rows(KEPT, PARAMS, alone)[0], read[row])


def what_could_read_other_rows_is_refused():
    with pytest.raises(ValueError, match="custom_vmap"):
        queries.read_rows(Mixed(), PARAMS, ROWS)


def what_holds_rows_is_refused():
    with pytest.raises(ValueError, match="parts that have a hash"):
        queries.sums_run(Kept(ROWS["x"]), whole().sums_mechanism(), PARAMS, ROWS)


@dataclass(frozen=True)
class Kept(Refinement):
    """Adds up the means of two columns."""

    held: object = None

    def reads(self, params, example):
        return example["x"][:2]

    def start(self):
        return jnp.zeros(2)

    def statistic(self, state, row):
        return row

    def fold(self, state, mean):
        return state + mean

    def apply(self, params, state):
        return state


KEPT = Kept()  # of one program


class Mixed(Kept):
    """Reads what a mean over the batch, hidden in a custom rule, makes of a row."""

    def reads(self, params, example):
        return shared(example["x"])[:2]


def whole():
    """The mechanism of 64 rows."""
    return dataclasses.replace(MECHANISM, sampler=Poisson(64, 16))


CLAIMS = [
    costs_are_those_of_one_gaussian_release,
    every_sum_is_declared_before_its_noise,
    noise_is_none_of_the_steps,
    each_row_is_read_by_itself,
    what_could_read_other_rows_is_refused,
    what_holds_rows_is_refused,
]


def declared(change):
    """Declares other steps than those of the queries."""

    def changed(declare):
        return {"declare": lambda steps: declare(change(steps))}

    return before(changed)


def less_their_mean(found):
    return jax.tree.map(lambda x: x - x.mean(0), found)


def scaled(**factors):
    """Returns what makes some numbers of a mechanism larger."""
    return after(
        lambda found: dataclasses.replace(
            found, **{name: factor * getattr(found, name) for name, factor in factors.items()}
        )
    )


def drawn(**changes):
    return after(lambda found: dataclasses.replace(found, sampler=changed(found.sampler, changes)))


def changed(sampler, changes):
    return dataclasses.replace(
        sampler, **{name: change(getattr(sampler, name)) for name, change in changes.items()}
    )


COSTS = costs_are_those_of_one_gaussian_release
BUGS = {
    "priced once in place of k times": Fault(
        "cost of queries", before(lambda count: {"count": min(1, count)}), COSTS),
    "sums over all rows cost as much as one": Fault(
        "cost of all rows",
        before(lambda self: {"self": dataclasses.replace(self, epochs=1)}), COSTS),
    "a run costs what its steps do": Fault(
        "cost with queries", before(lambda count: {"count": count or 0}), COSTS),
    "sums that are released again are free": Fault(
        "cost with queries", before(lambda count: {"count": count and None}), COSTS),
    "sums are free beside steps": Fault(
        "cost with queries", before(lambda count: {"count": None if count is None else 0}), COSTS),
    "only the first sum is declared": Fault(
        "query", declared(lambda steps: steps[:1]), every_sum_is_declared_before_its_noise),
    "sums are declared as steps of the sampler": Fault(
        "query", declared(lambda steps: range(len(steps))), every_sum_is_declared_before_its_noise),
    "the noise of the steps": Fault(
        "child", lambda sound: lambda self, *name: self, noise_is_none_of_the_steps),
    "rows are read less their mean": Fault(
        "read", after(less_their_mean), each_row_is_read_by_itself),
    "nobody looks whether rows mix": Fault(
        "isolated", lambda sound: lambda *trace, **how: None,
        what_could_read_other_rows_is_refused),
}  # fmt: skip
UNPRICED = {
    "half of the noise": Fault("queries", scaled(noise_multiplier=0.5)),
    "twice the clip": Fault("queries", scaled(l2_clip_norm=2)),
    "one sum more": Fault("queries", drawn(epochs=lambda count: count + 1)),
    "sums of half of the rows": Fault("queries", drawn(num_examples=lambda n: n // 2)),
}


@pytest.mark.parametrize("claim", CLAIMS, ids=[claim.__name__ for claim in CLAIMS])
def test_sums_over_all_rows_do_what_is_claimed(claim):
    claim()


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_a_planted_bug_of_sums_breaks_a_claim(bug, monkeypatch):
    plant(bug, monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        bug.check()


@pytest.mark.parametrize("bug", UNPRICED.values(), ids=UNPRICED)
def test_sums_other_than_the_priced_ones_fail_their_audit(bug, monkeypatch):
    plant(bug, monkeypatch)
    without = type("Report", (), {"checks": ()})
    monkeypatch.setattr("dpsgd.audit.audit.audit_program", lambda *of, **how: without)
    assert "they are released at their priced noise and clip norm" in failed(audited())
