"""What is made of noisy sums over all rows is made of them alone, and no two share their noise."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dpsgd import Mechanism, public
from dpsgd.core.queries import FullSums
from dpsgd.engine import queries
from dpsgd.engine.queries import Refinement, read_rows, refine, refinement_of
from dpsgd.engine.sources import arrays_digest
from dpsgd.noise.keys import RootKey
from samplers import BallsAndBins, Poisson
from tests.dpsgd.mixing import shared

N, D, T = 400, 3, 8
SAMPLER = Poisson(N, 50)
ROWS = {"x": np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)}


def read(params, example):
    return example["x"] * params


def itself(state, row):
    return row


@dataclass(frozen=True)
class Means(Refinement):
    """Adds up the means of what is read; the parameters come with them."""

    read: Callable = read
    of_row: Callable = itself
    size: int = D

    def reads(self, params, example):
        return self.read(params, example)

    def start(self):
        return jnp.zeros(self.size)

    def statistic(self, state, row):
        return self.of_row(state, row)

    def fold(self, state, mean):
        return state + mean

    def apply(self, params, state):
        return params, state


MEANS = Means()  # one, and so one program


def mechanism(count=1, sigma=1e-6, clip=1.0, **fields):
    return Mechanism(SAMPLER, 1.0, 1.0, full_sums=FullSums(count, sigma, clip), **fields)


def released(means=None, of=None, rows=None, *, params=1.0, **how):
    rows = ROWS if rows is None else rows
    found = refine(means or MEANS, of or mechanism(), jnp.float32(params), rows, **how)
    return np.asarray(found.params[1], np.float64)


def clipped_mean(rows, clip, steps=1):
    norms = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return steps * (rows * np.minimum(1, clip / norms)).sum(0) / len(rows)


@pytest.mark.parametrize("clip", [0.5, 2.0, 64.0])
def test_a_sum_is_of_vectors_that_are_clipped_as_one(clip):
    found = released(of=mechanism(2, 1e-7, clip), params=2.0)
    expected = clipped_mean(2 * ROWS["x"], clip, steps=2)
    np.testing.assert_allclose(found, expected, atol=3e-6 * clip)


def test_noise_of_sums_is_sigma_c_over_n_in_every_coordinate():
    size, sigma, clip, count = 6_000, 3.0, 5.0, 2
    wide = Means(of_row=lambda state, row: 0 * jnp.tile(row, size // D), size=size)
    found = released(wide, mechanism(count, sigma, clip))
    expected = sigma * clip / N * np.sqrt(count)
    assert stats.kstest(found / expected, "norm").pvalue > 1e-6
    total = float(np.sum((found / expected) ** 2))  # of chi-square's law
    assert min(stats.chi2.cdf(total, size), stats.chi2.sf(total, size)) > 1e-6


def test_steps_of_all_sums_are_declared_before_any_noise(monkeypatch):
    declared = []

    def stop(steps):
        declared.append(steps)
        raise InterruptedError

    made = []
    monkeypatch.setattr(queries, "_applied", lambda *of: made.append(of))
    with pytest.raises(InterruptedError):
        released(of=mechanism(3), declare=stop)
    assert declared == [range(T, T + 3)]
    assert not made
    monkeypatch.undo()
    released(of=mechanism(3), declare=declared.append)
    assert declared[1:] == [range(T, T + 3)]


def test_two_releases_never_share_noise_but_under_one_seed(monkeypatch):
    collective = RootKey(bytes(32), insecure=False)  # that connected processes would have
    monkeypatch.setattr(RootKey, "shared", lambda: collective)
    zeros, of = Means(of_row=lambda state, row: 0 * row), mechanism(2, 8.0, 2.0)
    one, two, *seeded = (released(zeros, of, insecure_seed=s) for s in (None, None, 1, 1))
    assert np.abs(one - two).min() > 1e-6
    np.testing.assert_array_equal(*seeded)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"a": np.zeros(2, np.float32)}, {"b": np.zeros(2, np.float32)}),
        ({"a": np.zeros(2, np.float32)}, {"a": np.zeros((2, 1), np.float32)}),
        ({"a": np.zeros(2, np.float32)}, {"a": np.zeros(2, np.int32)}),
        ({"a": np.zeros(2, np.float32)}, {"a": np.float32([0, -0.0])}),
        ({"a": np.arange(4.0)}, {"a": np.arange(4.0)[::-1]}),
        ([np.zeros(1), np.zeros(0)], [np.zeros(0), np.zeros(1)]),
        ([jnp.zeros(2, jnp.bfloat16)], [jnp.ones(2, jnp.bfloat16)]),
        ([np.arange(2**24 + 1) < 0], [np.arange(2**24 + 1) == 2**24]),
    ],
)
def test_what_is_not_the_same_has_another_digest(one, two):
    assert arrays_digest(one) != arrays_digest(two)
    assert arrays_digest(one) == arrays_digest(jax.tree.map(np.array, one))


@pytest.mark.parametrize(
    ("means", "message"),
    [
        (Means(read=lambda params, example: shared(example["x"])), "custom_vmap"),
        (Means(of_row=lambda state, row: shared(row)), "custom_vmap"),
        (Means(of_row=lambda state, row: row[0]), "a row's statistic must be a vector"),
        (Means(size=[D]), "Means must be a frozen dataclass of parts that have a hash"),
    ],
)
def test_refinement_that_sees_other_rows_is_refused_beforehand(means, message):
    declared = []
    with pytest.raises(ValueError, match=message):
        released(means, declare=declared.append)
    assert not declared


HELD = ROWS["x"][:, 0]


@dataclass(frozen=True)
class Biased(Means):
    """Names rows in the method that makes the released parameters."""

    def apply(self, params, state):
        return params, state + 0 * HELD[0]


def held(place):
    """Returns a refinement that gets at other rows at this place."""
    inside = jnp.asarray(HELD)
    functions = {
        "reads": Means(lambda params, example: example["x"] * params + inside[5]),
        "a default": Means(lambda params, example, others=HELD: example["x"] * params + others[5]),
        "a statistic": Means(of_row=lambda state, row: row + inside[5]),
        "the release": Biased(),
    }
    return functions[place]


@pytest.mark.parametrize("place", ["reads", "a default", "a statistic", "the release"])
def test_refinement_that_holds_rows_is_refused_beforehand(place):
    declared = []
    with pytest.raises(ValueError, match=rf"float32\[{N}\] in a closure .*dpsgd.public"):
        released(held(place), declare=declared.append)
    assert not declared


def test_refinement_may_hold_arrays_that_are_declared_public():
    table = public(jnp.linspace(1.0, 2.0, N))
    means = Means(lambda params, example: example["x"] * table[0])
    np.testing.assert_allclose(released(means), clipped_mean(ROWS["x"], 1.0), atol=3e-6)


def test_a_calibration_is_of_the_kind_that_its_sums_are_for():
    assert refinement_of(Means(), mechanism(), "platt") == Means()
    for offered, kind in ((Means(), "affine"), (None, "platt")):
        with pytest.raises(ValueError, match=f"{kind} .*the task offers"):
            refinement_of(offered, mechanism(), kind)


def test_rows_are_read_in_parts_as_they_are_at_once(monkeypatch):
    whole = read_rows(Means(), jnp.float32(3), ROWS)
    assert isinstance(whole, np.ndarray)
    for most in (1, 7, N - 1):
        monkeypatch.setattr(queries, "_READ_ROWS", most)
        np.testing.assert_array_equal(read_rows(Means(), jnp.float32(3), ROWS), whole)


def test_releases_are_the_same_in_double_precision():
    of, wide = mechanism(2, 1.0), {"x": ROWS["x"].astype(np.float64)}
    found = released(of=of, insecure_seed=1)
    with jax.enable_x64(True):
        params, state = refine(MEANS, of, np.float32(1), wide, insecure_seed=1).params
    assert state.dtype == params.dtype == np.float32
    np.testing.assert_array_equal(np.asarray(state, np.float64), found)


def test_a_mechanism_without_sums_refines_nothing():
    with pytest.raises(ValueError, match="releases no sums over all rows"):
        released(of=dataclasses.replace(mechanism(), full_sums=None))


def test_rows_that_the_mechanism_does_not_count_are_refused():
    few = {"x": ROWS["x"][:-1]}
    with pytest.raises(ValueError, match="399 rows, but the sampler was built for"):
        released(rows=few)
    of = dataclasses.replace(mechanism(), sampler=BallsAndBins(N - 1, 50))
    assert released(of=of, rows=few).shape == (D,)
