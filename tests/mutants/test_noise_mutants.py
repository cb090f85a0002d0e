"""Planted faults of the noise, each a `Noise` that spoils it somewhere: the audit must say so.

One noise holds those of key, step, scale and numbers; its state says which is at work.
"""

import dataclasses
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
from dpsgd.core.algorithm import nothing_frozen
from dpsgd.core.gaussian import add_gaussian_noise
from dpsgd.engine.feed import Layout
from dpsgd.noise.keys import RootKey
from samplers import BallsAndBins, Deterministic, Poisson

pytestmark = [pytest.mark.mutants, pytest.mark.usefixtures("unoptimised")]

N, B, STEPS, BLOCK = 200, 20, 70_030, 16  # the last block has 14 steps
LARGE = 2**12
ROWS = np.random.default_rng(0).normal(size=(20, 40)).astype(np.float32)
PARAMS = {
    **{f"k{number:02}": jnp.zeros(40 + number) for number in range(18)},
    "half": jnp.zeros(300, jnp.bfloat16),
    "nothing": jnp.zeros((0, 3)),
    "one": jnp.zeros((30, 8)),
    "other": jnp.zeros((30, 8)),
    "scalar": jnp.zeros(()),
    "table": jnp.zeros((64, 64)),
}


@dataclass
class Bug:
    """What it does to the noise of a step."""

    key: object = None
    step: object = None
    stddev: object = None
    noise: object = None


@dataclass
class Seen:
    """What a noise can see, and what it should not look at; `size` is about that of the batch."""

    total: object
    step: object
    clip: object
    key: object

    @property
    def size(self):
        return optax.tree.norm(self.total) / self.clip


def leaf(name, change):
    """Returns a bug of one leaf."""
    return lambda noise, seen: noise | {name: change(noise, seen)}


def repeated(noise, seen):
    tile = noise["table"][:8]
    return jnp.tile(tile, (8, 1))


