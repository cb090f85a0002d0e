"""Coefficients of correlated noise: the error they leave in iterates, and which leave least."""

import math

import numpy as np
import pytest

from accounting import epsilon
from dpsgd import BandedToeplitz, BufferedToeplitz, Independent
from dpsgd.noise.sensitivity import squared_sensitivity
from dpsgd.noise.strategies import (
    Workload,
    banded_square_root,
    optimized,
    optimized_buffers,
)
from experiments.benchmarks.correlated import DELTA, REFERENCE, error_at, one_epoch, reference
from samplers import Deterministic, Poisson


def cosine(steps):
    return (1 + np.cos(np.pi * np.arange(steps) / steps)).tolist()


def schedule(steps):
    return np.cos(np.linspace(0, 1.4, steps)).tolist()


WORKLOADS = {
    "prefix sums": Workload(40),
    "momentum": Workload(40, momentum=0.9),
    "schedule": Workload(40, step_sizes=schedule(40)),
    "momentum and schedule": Workload(40, 0.7, schedule(40)),
    "an end without steps": Workload(40, step_sizes=[1.0] * 30 + [0.0] * 10),
}


def matrix_of(workload):
    """A, column by column: what SGD makes of a gradient of 1 in one step and none in others."""
    n = workload.num_steps
    columns = np.zeros((n, n))
    for s in range(n):
        v = x = 0.0
        for t in range(n):
            v = workload.momentum * v + (t == s)
            x += (workload.step_sizes[t] if workload.step_sizes else 1.0) * v
            columns[t, s] = x
    return columns


@pytest.mark.parametrize("what", WORKLOADS)
@pytest.mark.parametrize(
    "noise",
    [
        Independent(),
        BandedToeplitz((1.0, 0.6, 0.3)),
        BandedToeplitz((1, -0.4)),
        BufferedToeplitz((0.4, 0.2), (0.5, 0.9)),
    ],
    ids=str,
)
def test_the_error_of_a_strategy_is_that_of_its_matrices(what, noise):
    workload = WORKLOADS[what]
    inverse = np.linalg.inv(noise.whiten(np.eye(workload.num_steps)))
    wanted = np.sum((matrix_of(workload) @ inverse) ** 2) / workload.num_steps
    assert workload.mean_square(noise) == pytest.approx(wanted, rel=1e-8)


@pytest.mark.parametrize("what", WORKLOADS)
def test_no_coefficients_nearby_have_less_error_than_the_optimised_ones(what):
    workload, rng = WORKLOADS[what], np.random.default_rng(0)
    best = optimized(workload, 4)
    least = workload.mean_square(best)
    assert least < 0.98 * workload.mean_square(banded_square_root(4))
    for _ in range(50):
        moved = np.array(best.coefficients) + 1e-2 * rng.normal(size=4)
        assert workload.mean_square(BandedToeplitz(moved.tolist())) > least * (1 - 1e-6)


@pytest.mark.parametrize(("steps", "bands"), [(2112, 4), (3600, 4), (7040, 8)])
def test_a_search_that_tries_noise_which_explodes_steps_back_and_goes_on(steps, bands):
    found = optimized(Workload(steps, 0.9, cosine(steps)), bands)
    assert found.coefficients[bands - 1] > 0.9 * found.coefficients[0]


@pytest.mark.long
@pytest.mark.parametrize("bands", [16, 64, 256, 1024])
def test_cyclic_balls_and_bins_has_the_noise_and_the_error_of_the_reference(bands):
    rows = list(reference((bands,)))
    assert all(row.holds is not False for row in rows)
    assert sum(row.holds is True for row in rows) == 8


@pytest.mark.parametrize("bands", [256, 1024])
def test_the_noise_of_cyclic_balls_and_bins_is_that_of_the_reference(bands):
    noise, sampler = banded_square_root(bands), one_epoch(bands)
    sigma, _ = REFERENCE[bands][5.0]
    assert epsilon(noise.privacy(sampler, sigma * 1.005), DELTA).upper <= 5.0
    assert epsilon(noise.privacy(sampler, sigma * 0.995), DELTA).lower >= 5.0


