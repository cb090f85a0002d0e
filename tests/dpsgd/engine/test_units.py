"""What is clipped as one moves a step's sum by at most C: units of an episode, and whole users."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from accounting import Bound
from dpsgd import Mechanism, dpsgd, train_blocks
from dpsgd.audit.audit import audit_program
from dpsgd.audit.black_box import black_box_audit
from dpsgd.engine import loop
from dpsgd.engine.step import block_function
from dpsgd.noise.keys import RootKey
from samplers import (
    BallsAndBins,
    BatchSource,
    Deterministic,
    Multistage,
    Poisson,
    Shuffle,
    UnitTree,
    cap_contributions,
)

CLIP = 0.5
TASKS, CLASSES, EACH = 8, 3, 5
COLUMNS = {
    "task": np.repeat(np.arange(TASKS), CLASSES * EACH),
    "class": np.tile(np.repeat(np.arange(CLASSES), EACH), TASKS),
}
ROWS = TASKS * CLASSES * EACH
SHUFFLED = np.random.default_rng(1).permutation(ROWS)
TREE = UnitTree.from_columns({name: column[SHUFFLED] for name, column in COLUMNS.items()})
TASK = COLUMNS["task"][SHUFFLED]
SEED = 3
ROOT = RootKey.from_insecure_seed(SEED)

pytestmark = pytest.mark.usefixtures("unoptimised")


def rows(seed=0):
    x = np.random.default_rng(seed).normal(size=(ROWS, 4)).astype(np.float32)
    return {"x": x, "task": TASK, "class": COLUMNS["class"][SHUFFLED]}


def unit_loss(params, unit):
    """Couples all rows of a unit: a square of sums."""
    return jnp.square(jnp.tanh(unit["x"] @ params)).sum() + jnp.square(unit["x"].sum() * params[0])


@functools.cache
def still(loss):
    """DP-SGD of which every step starts where the first did: what differs is the step's data."""
    at = jnp.ones(4)
    dp = dpsgd(loss, optax.sgd(1.0))
    return dp._replace(
        clipped_sum=lambda _, *rest: dp.clipped_sum(at, *rest),
        update=lambda state, *rest: dp.update(state._replace(raw_params=at), *rest),
    )


def releases(sampler, data, loss=unit_loss, *, sigma=1.0):
    """Every step's noised sum: float64[steps, 4]."""
    algorithm, mechanism = still(loss), Mechanism(sampler, sigma, CLIP)
    state = algorithm.init(jnp.ones(4))
    found = []
    for block in train_blocks(algorithm, mechanism, state, data, insecure_seed=SEED, block_steps=1):
        found.append(1.0 - np.asarray(block.state.params, np.float64))
    return np.array(found) * sampler.expected_batch_size


@pytest.mark.short("2")
@pytest.mark.parametrize("level", [0, 1, pytest.param(2, marks=pytest.mark.long)])
def test_the_loop_clips_each_drawn_unit_as_one(level):
    sampler = Multistage(TREE, (3, 2, 4), steps=5, clipped_level=level)
    data = rows()
    got = releases(sampler, data, sigma=0.0)
    gradient = jax.jit(jax.grad(unit_loss))
    for step in range(sampler.num_steps):
        expected = np.zeros(4)
        episode = sampler.episode(ROOT.sampling_seed(0), step)
        for unit in episode.examples.reshape(-1, *sampler.draws[level:]):
            assert np.unique(TASK[unit]).size == (1 if level else 3)
            g = np.asarray(gradient(jnp.ones(4), {"x": data["x"][unit]}), np.float64)
            expected += g * min(1.0, CLIP / np.linalg.norm(g))
        np.testing.assert_allclose(got[step], expected, rtol=1e-4, atol=1e-5)


def test_a_loss_sees_the_levels_below_its_unit_as_axes(monkeypatch):
    def traced(algorithm, sampler, *_):
        return functools.partial(jax.eval_shape, block_function(algorithm, sampler))

    monkeypatch.setattr(loop, "compiled_block", traced)
    shapes = []

    def loss(params, unit):
        shapes.append((unit["x"].shape, unit["class"].shape))
        return jnp.sum(params) * unit["x"].mean()

    for level, axes in ((0, (3, 2, 4)), (1, (2, 4)), (2, (4,)), (3, ())):
        sampler = Multistage(TREE, (3, 2, 4), clipped_level=level)
        algorithm, mechanism = dpsgd(loss, optax.sgd(1.0)), Mechanism(sampler, 1.0, CLIP)
        state = algorithm.init(jnp.ones(4))
        next(train_blocks(algorithm, mechanism, state, rows(), insecure_seed=SEED))
        assert set(shapes) == {((*axes, 4), axes)}
        assert sampler.expected_batch_size == 24 / np.prod(axes)
        shapes.clear()


