"""The state after a step is made of its release: whatever else an update looks at is seen."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import Mechanism, RootKey, dpsgd
from dpsgd.audit.probe import Probe
from dpsgd.audit.runtime.update import update_checks
from samplers import Deterministic

pytestmark = [pytest.mark.audit, pytest.mark.usefixtures("unoptimised")]

N, D, STEPS = 60, 20, 18
ROWS = {"x": np.random.default_rng(0).normal(size=(32, D)).astype(np.float32)}
MADE, SAME = "the update sees the release alone", "batches of one release leave one state"


def loss_fn(params, example):
    return jnp.square(jnp.dot(params["w"], example["x"]) + params["b"] - 1)


def none(after, total, b):
    return after


def first_moment_without_noise(after, total, b):
    adam, *rest = after.opt_state
    mu = jax.tree.map(lambda m, s: m + 0.1 * (s / b - m), adam.mu, total)
    return after._replace(opt_state=(adam._replace(mu=mu), *rest))


def one_parameter_without_noise(after, total, b):
    b = after.params["b"] - 1e-3 * total["b"]
    return after._replace(raw_params={**after.params, "b": b})


def one_parameter_without_noise_in_the_last_step(after, total, b):
    leaked = one_parameter_without_noise(after, total, b)
    last = after.step == STEPS
    return jax.tree.map(lambda x, y: jnp.where(last, x, y), leaked, after)


def one_coordinate_of_a_moment_without_noise(after, total, b):
    adam, *rest = after.opt_state
    mu = {**adam.mu, "w": adam.mu["w"].at[3].set(0.1 * total["w"][3] / b)}
    return after._replace(opt_state=(adam._replace(mu=mu), *rest))


def a_count_of_members(after, total, b):
    adam, *rest = after.opt_state
    seen = jnp.int32(total["w"][0] != 0)
    return after._replace(opt_state=(adam._replace(count=adam.count + seen), *rest))


def last_bits_that_tell(after, total, b):
    some = jnp.any(total["w"] != 0)
    w = after.params["w"] * jnp.where(some, 1 + 2.0**-23, 1)
    return after._replace(raw_params={**after.params, "w": w})


BUGS = {
    none: None,
    first_moment_without_noise: MADE,
    one_parameter_without_noise: MADE,
    one_parameter_without_noise_in_the_last_step: MADE,
    one_coordinate_of_a_moment_without_noise: MADE,
    a_count_of_members: MADE,
    last_bits_that_tell: SAME,
}


@dataclass(frozen=True)
class Planted:
    """The sound update, and what a bug makes of the state after it."""

    sound: Callable
    number: Callable
    optimizer: optax.GradientTransformation

    def __call__(self, state, total, noise_key, scales):
        after, gradient = self.sound(state, total, noise_key, scales)
        b = scales.expected_batch_size
        branches = [functools.partial(bug, after, total, b) for bug in BUGS]
        return jax.lax.switch(self.number(), branches), gradient


@functools.cache
def with_every_bug():
    optimizer = optax.adam(1e-2)
    sound = dpsgd(loss_fn, optimizer)
    seen = []

    def clipped_sum(params, batch, weights, scales):
        seen.append(batch["bug"][0])
        examples = {"x": batch["x"]}
        return sound.clipped_sum(params, examples, weights, scales)

    return sound._replace(
        clipped_sum=clipped_sum, update=Planted(sound.update, seen.pop, optimizer)
    )


def checks_of(algorithm, bug=none, steps=0):
    mechanism = Mechanism(Deterministic(N, 10, 3), 1.0, 0.5)
    params = {"w": jnp.full(D, 0.1), "b": jnp.zeros(())}
    state = algorithm.init(params, mechanism)
    rows = ROWS | {"bug": np.full(32, list(BUGS).index(bug), np.int32)}
    program = Probe(algorithm, mechanism, state, rows, root=RootKey.from_insecure_seed(0))
    for _ in range(steps):
        program.state = jax.tree.map(np.asarray, program.advanced([0, 1], reveals=False))
    return {check.name: check for check in update_checks(program)}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.parametrize("steps", [0, 2])
def test_an_update_that_sees_more_than_the_release_is_caught(bug, steps):
    checks = checks_of(with_every_bug(), bug, steps)
    failed = {name for name, check in checks.items() if not check.passed}
    assert set(checks) == {MADE, SAME}
    assert all(check.made for check in checks.values())
    if bug is none:
        assert not failed, checks
    else:
        assert BUGS[bug] in failed, checks


def test_what_cannot_be_compared_is_said(monkeypatch):
    sound = with_every_bug()
    update = sound.update
    checks = checks_of(sound._replace(update=lambda *of: update(*of)))
    assert checks[MADE].passed
    assert not checks[MADE].made
    assert "names no optimizer" in checks[MADE].detail
    monkeypatch.setattr("dpsgd.audit.runtime.update.repeats_exactly", lambda: False)
    assert not checks_of(sound)[SAME].made


@pytest.mark.short("adamw")
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1),
        optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)),
        optax.adamw(1e-3, weight_decay=0.1),
    ],
    ids=["sgd", "clipped, with momentum", "adamw"],
)
def test_sound_optimizers_pass(optimizer):
    algorithm = dpsgd(lambda params, example: loss_fn(params, example), optimizer)
    checks = checks_of(algorithm, steps=1)
    assert all(check.passed and check.made for check in checks.values()), checks
