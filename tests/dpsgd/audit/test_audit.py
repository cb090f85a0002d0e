"""The audit passes sound training of every kind, and says what it found.

What it catches is in tests/mutants.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import Mechanism, dpsgd
from dpsgd.audit import laws
from dpsgd.audit.audit import audit_program
from dpsgd.audit.prices import price_check
from dpsgd.audit.report import UNSEEN
from dpsgd.core.noise import Independent
from samplers import BallsAndBins, Poisson, Shuffle

pytestmark = [pytest.mark.audit, pytest.mark.usefixtures("unoptimised")]

N = 200
RNG = np.random.default_rng(0)
ROWS = {
    "x": RNG.normal(size=(N, 20)).astype(np.float32),
    "y": RNG.integers(0, 2, N).astype(np.float32),
}
TOKENS = {
    "x": RNG.integers(0, 30, (N, 4)).astype(np.int32),
    "y": RNG.integers(0, 2, N).astype(np.int32),
}
POISSON = Poisson(N, 10, 2)
SGD = optax.sgd(0.1)


def loss_fn(params, example):
    logit = jnp.dot(params["w"], example["x"].astype(params["w"].dtype)) + params["b"]
    return optax.sigmoid_binary_cross_entropy(logit, example["y"].astype(logit.dtype))


def tokens_loss_fn(params, example):
    logit = jnp.tanh(params["table"][example["x"]]).sum()
    return optax.sigmoid_binary_cross_entropy(logit, example["y"].astype(jnp.float32))


def start(dtype=jnp.float32):
    return {"w": jnp.full(20, 0.1, dtype), "b": jnp.zeros((), dtype)}


def audit(
    loss_fn=loss_fn, params=None, data=ROWS, sampler=POISSON, claimed=None, sigma=1.0, **options
):
    mechanism = Mechanism(sampler, noise_multiplier=sigma, l2_clip_norm=0.5)
    return audit_program(
        dpsgd(loss_fn, SGD, **options),
        mechanism,
        start() if params is None else params,
        data,
        claimed=claimed,
    )


@pytest.mark.short("integers alone", "little noise")
@pytest.mark.parametrize(
    "kind",
    [
        {"microbatch_size": 3},
        {"sampler": Poisson(N, 10, 2, overflow="accumulate", max_batch_size=4)},
        {"params": start(jnp.bfloat16)},
        {"loss_fn": tokens_loss_fn, "params": {"table": jnp.full((30, 8), 0.1)}, "data": TOKENS},
        {"sigma": 1e-3, "microbatch_size": 3},  # the program of the first
    ],
    ids=["microbatches", "several passes a step", "bfloat16", "integers alone", "little noise"],
)
def test_sound_training_passes(kind):
    report = audit(**kind)
    assert report.passed, report.lines()
    limits, verdict = report.lines()[-2:]
    assert verdict.startswith("audit: passed ")
    assert limits == UNSEEN
    report.require_passed()


@pytest.mark.long
def test_sound_training_passes_under_strict_promotion_of_types():
    with jax.numpy_dtype_promotion("strict"):
        assert audit(microbatch_size=3).passed


def test_a_wrong_claim_is_refused_and_named():
    report = audit(claimed=BallsAndBins(N, 10, 2), microbatch_size=3)
    assert not report.passed
    assert "VIOLATION" in report.lines()[-1]
    with pytest.raises(ValueError, match="batches are drawn as their cost assumes") as refusal:
        report.require_passed()
    assert "\n" not in str(refusal.value)


@pytest.fixture
def few_draws(monkeypatch):
    """Counts a sixteenth of the draws that an audit does."""
    monkeypatch.setattr(laws, "ENTRIES", laws.ENTRIES // 16)


@pytest.mark.usefixtures("few_draws")
def test_the_law_of_another_sampler_that_is_claimed_is_tested():
    report = audit(sampler=BallsAndBins(N, 10, 2), claimed=POISSON, microbatch_size=3)
    with pytest.raises(ValueError, match="rates of the law"):
        report.require_passed()


class Shuffled(Poisson):
    """A sampler of one's own that claims Poisson sampling and shuffles."""

    def plan(self, seed, epoch):
        return Shuffle(self.num_examples, self.batch_size).plan(seed, epoch)

    def participations(self, seed, epoch, chunk):
        return Shuffle(self.num_examples, self.batch_size).participations(seed, epoch, chunk)


@pytest.mark.usefixtures("few_draws")
def test_a_shuffling_sampler_claimed_as_poisson_is_refused(monkeypatch):
    monkeypatch.setattr("dpsgd.audit.audit.own_price_checks", lambda *of: [])  # in test_prices
    report = audit(sampler=Shuffled(N, 10, 2), microbatch_size=3)
    with pytest.raises(ValueError, match="at the rates of the law"):
        report.require_passed()


class Unpriced(Independent):
    """Noise whose cost is not computed."""

    def privacy(self, sampler, noise_multiplier):
        raise RuntimeError("no table of costs")


def test_a_noise_without_a_cost_fails_its_audit_and_says_why():
    check = price_check(Unpriced(), [(POISSON, 1.0)])
    assert not check.passed
    assert check.detail == "RuntimeError: no table of costs"


def test_what_cannot_be_audited_is_refused():
    with pytest.raises(ValueError, match="noise_multiplier is 0"):
        audit(sigma=0.0)
    with pytest.raises(ValueError, match="equally many rows"):
        audit(data=ROWS | {"y": ROWS["y"][:-1]})
    with pytest.raises(ValueError, match="equally many rows"):
        audit(data=jax.tree.map(lambda column: column[:0], ROWS))
