"""Planted faults of the noise, each a `Noise` that spoils it somewhere: the audit must say so.

A fault says when, where and what: one noise has the fields of a fault as its state.
"""

import dataclasses
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import (
    BandedToeplitz,
    Independent,
    Mechanism,
    Noise,
    dpsgd,
)
from dpsgd.audit.probe import Probe
from dpsgd.audit.runtime.blocks import block_checks
from dpsgd.audit.runtime.differential import step_checks
from dpsgd.core.gaussian import add_gaussian_noise
from dpsgd.engine.feed import Layout
from dpsgd.noise.keys import RootKey
from samplers import BallsAndBins, Deterministic, Poisson

pytestmark = [pytest.mark.mutants, pytest.mark.usefixtures("unoptimised")]

N, B, STEPS, BLOCK = 200, 20, 70_030, 16  # the last block has 14 steps
ROWS = np.random.default_rng(0).normal(size=(20, 40)).astype(np.float32)
PARAMS = {
    **{f"k{number:02}": np.zeros(40) for number in range(18)},  # of one shape: traced once
    "half": np.zeros(300, jnp.bfloat16),
    "nothing": np.zeros((0, 3)),
    "one": np.zeros((30, 8)),
    "other": np.zeros((30, 8)),
    "scalar": np.zeros(()),
    "table": np.zeros((64, 64)),
}


SIZES = [leaf.size for leaf in jax.tree.leaves(PARAMS)]
FIRST = dict(zip(sorted(PARAMS), np.cumsum([0, *SIZES]).tolist(), strict=False))
ALL = 2**31 - 1
SOUND = {
    # where
    "first": 0, "stop": ALL, "every": 1, "silent": False,
    # when
    "modulus": 1, "residue": 0, "from_step": 0, "least": -1.0, "most": np.inf, "least_clip": 0.0,
    # what: factor (batch / B)^power times the noise of another place, cut, plus a share of its own
    "factor": 1.0, "power": 0, "back": 0, "back_by_step": 0, "low": -np.inf, "high": np.inf,
    "uniform": False, "own_share": 0.0,
    # under which name
    "step_bits": ALL, "step_modulus": ALL, "words": 15,
}  # fmt: skip
"""Fields of a fault, as they are without it."""


def of(name, first=0, stop=None, like=None, **fields):
    """A fault of coordinates of a leaf; `like` names a leaf whose noise they have."""
    size, begin = PARAMS[name].size, FIRST[name]
    bounds = slice(first, stop).indices(size)
    if like is not None:
        fields["back"] = begin + bounds[0] - FIRST[like]
    return {"first": begin + bounds[0], "stop": begin + bounds[1]} | fields


BUGS = {
    "none": {},
    # of steps and batches
    "less by a rounding at the last step of a full block": {
        "modulus": BLOCK, "residue": BLOCK - 1, "factor": 1 - 2.0**-16},
    "off in the last steps of the run": {"from_step": STEPS - 2, "factor": 0.0},
    "halved for batches above 16": {"least": 3.0, "factor": 0.5},
    "halved for full batches at the run's own C": {
        "least": 5.0, "least_clip": 0.1, "factor": 0.5},
    "off for empty batches": {"most": 0.0, "factor": 0.0},
    "negated in every second step": {"modulus": 2, "residue": 1, "factor": -1.0},
    # of the deviation and the law
    "half of it": {"factor": 0.5},
    "added to the mean": {"factor": float(B)},
    "scaled for the mean": {"factor": 1 / B},
    "divided by the realised size": {"power": -1},
    "in proportion to the batch": {"power": 1},
    "one percent less": {"factor": 0.99},
    "variance one percent more": {"factor": np.sqrt(1.01)},
    "never negative": {"low": 0.0},
    "cut at three and a half sigma": {"low": -3.5, "high": 3.5},
    "uniform": {"uniform": True},
    # of places
    "none in large leaves": of("table", factor=0.0),
    "none in a leaf of one entry": of("scalar", factor=0.0),
    "none in bfloat16": of("half", factor=0.0),
    "half of it in bfloat16": of("half", factor=0.5),
    "none in the last rows of a table": of("table", -128, factor=0.0),
    "none in rows that nobody touched": of("table", silent=True, factor=0.0),
    "none in one coordinate": of("table", 261, 262, factor=0.0),
    "none in few coordinates": of("table", 5, every=64, factor=0.0),
    "less in one column": of("table", 7, every=64, factor=0.3),
    "one coordinate is infinite": of("table", 197, 198, factor=np.inf),
    "one coordinate is no number": of("half", 7, 8, factor=np.nan),
    "signs of half of a leaf": of("one", 120, factor=-1.0),
    # of names
    "step mod 64": {"step_modulus": 64},
    "step mod 1000": {"step_modulus": 1000},
    "step mod 2^16": {"step_modulus": 2**16},
    "a bit of the step is lost": {"step_bits": ALL - 512},
    "two steps with one noise": {"step_bits": ALL - 1},
    "negated in the next step": {
        "step_bits": ALL - 1, "modulus": 2, "residue": 1, "factor": -1.0},
    "one noise for all steps": {"step_bits": 0},
    "a later step moves it on": of("table", back_by_step=5 * 64, step_bits=0),
    "leaves k and k + 16 share": of("k16", like="k00"),
    "leaves of equal shape share": of("other", like="one"),
    "leaves share but for signs": of("other", like="one", factor=-1.0),
    "leaves share a half": of("other", like="one", factor=0.5**0.5, own_share=0.5**0.5),
    "pairs of columns share": of("table", 1, every=2, back=1),
    "a scalar shares": of("scalar", like="one"),
    "a tile is repeated": of("table", 512, 1024, back=512),
    "a leaf is shared further on": of("table", 581, 621, like="k00", factor=-1.0),
    "an index of eleven bits": of("table", 2**11, back=2**11),
    "the last coordinate is the first": of("table", -1, back=2**12 - 1),
    "an attempt is not heeded": {"words": 7},
    "the key's first words are not heeded": {"words": 12},
    "the key is not heeded": {"words": 0},
}  # fmt: skip
NAMES = list(BUGS)


