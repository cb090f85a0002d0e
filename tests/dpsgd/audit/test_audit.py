"""The audit passes sound training of every kind, and says what it found.

What it catches is in tests/mutants.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import Mechanism, dpsgd
from dpsgd.audit.audit import audit_program
from dpsgd.audit.probe import Probe
from dpsgd.audit.report import UNSEEN
from dpsgd.audit.runtime import blocks, flow, noise, sums
from dpsgd.audit.runtime.scales import SCALES
from dpsgd.audit.samplers.checks import sampler_checks
from samplers import BallsAndBins, Poisson

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
    assert verdict == "audit: consistent"
    worst = max(check.resolution for check in report.checks)
    assert 0 < worst < 0.02  # however few numbers there are
    assert limits == UNSEEN
    report.require_passed()


def test_every_check_of_the_audit_has_a_bug_to_catch():
    """Each is planted in tests/mutants, or beside the test of what makes the check."""
    of_sampler = {check.name for check in sampler_checks(POISSON, POISSON, seed=1)}
    assert {check.name for check in audit(microbatch_size=3).checks} - of_sampler == {
        *(noise.NOISE, noise.KEYS, noise.MATRIX),  # test_noise_mutants.py
        *(flow.LEAVES, flow.GIVEN),  # runtime/test_flow.py
        *(blocks.BATCHES, blocks.STEPS),  # runtime/test_blocks.py
        *(SCALES, sums.SINGLE, sums.HUGE, sums.ROWS, sums.BOUNDARY),  # runtime/test_sums.py
        *(sums.ADDS_UP, sums.UNCLIPPED),
        *sums.OF_CLIPPED,
    }


def reads_missing(params, example):
    return loss_fn(params, jax.tree.map(jnp.nan_to_num, example))


def reads_no_floats(params, example):
    return tokens_loss_fn(params, example | {"y": example["z"]})


@pytest.mark.short("floats of no width")
@pytest.mark.parametrize(
    ("loss", "params", "rows"),
    [
        (reads_missing, start(), ROWS),
        (
            reads_no_floats,
            {"table": jnp.full((30, 8), 0.1)},
            TOKENS | {"y": ROWS["y"], "z": TOKENS["y"]},
        ),
        (tokens_loss_fn, {"table": jnp.full((30, 8), 0.1)}, TOKENS | {"none": np.zeros((N, 0))}),
    ],
    ids=["NaN is a missing value", "floats that are not read", "floats of no width"],
)
def test_a_row_of_nan_may_have_a_gradient(loss, params, rows):
    algorithm = dpsgd(loss, SGD)
    mechanism = Mechanism(Poisson(N, 150, 1), noise_multiplier=1.0, l2_clip_norm=0.5)
    program = Probe(algorithm, mechanism, algorithm.init(params, mechanism), rows)
    checks = sums.sum_checks(program)
    assert program.poison is None
    assert all(check.passed for check in checks), checks
    left_out = {check.detail for check in checks if not check.made}
    assert left_out == (set() if loss is not tokens_loss_fn else {"rows have no floats"})


def test_a_wrong_claim_is_refused_and_named():
    report = audit(claimed=BallsAndBins(N, 10, 2), microbatch_size=3)
    assert not report.passed
    assert "VIOLATION" in report.lines()[-1]
    with pytest.raises(ValueError, match="every example takes part once an epoch") as refusal:
        report.require_passed()
    assert "\n" not in str(refusal.value)


def last_bits_vary(sound, params, batch, weights, scales):
    """As where atomic additions come in any order, here by what lies under weight 0."""
    total, diagnostics = sound.clipped_sum(params, batch, weights, scales)
    hidden = jnp.where(weights > 0, 0.0, jnp.nan_to_num(batch["x"][:, 0])).sum()
    return jax.tree.map(lambda leaf: leaf * (1 + jnp.sign(hidden) * 2.0**-22), total), diagnostics


def padding_counts(sound, params, batch, weights, scales):
    return sound.clipped_sum(params, batch, jnp.ones_like(weights), scales)


@pytest.mark.short("padding_counts-False")
@pytest.mark.parametrize(
    ("planted", "repeats"),
    [
        (last_bits_vary, True),
        (last_bits_vary, False),
        (padding_counts, False),
    ],
)
def test_padding_may_change_the_last_bits_only_where_equal_steps_do(planted, repeats, monkeypatch):
    monkeypatch.setattr("dpsgd.audit.runtime.sums.repeats_exactly", lambda: repeats)
    sound = dpsgd(loss_fn, SGD)
    algorithm = sound._replace(clipped_sum=lambda *inputs: planted(sound, *inputs))
    mechanism = Mechanism(POISSON, noise_multiplier=1.0, l2_clip_norm=0.5)
    state = algorithm.init(start(), mechanism)
    checks = {
        check.name: check for check in sums.sum_checks(Probe(algorithm, mechanism, state, ROWS))
    }
    check = checks[sums.PADDING]
    assert check.passed == (planted is last_bits_vary and not repeats), check.detail


def test_what_cannot_be_audited_is_refused():
    with pytest.raises(ValueError, match="noise_multiplier is 0"):
        audit(sigma=0.0)
    with pytest.raises(ValueError, match="equally many rows"):
        audit(data=ROWS | {"y": ROWS["y"][:-1]})
    with pytest.raises(ValueError, match="equally many rows"):
        audit(data=jax.tree.map(lambda column: column[:0], ROWS))
