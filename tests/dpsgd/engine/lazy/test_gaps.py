"""What noise does to a row that nobody reads has the law that is stated, at all lengths of gaps."""

import numpy as np
import pytest

from dpsgd.engine.lazy.gaps import Gaps, LinearSgd
from dpsgd.engine.lazy.laws import packed

STEPS = 1_000
PROGRESS = np.arange(STEPS) / STEPS
SCHEDULES = {
    "constant": np.full(STEPS, 0.3),
    "cosine": 0.5 * (1 + np.cos(np.pi * PROGRESS)),
    "warm-up": np.minimum(1.0, 100 * PROGRESS**2),
}
OPTIMIZERS = [(0.0, 0.0), (0.9, 0.0), (0.99, 0.0), (0.0, 0.1), (0.9, 0.01)]


def simulated(sizes, momentum, decay, start, stop):
    """Returns A and V by the update rule itself: of both unit states, and of each step's noise."""
    states = np.zeros((2, 2 + stop - start))
    states[0, 0] = states[1, 1] = 1.0
    for k in range(start, stop):
        states[0] = momentum * states[0] + decay * states[1]
        states[0, 2 + k - start] += 1.0
        states[1] = states[1] - sizes[k] * states[0]
    noise = states[:, 2:]
    kept = slice(None) if momentum else slice(1, 2)
    return states[kept, :2][:, kept], (noise @ noise.T)[kept, kept]


def gap(gaps: Gaps, start: int, stop: int):
    """Returns the law of a gap as a step looks it up."""
    at, multiple = gaps.at(stop), -(-start // gaps.spacing)
    if multiple * gaps.spacing <= stop:
        return gaps.to_next_multiple.of(start).then(at.from_multiples.of(multiple))
    return at.from_recent.of(start % gaps.spacing)


def assert_same(law, transition, covariance):
    """Within 1e-9 of the standard deviations."""
    scale = np.sqrt(np.outer(*[np.diag(covariance)] * 2))
    assert np.all(np.abs(law.covariance - covariance) <= 1e-9 * scale)
    assert np.allclose(law.transition, transition, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("momentum", "decay"), OPTIMIZERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_gap_is_what_the_update_rule_does_to_noise(schedule, momentum, decay):
    sizes = SCHEDULES[schedule]
    run = LinearSgd(tuple(sizes), momentum, decay)
    gaps, rng = Gaps(run), np.random.default_rng(0)
    for stop in (1, 2, 31, 32, 500, STEPS - 1, STEPS):  # and of these all kinds of beginnings
        for start in {0, stop - 1, max(0, stop - 2), *rng.integers(0, stop, 2).tolist()}:
            assert_same(gap(gaps, start, stop), *simulated(sizes, momentum, decay, start, stop))


def test_no_gap_changes_nothing():
    gaps = Gaps(LinearSgd(tuple(SCHEDULES["cosine"]), 0.9))
    for stop in (0, 31, 62, 500, STEPS):
        law = gap(gaps, stop, stop)
        assert np.array_equal(law.transition, np.eye(2))
        assert not law.covariance.any()


def test_a_run_that_goes_on_has_the_same_laws():
    run = LinearSgd(tuple(SCHEDULES["cosine"]), 0.9, 0.01)
    at_once, step_by_step = Gaps(run), Gaps(run)
    for stop in range(STEPS - 70, STEPS + 1):
        found = step_by_step.at(stop)
        if stop % 23 == 0:
            at_once.at(40)  # and back
            for one, other in zip(at_once.at(stop), found, strict=True):
                assert all(map(np.array_equal, one, other))


def closed_form(sizes, mu, start, stop):
    """Returns A and V by sums over the schedule, for momentum without decay."""
    p = np.zeros(len(sizes) + 1)
    for k in range(len(sizes) - 1, -1, -1):
        p[k] = sizes[k] + mu * p[k + 1]
    g = stop - start
    powers = mu ** np.arange(g, 0, -1.0)
    q, squares = powers @ p[start:stop], mu**2 * (1 - mu ** (2 * g)) / (1 - mu**2)
    variance = p[start:stop] @ p[start:stop] - 2 * p[stop] * q + p[stop] ** 2 * squares
    both = -(q - p[stop] * squares) / mu
    transition = [[mu**g, 0], [-mu * (p[start] - mu**g * p[stop]), 1]]
    return np.array(transition), np.array([[squares / mu**2, both], [both, variance]])


@pytest.fixture(scope="module", params=[10_000, pytest.param(100_000, marks=pytest.mark.long)])
def long_gaps(request):
    progress = np.arange(request.param) / request.param
    return Gaps(LinearSgd(tuple(0.5 * (1 + np.cos(np.pi * progress))), 0.9))


@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("length", [1, 10, 1_000, None])
def test_long_runs_keep_all_digits_at_both_ends_of_the_schedule(long_gaps, length, where):
    sizes = np.array(long_gaps.optimizer.step_sizes)
    length = length or sizes.size
    start = 0 if where == "first" else sizes.size - length
    stop = start + length
    law = gap(long_gaps, start, stop)
    if length <= 1_000:  # there the closed form cancels
        assert_same(law, *simulated(sizes, 0.9, 0.0, start, stop))
    else:
        assert_same(law, *closed_form(sizes, 0.9, start, stop))


def test_without_momentum_variances_add_up():
    assert LinearSgd((1.0, 2.0, 0.5)).law(0, 3).covariance.item() == 1 + 4 + 0.25


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"step_sizes": ()}, "at least one step"),
        ({"step_sizes": (1.0, -1.0)}, r"learning_rate .* -1\.0 at step 1"),
        ({"step_sizes": (float("nan"),)}, "learning_rate"),
        ({"step_sizes": (1e20,)}, "learning_rate"),  # its square is infinite in float32
        ({"step_sizes": (0.5, 3.0), "weight_decay": 0.4}, "at most 1"),
        ({"momentum": 1.0}, "momentum"),
        ({"weight_decay": -1.0}, "weight_decay"),
    ],
)
def test_what_has_no_law_is_refused(wrong, named):
    with pytest.raises(ValueError, match=named):
        LinearSgd(**{"step_sizes": (1.0,), **wrong})


def test_a_law_that_float32_cannot_hold_is_refused():
    unbounded = LinearSgd((1e15,) * 10_000, momentum=1 - 1e-13)
    with pytest.raises(ValueError, match="beyond float32"):
        packed(Gaps(unbounded).at(10_000).from_multiples)