def test_a_strategy_costs_as_its_sampler_says():
    sampler, workload = Deterministic(1000, 10, 2), Workload(200)
    alone, banded = (
        error_at(noise, workload, sampler, epsilon=2.0, delta=1e-5)
        for noise in (Independent(), banded_square_root(50))
    )
    assert alone[0] == banded[0]  # nothing is amplified
    assert banded[1] < 0.35 * alone[1]
    with pytest.raises(ValueError, match="holds for noise with up to 1"):
        error_at(banded_square_root(2), workload, Poisson(1000, 10, 2), epsilon=2.0, delta=1e-5)


def disturbance(noise, workload, period):
    """Square of the error at equal guarantees, by any factor."""
    column = noise.column(workload.num_steps)
    return workload.mean_square(noise) * squared_sensitivity(column, period)


@pytest.mark.parametrize("period", [40, 15])
@pytest.mark.parametrize("what", WORKLOADS)
def test_no_buffers_nearby_have_less_error_than_the_optimised_ones(what, period):
    workload, rng = WORKLOADS[what], np.random.default_rng(0)
    best = optimized_buffers(workload, 2, period)
    least = disturbance(best, workload, period)
    for _ in range(50):
        weights = np.array(best.weights) * np.exp(1e-2 * rng.normal(size=2))
        rates = (1 - np.array(best.decays)) * np.exp(1e-2 * rng.normal(size=2))
        moved = BufferedToeplitz(weights.tolist(), (1 - rates).tolist())
        assert disturbance(moved, workload, period) > least * (1 - 1e-5)


@pytest.mark.short("400*", "600 steps-200*")
@pytest.mark.parametrize(
    ("workload", "period", "buffers", "within"),
    [
        (Workload(400), 400, 2, 1.01),
        (Workload(400), 400, 4, 1.0005),
        (Workload(600, 0.9, cosine(600)), 600, 4, 1.005),
        (Workload(600, 0.9, cosine(600)), 200, 4, 1.06),  # as columns overlap
        (Workload(880, 0.9, cosine(880)), 88, 4, 1.08),
    ],
    ids=lambda of: f"{of.num_steps} steps" if isinstance(of, Workload) else str(of),
)
def test_few_buffers_leave_little_more_error_than_the_best_bands_of_an_epoch(
    workload, period, buffers, within
):
    sampler = Deterministic(period * 10, 10, workload.num_steps // period)
    banded, buffered = (
        error_at(noise, workload, sampler, epsilon=2.0, delta=1e-5)
        for noise in (optimized(workload, period), optimized_buffers(workload, buffers, period))
    )
    assert 0.99 < buffered[1] / banded[1] < within
    assert buffers <= (period - 1) / 10  # of the memory


def test_short_runs_have_strategies_too():
    assert optimized_buffers(Workload(1), 2, 1).kept == 2
    assert optimized_buffers(Workload(3), 1, 2).kept == 1
    # Momentum as slow as this asks for noise that is nearly refused.
    assert optimized_buffers(Workload(200, 0.999), 3, 200).spread <= 32
    assert optimized(Workload(1), 8).bands == 1
    assert optimized(Workload(3), 8).bands == 3
    assert optimized(Workload(5), 1) == banded_square_root(1) == BandedToeplitz((1.0,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Workload(0), "num_steps must be at least 1"),
        (lambda: Workload(3, 1.0), r"momentum must be in \[0, 1\)"),
        (lambda: Workload(3, step_sizes=[1.0]), "3 steps have 1 step_sizes"),
        (lambda: Workload(2, step_sizes=[0.0, 0.0]), "not all 0"),
        (lambda: Workload(2, step_sizes=[1.0, math.inf]), "must be finite"),
        (lambda: banded_square_root(0), "bands must be at least 1"),
        (lambda: optimized_buffers(Workload(3), 0, 3), "buffers must be at least 1"),
        (lambda: optimized_buffers(Workload(3), 1, 0), "period must be at least 1"),
    ],
)
def test_workloads_that_cannot_be_are_refused_in_one_line(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)
