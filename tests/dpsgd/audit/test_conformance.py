"""Every built-in part conforms, and a faulty one of each kind is refused."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from accounting import Bound
from accounting.profile import UpperEnd
from dpsgd import (
    BandedToeplitz,
    Independent,
    LazyTables,
    Mechanism,
    averaged,
    dpsgd,
    with_rows,
)
from dpsgd.audit import audit
from dpsgd.audit.audit import audit_program
from dpsgd.audit.conformance import (
    check_clipping,
    check_noise,
    check_optimizer,
    check_rule,
    check_sampler,
    check_task,
)
from dpsgd.audit.laws import law_checks
from dpsgd.audit.prices import GROWTH, PRICE, price_check
from dpsgd.audit.probe import Probe
from dpsgd.audit.runtime.expected import ExpectedNoise
from dpsgd.core.gaussian import add_gaussian_noise
from dpsgd.engine.queries import Refinement
from dpsgd.gradients.rules import PerLayerClipping
from dpsgd.noise import registry
from samplers import Deterministic, Poisson, Shuffle
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
    assert {type(noise) for noise in NOISES} == {*registry.NOISES.built_in.values()}


@pytest.mark.short("poisson", "shuffle")
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_samplers_conform(sampler, monkeypatch):
    monkeypatch.setattr(
        "dpsgd.audit.participation._DRAWS", (64, 64)
    )  # sound with any number of draws
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


@pytest.mark.long
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


# What is not what it says it is: a part with other methods.


def faulty(kind, **members):
    return dataclasses.dataclass(frozen=True)(type("Faulty", (kind,), {"__doc__": "", **members}))


def of_size(batch_size):
    def participations(self, *draw):
        return Poisson(self.num_examples, batch_size, self.epochs).participations(*draw)

    return participations


def lawless(self):
    raise NotImplementedError


def dearer_with_noise(self, sigma):
    return UpperEnd(Deterministic(*SIZES).privacy(1 / sigma))


def free_the_second_time(self, sigma, attempts, **how):
    return Poisson.privacy_of(self, len(attempts) * sigma, attempts, **how)


def free_of(selected):
    """The cost at ten times the noise, if all steps are one range of a selected length."""

    def privacy_of(self, sigma, attempts, **how):
        noise = sigma * (1 + 9 * (len(attempts) == 1 and selected(self, len(attempts[0]))))
        return super(type(self), self).privacy_of(noise, attempts, **how)

    return privacy_of


def raising(self, sigma, attempts, **how):
    raise RuntimeError("not today")


class Guess:
    def epsilon(self, delta, tolerance=None):
        return Bound(0.0, 1.0, confidence=0.99)


FAULTY_SAMPLERS = {
    "TwiceAsOften": {"participations": of_size(2 * SIZES[1])},
    "Lawless": {"row_law": lawless},
    "SaidToBeApart": {"separation": 7},
    "DearerWithNoise": {"privacy": dearer_with_noise},
    "FreeTheSecondTime": {"privacy_of": free_the_second_time},
    "FreeWithinAnEpoch": {"privacy_of": free_of(lambda self, n: n < self.steps_per_epoch)},
    "FreeWithoutItsEnds": {
        "privacy_of": free_of(lambda self, n: self.steps_per_epoch < n < self.num_steps)
    },
    "FreeAsAWhole": {
        "privacy": lambda self, sigma: Poisson.privacy(self, 10 * sigma),
        "privacy_of": free_of(lambda self, n: n == self.num_steps),
    },
    "Estimated": {"privacy": lambda self, sigma: Guess()},
    "Raising": {"privacy_of": raising},
}


@pytest.mark.short("[!T]*")
@pytest.mark.parametrize("members", FAULTY_SAMPLERS.values(), ids=FAULTY_SAMPLERS)
def test_faulty_samplers_are_refused(members):
    with pytest.raises(AssertionError):
        check_sampler(type("Faulty", (Poisson,), members)(*SIZES, max_batch_size=SIZES[0]))


def test_a_known_order_that_is_free_within_an_epoch_is_refused():
    kind = type("Faulty", (Deterministic,), FAULTY_SAMPLERS["FreeWithinAnEpoch"])
    with pytest.raises(AssertionError, match="cost grows with the steps"):
        check_sampler(kind(1_000, 10, 3))


@pytest.mark.long
def test_check_sampler_finds_rates_too_close_for_the_audit():
    members = {"participations": of_size(2_010)}
    sampler = type("Faulty", (Poisson,), members)(20_000, 2_000, 2)  # 0.5 % too often
    assert all(check.passed for check in law_checks(sampler))
    with pytest.raises(AssertionError, match="rates of the law"):
        check_sampler(sampler)


def faint(self, total, state, key, step, scales):
    scales = dataclasses.replace(scales, noise_stddev=0.99 * scales.noise_stddev)
    return Independent().add(total, state, key, step, scales)


def priced_as_independent(factor):
    return lambda self, sampler, sigma: sampler.privacy(factor * sigma)


def cheap_part(self, sampler, sigma, attempts, **how):
    return Independent.privacy_of(self, sampler, sigma * (3 - len(attempts)), attempts, **how)


def cheap_twice(self, sampler, sigma, attempts, **how):
    return Independent.privacy_of(self, sampler, sigma, attempts[:1], **how)


def cheap_within(self, sampler, sigma, attempts, **how):
    whole = any(len(steps) >= sampler.steps_per_epoch for steps in attempts)
    return Independent.privacy_of(self, sampler, (2 - whole) * sigma, attempts, **how)


def cheap_under(kind, below=9.0):
    """A cost of half the noise that is stated under one kind of sampler alone, or at low sigma."""

    def privacy(self, sampler, sigma):
        cheap = isinstance(sampler, kind) and sigma < below
        return sampler.privacy((1 + cheap) * sigma)

    return {"privacy": privacy}


def cheap_if_cut(self, sampler, sigma):
    return Independent.privacy(self, sampler, (1 + getattr(sampler, "truncates", False)) * sigma)


FAULTY_NOISES = {
    "CheapWhereBatchesAreCut": ({"privacy": cheap_if_cut}, "a run under Poisson", 2.0),
    "CheapUnderPoisson": (cheap_under(Poisson), "a run under Poisson", 2.0),
    "CheapUnderShuffling": (cheap_under(Shuffle), "a run under Shuffle", 2.0),
    "CheapAtLowNoise": (cheap_under(Deterministic, 0.9), "noise multiplier 0.5", None),
    "Cheap": ({"privacy": priced_as_independent(2)}, "cost", None),
    "CheapPart": ({"privacy_of": cheap_part}, "cost", None),
    "CheapWithinAnEpoch": ({"privacy_of": cheap_within}, "cost", None),
    "CheapTwice": ({"privacy_of": cheap_twice}, "cost", None),
}
"""Faulty methods, words of the refusal, and a noise multiplier in place of the default ones."""


@pytest.mark.usefixtures("unaudited")
@pytest.mark.parametrize(("members", "wrong", "sigma"), FAULTY_NOISES.values(), ids=FAULTY_NOISES)
def test_a_noise_that_is_priced_too_low_is_refused(members, wrong, sigma):
    with pytest.raises(AssertionError, match=wrong):
        check_noise(faulty(Independent, **members)(), steps=24, noise_multiplier=sigma)


def test_a_fainter_noise_than_stated_is_refused():
    noise = faulty(Independent, add=faint)()
    with pytest.raises(AssertionError, match="a step releases what the definition"):
        check_noise(noise, sampler=Deterministic(96, 8, 2))


@dataclasses.dataclass(frozen=True)
class Fading(Independent):
    """Noise that is ten times smaller from step `last` on, by its state or by its matrix."""

    counts: bool
    last: int = 20

    @property
    def bands(self):
        return 2

    def init(self, like):
        return jnp.int32(0)

    def add(self, total, state, key, step, scales):
        zeros, b = jax.tree.map(jnp.zeros_like, total), scales.expected_batch_size
        noise = add_gaussian_noise(zeros, key, step, scales.noise_stddev)
        share = jnp.where((state if self.counts else step) < self.last, 1.0, 0.1)
        return jax.tree.map(lambda s, n: (s + share * n) / b, total, noise), state + 1

    def whiten(self, noises):
        late = np.arange(len(noises))[:, None] >= self.last
        return noises * np.where(late & (not self.counts), 10.0, 1.0)


@pytest.mark.long
def test_noise_that_fades_by_its_own_count_of_steps_is_refused():
    with pytest.raises(AssertionError, match="blocks use the keys, scales and steps"):
        check_noise(Fading(counts=True, last=90), steps=180, sampler=Deterministic(180, 2, 2))


def with_the_step_before(noise, noises):
    return 0.8 * noises - 0.6 * np.concatenate([np.zeros_like(noises[:1]), noises[:-1]])


OTHER_MATRICES = {
    "a long late column": Fading(counts=False, last=300),
    "an unpriced band": faulty(Independent, whiten=with_the_step_before)(),
}


@pytest.mark.parametrize("noise", OTHER_MATRICES.values(), ids=OTHER_MATRICES)
def test_a_noise_matrix_other_than_the_priced_one_is_refused(noise):
    sampler = Deterministic(320, 2, 2)
    mechanism = Mechanism(sampler, 1.0, 1.0, noise)
    algorithm = dpsgd(lambda w, x: w * x, optax.sgd(0.1))
    rows = np.ones(320, np.float32)
    probe = Probe(algorithm, mechanism, algorithm.init(jnp.zeros(()), mechanism), rows)
    assert not ExpectedNoise(probe).matrix_check().passed


def test_noise_of_too_many_bands_is_refused_at_any_price():
    cheap = faulty(BandedToeplitz, privacy=priced_as_independent(1))((4.0, 2.0, 1.0))
    check = price_check(cheap, [(Deterministic(16, 8, 12), 1.0)])
    assert not check.passed
    assert "more than the minimum separation 2" in check.detail


@dataclasses.dataclass(frozen=True)
class CheapAtOneDelta:
    """A cost that is too low at delta 1e-3 alone."""

    profile: object

    def epsilon(self, delta, *tolerance):
        return self.profile.epsilon(0.1 if delta == 1e-3 else delta, *tolerance)


def test_audit_prices_own_parts_at_the_run_s_settings(monkeypatch):
    for name in ("flow_checks", "step_checks", "deferred_checks", "block_checks"):
        monkeypatch.setattr(audit, name, lambda *of: [])  # which other tests hold
    monkeypatch.setattr(audit, "Probe", mock.Mock())

    def privacy(self, sampler, sigma):
        cost = sampler.privacy(sigma)
        return CheapAtOneDelta(cost) if sigma < 0.4 else cost

    def privacy_of(self, sigma, attempts, **how):
        return CheapAtOneDelta(Deterministic.privacy_of(self, sigma, attempts, **how))

    sampler = faulty(Deterministic, privacy_of=privacy_of)(64, 8)
    mechanism = Mechanism(sampler, 0.3, 0.5, faulty(Independent, privacy=privacy)())
    algorithm = dpsgd(loss, optax.sgd(0.1))
    report = audit_program(algorithm, mechanism, PARAMS, ROWS, delta=1e-3)
    assert [check.name for check in report.checks if not check.passed] == [PRICE, GROWTH]


def test_a_rule_is_checked_on_parameters_that_its_groups_match():
    rule = PerLayerClipping(("table", "w"))
    with pytest.raises(ValueError, match="needs parameters to group: clip_groups: no pattern"):
        check_rule(rule)
    assert check_rule(rule, PARAMS).passed
    loose = faulty(
        PerLayerClipping,
        factors=lambda self, norms, clip, counts: PerLayerClipping.factors(
            self, norms, 2 * clip, counts
        ),
    )
    with pytest.raises(AssertionError, match="a step releases what the definition"):
        check_rule(loose(("table", "w")), PARAMS)


def test_a_clipped_sum_with_a_rule_of_its_own_is_measured():
    sound = dpsgd(loss, optax.sgd(0.1))._replace(loss_fn=None)

    def clipped_sum(params, batch, weights, scales, *rest, **how):
        loose = dataclasses.replace(scales, l2_clip_norm=1.02 * scales.l2_clip_norm)
        return sound.clipped_sum(params, batch, weights, loose, *rest, **how)

    with pytest.raises(AssertionError, match=r"one example adds 1\.02 C"):
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


def holding():
    return jnp.asarray(Line().columns()["x"]).sum()


MEAN = faulty(
    Refinement,
    reads=lambda self, params, example: example,
    start=lambda self: jnp.zeros(3),
    statistic=lambda self, state, row: row["x"] + holding(),
    fold=lambda self, state, mean: mean,
    apply=lambda self, params, state: params,
)


def growing(self, seed):
    self.begun = getattr(self, "begun", 0) + 1
    return {"w": jnp.ones(3)} | ({"z": jnp.ones(2)} if self.begun > 1 else {})


def test_a_task_whose_loss_holds_rows_is_refused():
    def peeking(self, params, example):
        return Line.loss(self, params, example) * holding()

    with pytest.raises(ValueError, match="in a closure"):
        check_task(type("Faulty", (Line,), {"loss": peeking})())


FAULTY_TASKS = {
    "PeekingLater": ({"calibration": lambda self: MEAN()}, (ValueError, "in a closure")),
    "Growing": (
        {"init": growing},
        (AssertionError, "equal seeds give equal parameters"),
    ),
    "Restless": (
        {"init": lambda self, seed: {"w": jnp.float32(np.random.default_rng().normal(size=3))}},
        (AssertionError, "equal seeds give equal parameters"),
    ),
}


@pytest.mark.usefixtures("unaudited")
@pytest.mark.parametrize(("members", "refusal"), FAULTY_TASKS.values(), ids=FAULTY_TASKS)
def test_a_faulty_task_is_refused(members, refusal):
    with pytest.raises(refusal[0], match=refusal[1]):
        check_task(type("Faulty", (Line,), members)())
