"""What noise does to a row that nobody reads has the law that is stated, at all lengths of gaps."""

import inspect
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from stepwise import stepwise_law

from dpsgd import LazyTables
from dpsgd.audit.reference_rows import TableLaw
from dpsgd.engine.lazy.gaps import GapLaw, Gaps, LinearSgd
from dpsgd.engine.lazy.laws import RunLaws, law_of, packed

STEPS = 1_000
PROGRESS = np.arange(STEPS) / STEPS
SCHEDULES = {
    "constant": np.full(STEPS, 0.3),
    "cosine": 0.5 * (1 + np.cos(np.pi * PROGRESS)),
    "warm-up": np.minimum(1.0, 100 * PROGRESS**2),
}


def step_by_step(run):
    """(start, stop) -> the law of a gap as the audit knows it, by the update rule alone."""
    sizes = np.array(run.step_sizes)
    audited, kept = TableLaw(sizes, run.momentum, 1.0), -run.order
    return lambda start, stop: GapLaw(*(x[kept:, kept:] for x in audited.gap(start, stop)))


def looked_up(gaps, start, stop):
    """The law of a gap as a step finds it."""
    at, multiple = gaps.ending_at(stop), -(-start // gaps.spacing)
    if multiple * gaps.spacing <= stop:
        return gaps.to_next_multiple.select(start).then(at.from_multiples.select(multiple))
    return at.from_recent.select(start % gaps.spacing)


def assert_same(law, expected):
    """Within 1e-9 of the standard deviations."""
    transition, covariance = expected
    scale = np.sqrt(np.outer(*[np.diag(covariance)] * 2))
    assert np.all(np.abs(law.covariance - covariance) <= 1e-9 * scale)
    assert np.allclose(law.transition, transition, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.99])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_gap_is_what_the_update_rule_does_to_noise(schedule, momentum):
    run = LinearSgd(tuple(SCHEDULES[schedule]), momentum)
    gaps, truth, rng = Gaps(run), step_by_step(run), np.random.default_rng(0)
    for stop in (1, 2, 31, 32, 500, STEPS - 1, STEPS):  # and of these all kinds of beginnings
        for start in {0, stop - 1, max(0, stop - 2), *rng.integers(0, stop, 2).tolist()}:
            assert_same(looked_up(gaps, start, stop), truth(start, stop))


@pytest.mark.short("0.0")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_covariance_roots_are_exact_to_float32_digits(momentum):
    """Of a gap, L L^T is V; and what has no noise of its own there gets none that shows."""
    run = LazyTables(lambda k: 0.1 + np.cos(k) ** 2, momentum).of_run(STEPS)
    laws, compiled = RunLaws(run), jax.jit(law_of)
    bounds = [(0, STEPS - 1), (7, 900), (7, 500), (STEPS - 2, STEPS - 1)]
    short = [(stop - length, stop) for stop in range(520, 560, 4) for length in (1, 2)]
    for start, stop in bounds + short:
        found = compiled(laws.flush_arrays(stop), np.array([start], np.int32), np.int32(stop))
        a, low = (np.array([[float(x[0]) for x in row] for row in of]) for of in found)
        expected = stepwise_law(run, start, stop)
        own = np.sqrt(np.diag(expected.covariance))[:, None]
        assert np.all(np.abs(low @ low.T - expected.covariance) <= 1e-5 * own * own.T)
        np.testing.assert_allclose(a, expected.transition, rtol=1e-5, atol=1e-7)
        assert np.all(np.abs(low - expected.root) <= 2.0**-18 * own)
        # All numbers of a step move by one draw, and by two those of two.
        assert np.all(np.abs(low[:, stop - start :]) <= 2.0**-20 * own)


def test_no_gap_changes_nothing():
    gaps = Gaps(LinearSgd(tuple(SCHEDULES["cosine"]), 0.9))
    for stop in (0, 31, 62, 500, STEPS):
        law = looked_up(gaps, stop, stop)
        assert np.array_equal(law.transition, np.eye(2))
        assert not law.covariance.any()