@dataclass(frozen=True)
class Planted(Independent):
    """Noise with a fault, whose fields are numbers of its state: one program serves all."""

    def init(self, like):
        return {name: jnp.asarray(value) for name, value in SOUND.items()}

    def add(self, total, fault, key, step, scales):
        zeros = jax.tree.map(jnp.zeros_like, total)
        words = jnp.where(fault["words"] >> jnp.arange(4) & 1, key, 0).astype(jnp.uint32)
        named = (step & fault["step_bits"]) % fault["step_modulus"]
        z = jnp.concatenate(
            [x.ravel() for x in jax.tree.leaves(add_gaussian_noise(zeros, words, named, 1.0))]
        )
        size = optax.tree.norm(total) / scales.l2_clip_norm  # about that of the batch
        sums = jnp.concatenate([jnp.float32(x).ravel() for x in jax.tree.leaves(total)])
        place = jnp.arange(z.size)
        first, stop = fault["first"], fault["stop"]
        acts = (place >= first) & (place < stop) & ((place - first) % fault["every"] == 0)
        acts &= ~(fault["silent"] & (sums != 0))
        acts &= (step % fault["modulus"] == fault["residue"]) & (step >= fault["from_step"])
        acts &= (size >= fault["least"]) & (size <= fault["most"])
        acts &= scales.l2_clip_norm >= fault["least_clip"]
        factor = fault["factor"] * (jnp.maximum(size, 1e-3) / B) ** fault["power"]
        turned = first + (place - first - step * fault["back_by_step"]) % (stop - first)
        moved = jnp.clip(z[turned - fault["back"]], fault["low"], fault["high"])
        flat = math.sqrt(3) * (2 * jax.scipy.stats.norm.cdf(moved) - 1)  # of equal variance
        moved = jnp.where(fault["uniform"], flat, moved)
        z = scales.noise_stddev * jnp.where(acts, factor * moved + fault["own_share"] * z, z)
        leaves, structure = jax.tree.flatten(total)
        pieces = jnp.split(z, np.cumsum([x.size for x in leaves])[:-1])
        b = scales.expected_batch_size
        noised = [(x + n.reshape(x.shape)) / b for x, n in zip(leaves, pieces, strict=True)]
        return jax.tree.unflatten(structure, noised), fault


def loss_fn(params, example):
    return jnp.dot(params["k00"], example) + params["table"][3, 4]


ALGORITHM = dpsgd(loss_fn, optax.sgd(0.1))._replace(freezes=False)


def checks_of(noise, sampler, params=PARAMS, first_step=0):
    """What the audit sees of the noise, of parameters that mostly show their noise alone."""
    mechanism = Mechanism(sampler, 1.0, 0.5, noise)
    state = ALGORITHM.init(params, mechanism)._replace(step=jnp.int32(first_step))
    columns = np.zeros((sampler.num_examples, 40), np.float32)
    layout = Layout.choose(sampler, columns, block_steps=BLOCK)
    root = RootKey.from_insecure_seed(0)
    probe = Probe(ALGORITHM, mechanism, state, ROWS, layout=layout, root=root)
    return step_checks(probe) + block_checks(probe)


def failed(checks):
    return {check.name for check in checks if not check.passed}


PLANTED = Planted()  # of the one program
LONG_RUN = Poisson(N, B, STEPS // 10)


@pytest.mark.long
@pytest.mark.parametrize("first_step", [0, pytest.param(30_000, marks=pytest.mark.long)])
def test_noise_without_a_bug_passes(first_step):
    checks = checks_of(PLANTED, LONG_RUN, first_step=first_step)
    assert not failed(checks), checks
    assert all(check.performed for check in checks)


QUICK = {  # of every way of looking one, and what statistics could not resolve
    "less by a rounding at the last step of a full block",  # seen in blocks alone
    "halved for full batches at the run's own C",  # in differences of two releases alone
    "the last coordinate is the first",
    "an attempt is not heeded",
}


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=[pytest.mark.long] * (bug not in QUICK)) for bug in NAMES[1:]],
)
def test_a_planted_bug_of_the_noise_is_caught(bug, monkeypatch):
    fields = {name: jnp.asarray(value) for name, value in (SOUND | BUGS[bug]).items()}
    monkeypatch.setattr(Planted, "init", lambda self, like: fields)
    assert failed(checks_of(PLANTED, LONG_RUN))


