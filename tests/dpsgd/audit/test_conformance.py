"""Every built-in part conforms, and a faulty one of each kind is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from accounting import Bound
from accounting.profile import UpperEnd
from dpsgd import BandedToeplitz, Independent, LazyTables, averaged, dpsgd, with_rows
from dpsgd.audit.conformance import (
    check_clipping,
    check_noise,
    check_optimizer,
    check_sampler,
    check_task,
)
from dpsgd.audit.laws import law_checks
from dpsgd.engine.queries import Refinement
from dpsgd.noise import registry
from samplers import Deterministic, Poisson
from samplers.settings import KINDS
from tests.dpsgd.audit.test_draws import SAMPLERS, SIZES

pytestmark = pytest.mark.audit

NOISES = [
    Independent(),
    BandedToeplitz((4.0, 2.0, 1.0)),
]


def named(parts):
    return [type(leaf).__name__ for leaf in parts]


def test_every_built_in_sampler_and_noise_is_here():
    assert {*KINDS} < {type(sampler) for sampler in SAMPLERS.values()}
    assert {type(noise) for noise in NOISES} == {*registry._BUILT_IN.values()}


@pytest.mark.short(
    "deterministic",
    "shuffle",
    "poisson",
    "poisson-cut",
    "balls-and-bins",
    "balls-and-bins-fixed",
    "multistage",
    "units then Poisson",
    "user-poisson",
    "bins, one step",
    "bins, shards",
    "full batch",
)
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_samplers_conform(sampler, monkeypatch):
    monkeypatch.setattr("dpsgd.audit.laws._DRAWS", (64, 64))  # sound with any number of draws
    assert not check_sampler(sampler).left_out


@pytest.mark.short("24-Independent", "24-*Toeplitz")
@pytest.mark.parametrize("noise", NOISES, ids=named(NOISES))
@pytest.mark.parametrize("steps", [24, pytest.param(3_000, marks=pytest.mark.long)])
def test_noises_conform(noise, steps):
    check_noise(noise, steps=steps)


loss = with_rows(
    lambda example: {"table": example["id"]},
    lambda params, rows, example: jnp.square(params["w"] @ example["x"] + rows["table"].sum()),
)


PARAMS = {"w": jnp.ones(5), "table": jnp.ones((9, 2))}
RNG = np.random.default_rng(0)
ROWS = {
    "x": RNG.normal(size=(40, 5)).astype(np.float32),
    "id": RNG.integers(0, 9, 40).astype(np.int32),
}


@pytest.mark.parametrize(
    "algorithm",
    [loss, dpsgd(loss, optax.sgd(0.1), tables=LazyTables(0.1))],
    ids=["loss", "lazy tables"],
)
def test_clipping_conforms(algorithm):
    check_clipping(algorithm, PARAMS, ROWS)


OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(1e-3, weight_decay=0.1),
    "chain": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
    "schedule": optax.adam(optax.cosine_decay_schedule(0.1, 100)),
    "averaged": averaged(optax.adam(0.1), 5, tail=0.5),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_conform(optimizer):
    check_optimizer(optimizer)


class Line:
    """A task of one number."""

    def init(self, seed):
        return {"w": jnp.ones(3) * seed}

    def loss(self, params, example):
        return jnp.square(params["w"] @ example["x"] - 1)

    def generated(self, count):
        return {"x": np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)}

    def columns(self):
        return {"x": np.zeros((200, 3), np.float32)}

    def describe(self):
        return {"kind": "line"}


def test_a_task_conforms():
    report = check_task(Line())
    assert report.passed


# What is not what it says it is.


class TwiceAsOften(Poisson):
    def participations(self, seed, epoch, chunk):
        larger = Poisson(self.num_examples, 2 * self.batch_size, self.epochs)
        return larger.participations(seed, epoch, chunk)


class Lawless(Poisson):
    def row_law(self):
        raise NotImplementedError


class SaidToBeApart(Poisson):
    separation = 7


class DearerWithNoise(Poisson):
    def privacy(self, noise_multiplier):
        return UpperEnd(Deterministic(*SIZES).privacy(1 / noise_multiplier))


class FreeTheSecondTime(Poisson):
    def privacy_of(self, noise_multiplier, attempts, **how):
        return super().privacy_of(len(attempts) * noise_multiplier, attempts, **how)


class Estimated(Poisson):
    def privacy(self, noise_multiplier):
        return Guess()


class Guess:
    def epsilon(self, delta, tolerance=None):
        return Bound(0.0, 1.0, confidence=0.99)


@pytest.mark.parametrize(
    "kind",
    [TwiceAsOften, Lawless, SaidToBeApart, DearerWithNoise, FreeTheSecondTime, Estimated],
)
def test_faulty_samplers_are_refused(kind):
    with pytest.raises(AssertionError):
        check_sampler(kind(*SIZES))


class SlightlyTooOften(Poisson):
    def participations(self, seed, epoch, chunk):
        larger = Poisson(self.num_examples, 2_010, self.epochs)
        return larger.participations(seed, epoch, chunk)


def test_check_sampler_finds_rates_too_close_for_the_audit():
    faulty = SlightlyTooOften(20_000, 2_000, 2)  # a rate that is 0.5 % too large
    assert all(check.passed for check in law_checks(faulty))
    with pytest.raises(AssertionError, match="rates of the law"):
        check_sampler(faulty)


@dataclasses.dataclass(frozen=True)
class Faint(Independent):
    """Noise of 1 % less."""

    def add(self, total, state, key, step, scales):
        faint = dataclasses.replace(scales, noise_stddev=0.99 * scales.noise_stddev)
        return super().add(total, state, key, step, faint)


@dataclasses.dataclass(frozen=True)
class Cheap(Independent):
    """Noise that is priced as twice as much."""

    def privacy(self, sampler, noise_multiplier):
        return sampler.privacy(2 * noise_multiplier)


@dataclasses.dataclass(frozen=True)
class CheapPart(Independent):
    """Noise that is priced as twice as much where a run is one part."""

    def privacy_of(self, sampler, noise_multiplier, attempts, **how):
        return super().privacy_of(sampler, noise_multiplier * (3 - len(attempts)), attempts, **how)


@dataclasses.dataclass(frozen=True)
class CheapTwice(Independent):
    """Noise of which two runs are priced as one."""

    def privacy_of(self, sampler, noise_multiplier, attempts, **how):
        return super().privacy_of(sampler, noise_multiplier, attempts[:1], **how)


@dataclasses.dataclass(frozen=True)
class CheapBands(BandedToeplitz):
    """Noise that is priced as independent noise, however near the steps of an example are."""

    def privacy(self, sampler, noise_multiplier):
        return sampler.privacy(noise_multiplier)


CHEAP = Cheap(), CheapPart(), CheapTwice()
FAULTY = {Faint(): "a step releases what the definition", **dict.fromkeys(CHEAP, "cost")}


@pytest.mark.parametrize(("noise", "wrong"), FAULTY.items(), ids=named(FAULTY))
def test_a_faulty_noise_or_one_that_is_priced_too_low_is_refused(noise, wrong):
    with pytest.raises(AssertionError, match=wrong):
        check_noise(noise, steps=24)


def test_noise_of_too_many_bands_is_refused_at_any_price():
    with pytest.raises(ValueError, match="more than the minimum separation 2"):
        check_noise(CheapBands((4.0, 2.0, 1.0)), sampler=Deterministic(16, 8, 12))


def test_a_faulty_clipping_is_refused():
    sound = dpsgd(loss, optax.sgd(0.1))

    def clipped_sum(params, batch, weights, scales, *rest, **how):
        loose = dataclasses.replace(scales, l2_clip_norm=1.02 * scales.l2_clip_norm)
        return sound.clipped_sum(params, batch, weights, loose, *rest, **how)

    with pytest.raises(AssertionError, match="a step releases what the definition"):
        check_clipping(sound._replace(clipped_sum=clipped_sum), PARAMS, ROWS)


HELD = jnp.arange(1_000.0)
ADDING_ROWS = {
    "in update": (lambda params: (), lambda x, state: x + HELD.mean()),
    "in a call": (lambda params: (), lambda x, state: jax.jit(lambda x: x + HELD.mean())(x)),
    "in its state": (lambda params: HELD, lambda x, state: x + state.mean()),
}


@pytest.mark.parametrize(("init", "added"), ADDING_ROWS.values(), ids=ADDING_ROWS)
def test_an_optimizer_that_holds_rows_is_refused(init, added):
    def update(gradient, state, params=None):
        return jax.tree.map(lambda x: added(x, state), gradient), state

    with pytest.raises(AssertionError, match="arrays in its closures"):
        check_optimizer(optax.GradientTransformation(init, update))


def test_a_loss_that_holds_rows_is_refused():
    def peeking(params, example):
        return loss(params, example) * HELD.mean()

    with pytest.raises(ValueError, match="in a closure"):
        check_clipping(peeking, PARAMS, ROWS, num_rows=1_000)


class Peeking(Line):
    """A task whose loss holds its rows."""

    def loss(self, params, example):
        return super().loss(params, example) * jnp.asarray(self.columns()["x"]).sum()


@dataclasses.dataclass(frozen=True)
class Mean(Refinement):
    """The mean of the rows, of which some are held."""

    def reads(self, params, example):
        return example

    def start(self):
        return jnp.zeros(3)

    def statistic(self, state, row):
        return row["x"] + jnp.asarray(Line().columns()["x"]).sum()

    def fold(self, state, mean):
        return mean

    def apply(self, params, state):
        return params


class PeekingLater(Line):
    def calibration(self):
        return Mean()


@pytest.mark.parametrize("kind", [Peeking, PeekingLater])
def test_a_task_that_holds_rows_is_refused(kind):
    with pytest.raises(ValueError, match="in a closure"):
        check_task(kind())


class Growing(Line):
    begun = 0

    def init(self, seed):
        self.begun += 1
        return {"w": jnp.ones(3)} | ({"z": jnp.ones(2)} if self.begun > 1 else {})


class Restless(Line):
    def init(self, seed):
        return {"w": jnp.asarray(np.random.default_rng().normal(size=3), jnp.float32)}


@pytest.mark.parametrize("kind", [Growing, Restless])
def test_a_task_whose_parameters_differ_per_call_is_refused(kind):
    with pytest.raises(AssertionError, match="equal seeds give equal parameters"):
        check_task(kind())