def test_a_run_that_goes_on_has_the_same_laws():
    run = LinearSgd(tuple(SCHEDULES["cosine"]), 0.9)
    at_once, step_by_step = Gaps(run), Gaps(run)
    for stop in range(STEPS - 70, STEPS + 1):
        found = step_by_step.ending_at(stop)
        if stop % 23 == 0:
            at_once.ending_at(40)  # and back
            for one, other in zip(at_once.ending_at(stop), found, strict=True):
                assert all(map(np.array_equal, one, other))


@pytest.fixture(scope="module", params=[10_000, pytest.param(100_000, marks=pytest.mark.long)])
def long_gaps(request):
    progress = np.arange(request.param) / request.param
    return Gaps(LinearSgd(tuple(0.5 * (1 + np.cos(np.pi * progress))), 0.9))


def test_a_flush_may_come_while_the_next_block_is_prepared(monkeypatch):
    """Both ask for laws at once, the flush in the thread of the steps."""
    run = LinearSgd(tuple(SCHEDULES["cosine"]), 0.9)
    stops, gaps, sound = (500, 40), Gaps(run), GapLaw.then
    expected = [Gaps(run).ending_at(stop) for stop in stops]
    _ = gaps._to_ends
    halfway, flushed = threading.Event(), threading.Event()

    def then(law, later):
        if not halfway.is_set():
            halfway.set()
            flushed.wait(0.5)  # without a lock the other thread is done by then
        return sound(law, later)

    def flush():
        halfway.wait(30)
        found = gaps.ending_at(stops[1])
        flushed.set()
        return found

    monkeypatch.setattr(GapLaw, "then", then)
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(gaps.ending_at, stops[0]), threads.submit(flush)]
        for one, other in zip((future.result() for future in found), expected, strict=True):
            jax.tree.map(np.testing.assert_array_equal, one, other)


def test_laws_are_right_after_an_interrupt_at_any_line():
    """Ctrl-C may come while the laws of a block are computed, and a flush follows."""
    run = LinearSgd(tuple(SCHEDULES["cosine"]), 0.9)
    gaps, interrupts = Gaps(run), []
    expected = gaps.ending_at(33)

    def interrupt(frame, event, argument):
        if frame.f_code.co_filename == inspect.getfile(Gaps) and event == "line":
            lines[0] -= 1
            if not lines[0]:
                raise KeyboardInterrupt
        return interrupt

    tracer = sys.gettrace()
    for line in range(1, 60):
        lines = [line]
        gaps.ending_at(30)
        sys.settrace(interrupt)
        try:
            gaps.ending_at(33)
        except KeyboardInterrupt:
            interrupts.append(line)
        finally:
            sys.settrace(tracer)
        found = gaps.ending_at(33)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert len(interrupts) > 9


@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("length", [1, 10, 1_000, None])
def test_long_runs_keep_all_digits_at_both_ends_of_the_schedule(long_gaps, length, where):
    steps = long_gaps.optimizer.num_steps
    length = length or steps
    start = 0 if where == "first" else steps - length
    expected = step_by_step(long_gaps.optimizer)(start, start + length)
    assert_same(looked_up(long_gaps, start, start + length), expected)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"step_sizes": ()}, "step_sizes is empty"),
        ({"step_sizes": (1.0, -1.0)}, r"learning_rate .* -1\.0 at step 1"),
        ({"step_sizes": (float("nan"),)}, "learning_rate"),
        ({"step_sizes": (1e20,)}, "learning_rate"),  # its square is infinite in float32
        ({"momentum": 1.0}, "momentum"),
    ],
)
def test_what_has_no_law_is_refused(wrong, named):
    with pytest.raises(ValueError, match=named):
        LinearSgd(**{"step_sizes": (1.0,), **wrong})


def test_a_law_that_float32_cannot_hold_is_refused():
    unbounded = LinearSgd((1e15,) * 10_000, momentum=1 - 1e-13)
    with pytest.raises(ValueError, match="beyond float32"):
        packed(Gaps(unbounded).ending_at(10_000).from_multiples)