# Faults of a matrix M, of what is kept of earlier steps, and of what a noise states.

THREE = BandedToeplitz((1.0, 0.6, 0.3))
OTHERS = {THREE: BandedToeplitz((1.0, 0.6, 0.5))}
CYCLE = BallsAndBins(48, 4, 2, cycle_length=3, overflow="accumulate")
ORDER = Deterministic(48, 6, 3)


def faulty(noise, add):
    """A noise of the same class, of which `add(sound, state, ...)` makes the releases."""

    def planted(self, *arguments):
        return add(noise, *arguments)

    kind = dataclass(frozen=True)(type("Faulty", (type(noise),), {"add": planted, "__doc__": ""}))
    return kind(**vars(noise))


def at_step_9(change):
    """A fault that changes the state once, in a step of which few coordinates are watched."""

    def add(noise, total, state, key, step, scales):
        next_state = jax.tree.map(
            lambda new, old: jnp.where(step == 9, new, old), change(state), state
        )
        return noise.add(total, next_state, key, step, scales)

    return add


def independent(noise, total, state, key, step, scales):
    return Independent().add(total, state, key, step, scales)[0], state


def another_matrix(noise, *arguments):
    return OTHERS[noise].add(*arguments)


def of_the_first_step(noise, total, state, key, step, scales):
    noised, next_state = noise.add(total, state, key, step, scales)
    return noised, jax.tree.map(lambda old, new: jnp.where(step == 0, new, old), state, next_state)


def less(share):
    def add(noise, total, state, key, step, scales):
        scales = dataclasses.replace(scales, noise_stddev=share * scales.noise_stddev)
        return noise.add(total, state, key, step, scales)

    return add


def another_key(noise, total, state, key, step, scales):
    return noise.add(total, state, key.at[1].set(key[1] + 1), step, scales)


def steps_share(noise, total, state, key, step, scales):
    return noise.add(total, state, key, jnp.where(step == 3, 2, step), scales)


@dataclass(frozen=True)
class FewBands(BandedToeplitz):
    """Noise that is said to be of one band: for samplers without others."""

    @property
    def bands(self):
        return 1

    def init(self, like):
        return BandedToeplitz(self.coefficients).init(like)


@dataclass(frozen=True)
class ClaimedIndependent(FewBands):
    """The same, which states the matrix of independent noise as well."""

    def whiten(self, noises):
        return noises


@dataclass(frozen=True)
class Half(Independent):
    """Half of the noise, which says so by what whitens it, or where it is looked at."""

    rescales: bool = False

    def add(self, *arguments):
        return less(0.5)(Independent(), *arguments)

    def whiten(self, noises):
        return noises * (1 if self.rescales and not 0.4 < np.std(noises) < 0.6 else 2)


@dataclass(frozen=True)
class Threefry(Noise):
    """Independent noise by JAX's own generator, which no audit can compute again."""

    def add(self, total, state, key, step, scales):
        seed = jax.random.fold_in(jax.random.wrap_key_data(key[:2], impl="threefry2x32"), step)
        leaves, structure = jax.tree.flatten(total)
        stddev, b = scales.noise_stddev, scales.expected_batch_size
        failures = [
            (x + stddev * jax.random.normal(jax.random.fold_in(seed, k), x.shape)) / b
            for k, x in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, failures), state


LOST = at_step_9(lambda state: jax.tree.map(jnp.zeros_like, state))
LAWS = {
    "bands": THREE,
    "bands of another matrix": faulty(THREE, another_matrix),
    "bands, one percent less": faulty(THREE, less(0.99)),
    "bands of another key": faulty(THREE, another_key),
    "bands, two steps share": faulty(THREE, steps_share),
    "bands lost": faulty(THREE, LOST),
    "no bands": faulty(THREE, independent),
    "bands shifted": faulty(
        THREE, at_step_9(lambda state: jax.tree.map(lambda row: row[::-1], state))
    ),
    "bands of the first step": faulty(THREE, of_the_first_step),
    "claimed as independent": ClaimedIndependent((1.0, 0.5)),
    "claimed as of one band": FewBands((1.0, 0.5)),
    "half, and stated as a matrix": Half(),
    "half, and rescaled where looked at": Half(rescales=True),
    "a generator of one's own": Threefry(),
}


@pytest.mark.short("claimed*")
@pytest.mark.parametrize("noise", LAWS.values(), ids=LAWS)
def test_noise_of_another_law_than_stated_is_caught(noise):
    sampler = CYCLE if isinstance(noise, BandedToeplitz) else ORDER
    params = {"k00": jnp.zeros(40), "table": jnp.zeros((10, 30))}
    assert bool(failed(checks_of(noise, sampler, params))) == (noise is not THREE)
