"""The audit sees correlated noise that is not what is claimed: bands and buffers alike."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import BandedToeplitz, BufferedToeplitz, Independent, Mechanism, RootKey, dpsgd
from dpsgd.audit.audit import audit_program
from dpsgd.audit.runtime.blocks import STEPS
from dpsgd.audit.runtime.noise import MATRIX
from dpsgd.audit.samplers.checks import sampler_checks
from samplers import BallsAndBins, Deterministic, Shuffle

N, D = 48, 300
CYCLE = BallsAndBins(N, 4, 2, cycle_length=3, overflow="accumulate")
ORDER = Deterministic(N, 6, 3)
THREE = BandedToeplitz((1.0, 0.6, 0.3))
TWO = BufferedToeplitz(weights=(0.4, 0.2), decays=(0.5, 0.96))
OTHERS = {THREE: BandedToeplitz((1.0, 0.6, 0.5)), TWO: BufferedToeplitz((0.4, 0.2), (0.5, 0.6))}


def audit(noise):
    """The names of the checks that fail."""
    rows = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
    sampler = CYCLE if isinstance(noise, BandedToeplitz) else ORDER

    def loss_fn(params, example):
        return jnp.sum(jnp.square(params["w"] - example))

    mechanism = Mechanism(sampler, 1.0, 1.0, noise=noise)
    algorithm, root = dpsgd(loss_fn, optax.sgd(0.1)), RootKey.from_insecure_seed(1)
    report = audit_program(algorithm, mechanism, {"w": jnp.zeros(D)}, rows, root=root)
    return {check.name for check in report.checks if not check.passed}


def at_step_9(change):
    """A fault that changes the state once, in a step of which few coordinates are watched."""

    def add(noise, total, state, key, step, scales):
        kept = jax.tree.map(lambda new, old: jnp.where(step == 9, new, old), change(state), state)
        return noise.add(total, kept, key, step, scales)

    return add


def independent(noise, total, state, key, step, scales):
    return Independent().add(total, state, key, step, scales)[0], state


def another_matrix(noise, *arguments):
    return OTHERS[noise].add(*arguments)


def of_the_first_step(noise, total, state, key, step, scales):
    noised, after = noise.add(total, state, key, step, scales)
    return noised, jax.tree.map(lambda old, new: jnp.where(step == 0, new, old), state, after)


def decayed(state):
    """Buffers that decay once more than there were steps: the hardest to see of what errs once."""
    return tuple(tuple(d * b for d, b in zip(TWO.decays, pack, strict=True)) for pack in state)


def fainter(noise, total, state, key, step, scales):
    faint = dataclasses.replace(scales, noise_stddev=0.99 * scales.noise_stddev)
    return noise.add(total, state, key, step, faint)


def another_key(noise, total, state, key, step, scales):
    return noise.add(total, state, key.at[1].set(key[1] + 1), step, scales)


def steps_share(noise, total, state, key, step, scales):
    return noise.add(total, state, key, jnp.where(step == 3, 2, step), scales)


LOST = at_step_9(lambda state: jax.tree.map(jnp.zeros_like, state))
LONG = pytest.mark.long
FAULTS = [
    pytest.param(THREE, another_matrix, id="bands of another matrix"),
    pytest.param(THREE, fainter, id="one percent less"),
    pytest.param(THREE, another_key, id="another key", marks=LONG),
    pytest.param(THREE, steps_share, id="two steps share", marks=LONG),
    pytest.param(THREE, LOST, id="bands lost", marks=LONG),
    pytest.param(THREE, independent, id="no bands", marks=LONG),
    pytest.param(
        THREE,
        at_step_9(lambda state: jax.tree.map(lambda row: row[::-1], state)),
        id="bands shifted",
        marks=LONG,
    ),
    pytest.param(THREE, of_the_first_step, id="bands of the first step", marks=LONG),
    pytest.param(TWO, at_step_9(decayed), id="buffers decayed twice"),
    pytest.param(TWO, another_matrix, id="buffers of another matrix", marks=LONG),
    pytest.param(TWO, LOST, id="buffers lost", marks=LONG),
    pytest.param(
        TWO,
        at_step_9(lambda state: tuple(pack[::-1] for pack in state)),
        id="buffers swapped",
        marks=LONG,
    ),
    pytest.param(TWO, independent, id="no buffers", marks=LONG),
]


@pytest.mark.parametrize(("noise", "add"), FAULTS)
def test_noise_of_another_matrix_or_state_is_seen(noise, add):
    def faulty(self, total, state, key, step, scales):
        return add(noise, total, state, key, step, scales)

    kind = dataclass(frozen=True)(type("Faulty", (type(noise),), {"add": faulty, "__doc__": ""}))
    assert STEPS in audit(kind(**noise.describe()))


@pytest.mark.long
@pytest.mark.parametrize("noise", [THREE, TWO], ids=str)
def test_noise_that_is_as_claimed_passes(noise):
    assert audit(noise) == set()


@dataclass(frozen=True)
class Cheaper(BufferedToeplitz):
    """Noise whose columns, it says, overlap less than they do."""

    def column(self, num_steps):
        return super().column(num_steps) * 0.99 ** np.arange(num_steps)


def test_columns_that_are_accounted_for_as_shorter_than_they_are_are_seen():
    assert audit(Cheaper(TWO.weights, TWO.decays)) == {MATRIX}


@pytest.mark.parametrize(
    ("sampler", "claimed", "bands", "passed"),
    [
        (CYCLE, CYCLE, 3, True),
        (CYCLE, CYCLE, 4, False),
        (Shuffle(N, 6, 3, order="fixed"), Shuffle(N, 6, 3, order="fixed"), TWO.bands, True),
        (Shuffle(N, 6, 3, order="redrawn"), Shuffle(N, 6, 3, order="fixed"), TWO.bands, False),
    ],
    ids=["cycle", "more bands than the cycle", "a fixed order", "an order that is not kept"],
)
def test_less_separation_than_noise_needs_is_seen(sampler, claimed, bands, passed):
    name = "participations are as far apart as correlated noise needs"
    checks = {c.name: c for c in sampler_checks(sampler, claimed, seed=3, bands=bands)}
    assert checks[name].passed == passed