BUGS = {
    "none": Bug(),
    # of the deviation
    "off at the last step of a full block": Bug(
        stddev=lambda s: jnp.where(s.step % BLOCK == BLOCK - 1, 0, 1)
    ),
    "off in the last steps of the run": Bug(stddev=lambda s: jnp.where(s.step >= STEPS - 2, 0, 1)),
    "halved for batches above 16": Bug(stddev=lambda s: jnp.where(s.size > 3, 0.5, 1)),
    "halved for full batches at the run's own C": Bug(
        stddev=lambda s: jnp.where((s.size > 5) & (s.clip > 0.1), 0.5, 1)
    ),
    "off for empty batches": Bug(stddev=lambda s: jnp.where(s.size == 0, 0, 1)),
    "half of it": Bug(stddev=lambda s: 0.5),
    "added to the mean": Bug(stddev=lambda s: B),
    "scaled for the mean": Bug(stddev=lambda s: 1 / B),
    "divided by the realised size": Bug(stddev=lambda s: B / jnp.maximum(s.size, 1)),
    "one percent less": Bug(stddev=lambda s: 0.99),
    "variance one percent more": Bug(stddev=lambda s: np.sqrt(1.01)),
    "in proportion to the batch": Bug(stddev=lambda s: s.size / B),
    "none in large leaves": Bug(noise=lambda n, s: {k: z * (z.size < LARGE) for k, z in n.items()}),
    "none in a leaf of one entry": Bug(noise=leaf("scalar", lambda n, s: 0 * n["scalar"])),
    "none in bfloat16": Bug(noise=leaf("half", lambda n, s: 0 * n["half"])),
    "none in the last rows of a table": Bug(
        noise=leaf("table", lambda n, s: n["table"].at[-2:].set(0))
    ),
    "none in rows that nobody touched": Bug(
        noise=leaf(
            "table", lambda n, s: n["table"] * jnp.any(s.total["table"], axis=1, keepdims=True)
        )
    ),
    "less in one column": Bug(noise=leaf("table", lambda n, s: n["table"].at[:, 7].multiply(0.3))),
    # of the law
    "none in few coordinates": Bug(
        noise=leaf("table", lambda n, s: n["table"] * (jnp.arange(64) != 5))
    ),
    "never negative": Bug(noise=lambda n, s: jax.tree.map(jnp.abs, n)),
    "half of it in bfloat16": Bug(noise=leaf("half", lambda n, s: 0.5 * n["half"])),
    "cut at three and a half sigma": Bug(
        noise=lambda n, s: jax.tree.map(lambda z: jnp.where(jnp.abs(z) > 3.5 * 0.5, 0.3, z), n)
    ),
    "uniform": Bug(
        noise=lambda n, s: jax.tree.map(
            lambda z: np.sqrt(3) / 2 * (2 * jax.scipy.stats.norm.cdf(2 * z) - 1), n
        )
    ),
    # of steps
    "step mod 64": Bug(step=lambda s: s.step % 64),
    "step mod 1000": Bug(step=lambda s: s.step % 1000),
    "step mod 2^16": Bug(step=lambda s: s.step % 2**16),
    "a bit of the step is lost": Bug(step=lambda s: s.step & ~512),
    "two steps with one noise": Bug(step=lambda s: s.step // 2 * 2),
    "negated in the next step": Bug(
        step=lambda s: s.step // 2, stddev=lambda s: 1 - 2.0 * (s.step % 2)
    ),
    "one noise for all steps": Bug(step=lambda s: 0 * s.step),
    # of leaves
    "leaves k and k + 16 share": Bug(
        noise=lambda n, s: (
            n | {f"k{k + 16}": jnp.resize(n[f"k{k:02}"], (56 + k,)) for k in range(2)}
        )
    ),
    "leaves of equal shape share": Bug(noise=leaf("other", lambda n, s: n["one"])),
    "a scalar shares": Bug(noise=leaf("scalar", lambda n, s: n["one"][0, 0])),
    "leaves share but for signs": Bug(
        noise=leaf("other", lambda n, s: jnp.copysign(n["one"], n["other"]))
    ),
    "leaves share a half": Bug(
        noise=leaf("other", lambda n, s: np.sqrt(0.5) * (n["one"] + n["other"]))
    ),
    # of coordinates
    "pairs of columns share": Bug(
        noise=leaf("table", lambda n, s: jnp.repeat(n["table"][:, ::2], 2, axis=1))
    ),
    "a tile is repeated": Bug(noise=leaf("table", repeated)),
    "a leaf is shared further on": Bug(
        noise=leaf("table", lambda n, s: n["table"].at[9, 5:45].set(-n["k00"]))
    ),
    "a later step moves it on": Bug(
        step=lambda s: 0 * s.step,
        noise=leaf("table", lambda n, s: jnp.roll(n["table"], 5 * s.step, axis=0)),
    ),
    "an index of eleven bits": Bug(
        noise=leaf("table", lambda n, s: jnp.resize(n["table"].ravel()[: 2**11], (64, 64)))
    ),
    "the last coordinate is the first": Bug(
        noise=leaf("table", lambda n, s: n["table"].at[-1, -1].set(n["table"][0, 0]))
    ),
    "one coordinate is infinite": Bug(
        noise=leaf("table", lambda n, s: n["table"].at[3, 5].set(jnp.inf))
    ),
    "one coordinate is no number": Bug(
        noise=leaf("half", lambda n, s: n["half"].at[7].set(jnp.nan))
    ),
    "signs of half of a leaf": Bug(noise=leaf("one", lambda n, s: n["one"].at[15:].multiply(-1))),
    # of keys
    "an attempt is not heeded": Bug(key=lambda s: s.key.at[3].set(0)),
    "the key's first words are not heeded": Bug(key=lambda s: s.key.at[:2].set(0)),
    "the key is not heeded": Bug(key=lambda s: jnp.zeros(4, jnp.uint32)),
}


NAMES = list(BUGS)


@dataclass(frozen=True)
class Planted(Independent):
    """Noise with every fault."""

    def init(self, like):
        return jnp.int32(0)

    def add(self, total, state, key, step, scales):
        seen = Seen(total, step, scales.l2_clip_norm, key)

        def chosen(name, usual):
            for number, bug in enumerate(BUGS.values()):
                if (change := getattr(bug, name)) is not None:
                    usual = jnp.where(state == number, change(seen), usual)
            return usual

        zeros = jax.tree.map(jnp.zeros_like, total)
        noise = add_gaussian_noise(zeros, chosen("key", key), chosen("step", step), 0.5)
        stddev = chosen("stddev", jnp.float32(1)) * scales.noise_stddev / 0.5
        noise = jax.tree.map(lambda z: z * stddev, noise)
        changes = [bug.noise or (lambda noise, seen: noise) for bug in BUGS.values()]
        distinct = list(dict.fromkeys(changes))
        places = jnp.array([distinct.index(change) for change in changes])
        branches = [lambda f=f: jax.tree.map(jnp.float32, f(noise, seen)) for f in distinct]
        noise = jax.lax.switch(places[state], branches)
        b = scales.expected_batch_size
        return jax.tree.map(lambda s, z: (s + z) / b, total, noise), state


def loss_fn(params, example):
    return jnp.dot(params["k00"], example) + params["table"][3, 4]


def checks_of(noise, sampler, params=PARAMS, first_step=0):
    """What the audit sees of the noise, of parameters that mostly show their noise alone."""
    algorithm = dpsgd(loss_fn, optax.sgd(0.1))._replace(frozen=nothing_frozen)
    mechanism = Mechanism(sampler, 1.0, 0.5, noise)
    state = algorithm.init(params, mechanism)._replace(step=jnp.int32(first_step))
    columns = np.zeros((sampler.num_examples, 40), np.float32)
    layout = Layout.choose(sampler, columns, block_steps=BLOCK)
    root = RootKey.from_insecure_seed(0)
    probe = Probe(algorithm, mechanism, state, ROWS, layout=layout, root=root)
    return step_checks(probe) + block_checks(probe)


def failed(checks):
    return {check.name for check in checks if not check.passed}


LONG_RUN = Poisson(N, B, STEPS // 10)


@pytest.mark.parametrize("first_step", [0, pytest.param(30_000, marks=pytest.mark.long)])
def test_noise_without_a_bug_passes(first_step):
    checks = checks_of(Planted(), LONG_RUN, first_step=first_step)
    assert not failed(checks), checks
    assert all(check.made for check in checks)


QUICK = {  # of every way of looking one, and what statistics could not resolve
    "off at the last step of a full block",  # seen in blocks alone
    "halved for full batches at the run's own C",  # in differences of two releases alone
    "one percent less",
    "divided by the realised size",
    "step mod 2^16",
    "leaves of equal shape share",
    "the last coordinate is the first",
    "an attempt is not heeded",
}


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=[pytest.mark.long] * (bug not in QUICK)) for bug in NAMES[1:]],
)
def test_a_planted_bug_of_the_noise_is_caught(bug, monkeypatch):
    monkeypatch.setattr(Planted, "init", lambda self, like: jnp.int32(NAMES.index(bug)))
    assert failed(checks_of(Planted(), LONG_RUN))


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
    return kind(**noise.describe())


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
        found = [
            (x + stddev * jax.random.normal(jax.random.fold_in(seed, k), x.shape)) / b
            for k, x in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, found), state


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


@pytest.mark.short(
    "a generator*",
    "bands of another matrix",
    "bands, one*",
    "claimed*",
)
@pytest.mark.parametrize("noise", LAWS.values(), ids=LAWS)
def test_noise_of_another_law_than_stated_is_caught(noise):
    sampler = CYCLE if isinstance(noise, BandedToeplitz) else ORDER
    params = {"k00": jnp.zeros(40), "table": jnp.zeros((10, 30))}
    assert bool(failed(checks_of(noise, sampler, params))) == (noise is not THREE)


def half_of(root):
    return RootKey(root._secret[:16] * 2, insecure=False)