@pytest.mark.short("2")
@pytest.mark.parametrize("level", [0, 1, pytest.param(2, marks=pytest.mark.long)])
def test_unit_moves_the_noised_sum_by_at_most_c(level):
    # The coupled test: neighbours share noise and draws.
    sampler = Multistage(TREE, (3, 2, 4), steps=12, clipped_level=level)
    before, data = releases(sampler, rows()), rows()
    data["x"][TASK == 2] = 0.0  # a null unit has gradient 0
    moved = np.linalg.norm(before - releases(sampler, data), axis=1)
    drawn_units = 1 if level == 1 else 2  # where a whole episode is clipped, as an example does
    assert moved.max() <= drawn_units * CLIP * (1 + 1e-4)
    assert moved.max() >= 0.5 * CLIP
    data = rows()
    data["x"][7] = 1e3
    moved = np.linalg.norm(before - releases(sampler, data), axis=1)
    assert moved.max() <= 2 * CLIP * (1 + 1e-4)


@pytest.mark.long
def test_audit_catches_units_whose_rows_are_clipped_alone():
    sampler = Multistage(TREE, (3, 2, 4), steps=12, clipped_level=1)
    mechanism = Mechanism(sampler, 1.0, CLIP)

    def row_by_row(algorithm):
        def clipped_sum(params, batch, weights, scales):
            flat = jax.tree.map(lambda leaf: leaf.reshape(-1, 1, 1, *leaf.shape[3:]), batch)
            return algorithm.clipped_sum(params, flat, jnp.repeat(weights, 8), scales)

        return algorithm._replace(clipped_sum=clipped_sum)

    def audit(mutate):
        return audit_program(
            mutate(dpsgd(unit_loss, optax.sgd(0.1))),
            mechanism,
            jnp.ones(4),
            {"x": rows()["x"] * 100},
        )

    report = audit(lambda algorithm: algorithm)
    assert report.passed, report.lines()
    assert not audit(row_by_row).passed
    with pytest.raises(ValueError, match="clips units of examples"):
        black_box_audit(mechanism, Bound(0.0, 1.0), delta=1e-3, trials=100)


# ------------------------------------------------------------------------------------- users

USER_SAMPLERS = {
    "deterministic": Deterministic,
    "shuffle": Shuffle,
    "shuffle, fixed": functools.partial(Shuffle, order="fixed"),
    "poisson": Poisson,
    "poisson, accumulating": functools.partial(Poisson, overflow="accumulate", max_batch_size=2),
    "balls-and-bins": BallsAndBins,
    "balls-and-bins, fixed": functools.partial(BallsAndBins, assignment="fixed"),
}


def user_loss(params, user):
    each = jnp.where(user["weight"] > 0, jnp.square(user["x"] @ params) + user["x"] @ params, 0)
    return each.sum()


# Every sampler, and every cap, at least once; the rest of the product is long.
QUICK = {("deterministic", 1), ("poisson, accumulating", 40)}
CAPPED = [
    pytest.param(
        make,
        tau,
        keep,
        marks=()
        if (name, tau) in QUICK or (tau == 4 and "accumul" not in name)
        else pytest.mark.long,
        id=f"{name}-{tau}-{keep}",
    )
    for name, make in USER_SAMPLERS.items()
    for tau, keep in [(1, "first"), (4, "random"), (40, "first")]
]


@pytest.mark.short("poisson-4-random", "balls-and-bins*", "shuffle*")
@pytest.mark.parametrize(("make", "tau", "keep"), CAPPED)
def test_a_users_whole_data_moves_the_noised_sum_by_at_most_c(make, tau, keep):
    users = np.random.default_rng(2).zipf(1.7, 90) % 12
    x = (100 * np.random.default_rng(3).normal(size=(90, 4))).astype(np.float32)
    seed = 5 if keep == "random" else None
    capped = cap_contributions(users, tau, keep=keep, seed=seed)
    sampler = make(capped.num_users, 4, 3)

    def noised_sums(x):
        return releases(sampler, capped.data({"x": x}), user_loss)

    before = noised_sums(x)
    heaviest = np.bincount(users).argmax()
    after = noised_sums(np.where((users == heaviest)[:, None], np.float32(0), x))
    moved = np.linalg.norm(before - after, axis=1)
    source, number = (
        BatchSource(sampler, ROOT.sampling_seed(0)),
        np.unique(users).searchsorted(heaviest),
    )
    takes_part = np.array([
        any(number in one.indices[one.weights > 0] for one in source.passes(step))
        for step in range(sampler.num_steps)
    ])  # fmt: skip
    assert (moved[~takes_part] == 0).all()  # to the bit
    assert (moved[takes_part] <= CLIP * (1 + 1e-4)).all()
    assert (moved[takes_part] >= 0.99 * CLIP).all()  # as its clipped gradient is long
    assert 0 < takes_part.sum() < sampler.num_steps


def test_one_users_padding_holds_nothing_of_another_user():
    users, x = np.array([0, 1, 1, 1]), np.array([9.0, 1.0, 2.0, np.nan], np.float32)
    data = cap_contributions(users, 3).data({"x": x})
    np.testing.assert_array_equal(data["x"], [[9, 0, 0], [1, 2, np.nan]])
