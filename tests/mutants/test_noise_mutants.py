"""Planted bugs of the noise: each spoils it somewhere, and the audit must say so.

One program holds them all, and which is at work is a number in the optimizer's state.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import Mechanism, RootKey, dpsgd
from dpsgd.audit.probe import Probe
from dpsgd.audit.runtime.blocks import STEPS as IN_BLOCKS
from dpsgd.audit.runtime.blocks import block_checks
from dpsgd.audit.runtime.noise import KEYS, NOISE, keys_check, noise_checks
from dpsgd.core.algorithm import nothing_frozen
from dpsgd.engine import loop
from dpsgd.engine.feed import Layout
from dpsgd.noise.base import Independent
from dpsgd.noise.gaussian import add_gaussian_noise
from samplers import Poisson

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


@dataclasses.dataclass
class Bug:
    """What it does to the noise of a step."""

    key: object = None
    step: object = None
    stddev: object = None
    noise: object = None


@dataclasses.dataclass
class Seen:
    """What an update can see, and what it should not look at."""

    number: object
    size: object
    total: object
    step: object
    clip: object
    key: object


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
    "halved for batches above 16": Bug(stddev=lambda s: jnp.where(s.size > 16, 0.5, 1)),
    "halved for full batches at the run's own C": Bug(
        stddev=lambda s: jnp.where((s.size > B + 10) & (s.clip > 0.1), 0.5, 1)
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
    "the key is not heeded": Bug(key=lambda s: jnp.zeros(4, jnp.uint32)),
}


def loss_fn(params, example):
    return jnp.dot(params["k00"], example) + params["table"][3, 4]


def _numbered():
    """Returns an optimizer whose state is the number of a bug."""
    return optax.GradientTransformation(
        lambda params: jnp.int32(0),
        lambda gradient, state, params=None: (jax.tree.map(jnp.zeros_like, gradient), state),
    )


def _with_every_bug():
    sound = dpsgd(loss_fn, _numbered())
    bugs, sizes = list(BUGS.values()), []

    def clipped_sum(params, batch, weights, scales):
        sizes.append(weights.sum())
        return sound.clipped_sum(params, batch, weights, scales)

    def update(state, total, key, scales):
        seen = Seen(state.opt_state, sizes.pop(), total, state.step, scales.l2_clip_norm, key)

        def chosen(name, usual):
            for number, bug in enumerate(bugs):
                if (change := getattr(bug, name)) is not None:
                    usual = jnp.where(seen.number == number, change(seen), usual)
            return usual

        zeros = jax.tree.map(jnp.zeros_like, total)
        key, step = chosen("key", key), chosen("step", state.step)
        noise = add_gaussian_noise(zeros, key, step, jnp.float32(0.5))
        noise = jax.tree.map(
            lambda z: z * chosen("stddev", jnp.float32(1)) * scales.noise_stddev / 0.5, noise
        )
        changes = [bug.noise or (lambda noise, seen: noise) for bug in bugs]
        distinct = list(dict.fromkeys(changes))
        places = jnp.array([distinct.index(change) for change in changes])
        noise = jax.lax.switch(
            places[seen.number],
            [lambda f=f: jax.tree.map(jnp.float32, f(noise, seen)) for f in distinct],
        )
        b = scales.expected_batch_size
        gradient = jax.tree.map(
            lambda s, z, p: ((s + z) / b).astype(p.dtype), total, noise, state.params
        )
        return state._replace(step=state.step + 1), gradient

    # Most parameters only show their noise.
    return sound._replace(clipped_sum=clipped_sum, update=update, frozen=nothing_frozen)


ALGORITHM = _with_every_bug()
MECHANISM = Mechanism(Poisson(N, B, STEPS // 10), noise_multiplier=1.0, l2_clip_norm=0.5)


def program(bug="none", first_step=0):
    state = ALGORITHM.init(PARAMS, MECHANISM)
    number = jnp.int32(list(BUGS).index(bug))
    state = state._replace(step=jnp.int32(first_step), opt_state=number)
    return Probe(
        ALGORITHM,
        MECHANISM,
        state,
        ROWS,
        layout=Layout.of(MECHANISM.sampler, np.zeros((N, 40), np.float32), block_steps=BLOCK),
        root=RootKey.from_insecure_seed(0),
    )


def failed(checks):
    return {check.name for check in checks if not check.passed}


def audited(of):
    return noise_checks(of) + block_checks(of)


@pytest.mark.parametrize("first_step", [0, pytest.param(30_000, marks=pytest.mark.long)])
def test_noise_without_a_bug_passes(first_step):
    checks = audited(program(first_step=first_step))
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
    [
        pytest.param(bug, marks=() if bug in QUICK else pytest.mark.long)
        for bug in BUGS
        if bug != "none"
    ],
)
def test_a_planted_bug_of_the_noise_is_caught(bug):
    assert failed(audited(program(bug))) & {NOISE, IN_BLOCKS}


@pytest.mark.parametrize(
    "field", ["noise_stddev", pytest.param("expected_batch_size", marks=pytest.mark.long)]
)
def test_numbers_that_are_not_the_configurations_are_caught(monkeypatch, field):
    scales = Mechanism.scales

    def wrong(mechanism):
        found = scales(mechanism)
        number: dict[str, Any] = {field: np.float32(0.5 * getattr(found, field))}
        return dataclasses.replace(found, **number)

    monkeypatch.setattr(Mechanism, "scales", wrong)
    assert NOISE in failed(noise_checks(program()))


def test_keys_that_forget_attempt_or_root_are_caught(monkeypatch):
    mechanism = Mechanism(Poisson(N, B, 1), 1.0, 0.5)

    def check():
        return keys_check(mechanism, RootKey.from_insecure_seed(0))

    assert check().passed
    assert check().name == KEYS
    for wrong in (
        lambda noise, root, attempt: root.noise_key(0),
        lambda noise, root, attempt: root.noise_key(attempt % 16),
        lambda noise, root, attempt: np.full(2, attempt, np.uint64),
        lambda noise, root, attempt: half_of(root).noise_key(attempt),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Independent, "key", wrong)
            assert not check().passed
    monkeypatch.setattr(RootKey, "sampling_seed", lambda root, attempt: attempt)
    assert not check().passed


def half_of(root):
    return RootKey(root._secret[:16] * 2, insecure=False)


@pytest.mark.parametrize(
    "block", [pytest.param(0, marks=pytest.mark.long), 1], ids=["first", "second"]
)
def test_a_block_without_noise_is_caught_where_the_run_goes_on(monkeypatch, block):
    dispatched: list[int] = []  # the first steps of the blocks of one run

    def forgetful(*of, sound=loop.compiled_block):
        run = sound(*of)

        def resumed(state, data, plan, key, scales, *rest):
            step = int(state.step)
            dispatched[:] = [*dispatched, step] if step - BLOCK in dispatched else [step]
            if len(dispatched) == block + 1:
                scales = dataclasses.replace(scales, noise_stddev=np.float32(2.0**-100))
            return run(state, data, plan, key, scales, *rest)

        return resumed

    resumed = program(first_step=30_000)
    monkeypatch.setattr(loop, "compiled_block", forgetful)
    assert IN_BLOCKS in failed(block_checks(resumed))
