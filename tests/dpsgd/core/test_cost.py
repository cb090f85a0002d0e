"""What is spent so far, and what may be spent: each number says which stops it covers."""

import dataclasses
import functools
import inspect
import itertools
import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checked_types import unchecked

import accounting
from accounting import (
    Bound,
    GaussianProfile,
    SelectionProfile,
    TrialCount,
    attack_accuracy,
    attack_advantage,
)
from accounting.attack import implied_advantage
from accounting.profile import ContradictoryBounds
from accounting.releases import EnvelopeProfile
from dpsgd import (
    Mechanism,
    RunSpec,
    Segment,
    Trials,
    cost,
    dpsgd,
    train,
)
from dpsgd.audit.black_box import black_box_audit
from dpsgd.core.guarantee import Guarantee
from dpsgd.core.queries import FullSums
from dpsgd.runs.history import Attempt, History
from dpsgd.runs.ledger import Ledger
from dpsgd.runs.terms import Selection, Terms
from samplers import (
    BallsAndBins,
    Deterministic,
    Multistage,
    Poisson,
    Population,
    Shuffle,
    UnitTree,
    UserPoisson,
    cap_contributions,
)
from samplers.settings import SETTINGS

pytestmark = pytest.mark.usefixtures("unoptimised")

SIZES = {"num_examples": 1000, "batch_size": 100}
DELTA = 1e-5
epsilon = functools.lru_cache(accounting.epsilon)
MECHANISM = Mechanism(Poisson(**SIZES), 1.0, 1.0)
SAMPLERS = {
    "deterministic": Deterministic(**SIZES, epochs=3),
    "shuffle": Shuffle(**SIZES, epochs=3),
    "one order": Shuffle(**SIZES, epochs=3, order="fixed"),
    "poisson": Poisson(**SIZES, epochs=3),
    "balls-and-bins": BallsAndBins(**SIZES, epochs=3),
    "one assignment": BallsAndBins(**SIZES, epochs=3, assignment="fixed"),
    "units": Multistage(
        UnitTree.from_columns({"unit": np.repeat(np.arange(50), 20)}),
        (5, 2),
        steps=30,
        clipped_level=1,
    ),
}
DELTAS = {
    "of": lambda delta: cost([Segment(MECHANISM)], delta),
    "so far": lambda delta: cost([Segment(MECHANISM, range(1))], delta),
    "by hand": lambda delta: Guarantee(Bound(0.0, 0.0), delta, MECHANISM, "example"),
    "train": lambda delta: trained(delta=delta),
    "until": lambda delta: MECHANISM.until(epsilon=1.0, delta=delta),
    "an audit": lambda delta: black_box_audit(MECHANISM, Bound(0.0, 1.0), delta=delta, trials=100),
    "a ledger": lambda delta: Terms.from_record(Terms(Segment(MECHANISM), delta).record()),
    "a run": lambda delta: RunSpec.of(MECHANISM.sampler, noise_multiplier=1.0, target_delta=delta),
    "a default cap": lambda delta: Poisson(**SIZES, target_delta=delta),
    "few units": lambda delta: RunSpec.of(
        Poisson(round(1 / delta), 1), noise_multiplier=1.0, target_delta="1/n"
    ).delta_of(Population(round(1 / delta))),
}
"""Whatever takes a delta."""
EVERY_SAMPLER = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)


@pytest.fixture(autouse=True)
def equal_profiles_are_priced_once(monkeypatch):
    """What is compared here is which profile is priced."""
    monkeypatch.setattr("dpsgd.core.cost.epsilon", epsilon)


def mechanism(sampler, sigma=2.0):
    return Mechanism(sampler, sigma, 1.0)


def spent(sampler, steps):
    return cost([Segment(mechanism(sampler), range(steps))], DELTA)


@pytest.mark.parametrize(
    "sampler",
    [
        pytest.param(one, id=name, marks=pytest.mark.long if name in ("units", "one order") else ())
        for name, one in SAMPLERS.items()
    ],
)
def test_cost_grows_with_steps_up_to_the_whole_runs(sampler):
    whole = cost([Segment(mechanism(sampler))], DELTA)
    nothing, first, last = (spent(sampler, steps) for steps in (0, 1, 30))
    after_the_end = cost([Segment(mechanism(sampler), range(30, 30))], DELTA)
    assert after_the_end.epsilon == nothing.epsilon
    # Each price is certified to 1e-3 only.
    assert nothing.epsilon.upper == 0.0 < first.epsilon.upper <= last.epsilon.upper + 1e-3
    assert last == whole


@pytest.mark.short("shuffle", "poisson", "balls-and-bins")
@EVERY_SAMPLER
def test_what_is_spent_is_what_a_ledger_of_these_steps_costs(sampler, tmp_path):
    terms = Terms(Segment(mechanism(sampler)), DELTA)
    with Ledger.create(tmp_path / "ledger.jsonl", terms) as ledger:
        ledger.declare(range(14))
        told = ledger.history.guarantee()
    part, whole = spent(sampler, 14), spent(sampler, 30)
    assert part.epsilon.upper == told.epsilon.upper
    assert part.notes[-1] == told.notes[-1]
    assert f"costs what the whole run costs (epsilon in {whole.epsilon})" in told.notes[-1]
    assert "for the first 14 of 30 steps, if no release decides to stop there" in told.sentence()
    assert part.record()["guarantee"] == part.sentence()
    assert whole.scope == ""


@pytest.mark.short("shuffle", "poisson", "balls-and-bins")
@EVERY_SAMPLER
def test_attack_advantage_grows_from_zero_to_the_profiles(
    sampler,
):
    found = [spent(sampler, steps).attack_advantage for steps in (0, 1, 14, 30)]
    assert found[0] == Bound(0.0, 0.0)
    assert 0.0 < found[1].lower <= found[1].upper
    # Each is certified to 0.2 % or so only.
    assert all(a.upper <= 1.003 * b.upper for a, b in itertools.pairwise(found))
    assert found[3] == attack_advantage(sampler.privacy(2.0))


def test_attack_accuracy_is_the_smaller_of_two_bounds():
    known = cost([Segment(mechanism(SAMPLERS["shuffle"]))], DELTA)
    unknown = dataclasses.replace(known, total_variation=Bound(0.0, 1.0))
    implied = implied_advantage(known.epsilon.upper, DELTA)
    assert unknown.attack_advantage == Bound(0.0, implied)
    assert known.attack_advantage.upper < implied
    percent = 100 * attack_accuracy(known.attack_advantage).upper
    assert float(known.attack().split()[-5]) == pytest.approx(percent, abs=0.1)
    small = dataclasses.replace(known, epsilon=Bound(0.0, 1e-3))
    assert small.attack_advantage.upper == implied_advantage(1e-3, DELTA)
    assert known.stopped(10, 30).attack_advantage == known.attack_advantage
    record = known.record()
    assert record["attack_advantage_upper"] == known.attack_advantage.upper
    assert record["attack_accuracy_upper"] == attack_accuracy(known.attack_advantage).upper


@pytest.mark.parametrize("interval", [None, Bound(1.0, math.inf)])
def test_where_nothing_is_guaranteed_nothing_bounds_an_attack(interval):
    known = cost([Segment(mechanism(SAMPLERS["shuffle"]))], DELTA)
    void = dataclasses.replace(known, epsilon=interval)
    assert void.attack_advantage is None
    assert "accuracy" not in void.sentence()
    assert void.record()["attack_accuracy_upper"] is None


@pytest.mark.parametrize("steps", [-1, 31])
def test_steps_that_the_run_has_not_are_refused(steps):
    with pytest.raises(ValueError, match=r"steps must be in \[0, 30\]"):
        spent(SAMPLERS["poisson"], steps)


@pytest.mark.parametrize("kind", ["a mechanism", "one segment", "none"])
def test_cost_takes_a_list_of_segments(kind):
    one = mechanism(SAMPLERS["poisson"])
    wrong = {"a mechanism": [one], "one segment": Segment(one), "none": []}[kind]
    with pytest.raises(TypeError, match=r"segments must be a list of dpsgd.Segment, such as"):
        inspect.unwrap(cost)(wrong, DELTA)


def test_steps_of_a_segment_are_a_range():
    with pytest.raises(TypeError, match=r"steps must be a range, such as range\(30\), got 5"):
        unchecked(Segment(mechanism(SAMPLERS["poisson"])), steps=5)


@pytest.mark.parametrize("sums", [None, FullSums(1, 9.0), FullSums(4, 9.0)], ids=str)
def test_until_counts_epochs_and_sums_as_brute_force_does(sums):
    def run(epochs):
        sampler = SAMPLERS["deterministic"].with_epochs(epochs)
        return Mechanism(sampler, 6.0, 1.0, full_sums=sums)

    upper = [run(epochs).privacy().epsilon(DELTA).upper for epochs in range(1, 20)]
    for target in (0.5 * (upper[2] + upper[3]), upper[7] + 1e-3):
        epochs = sum(one <= target for one in upper)
        assert run(1).until(epsilon=target, delta=DELTA) == run(epochs)


def test_too_small_epsilon_is_refused_with_the_cost_of_one_epoch():
    with pytest.raises(ValueError, match=r"one epoch costs epsilon \[.*raise noise_multiplier"):
        mechanism(SAMPLERS["poisson"]).until(epsilon=0.01, delta=DELTA)
    with pytest.raises(ValueError, match="noise_multiplier is 0"):
        mechanism(SAMPLERS["poisson"], 0.0).until(epsilon=1.0, delta=DELTA)


def test_unhashable_sampler_from_elsewhere_has_its_guarantee():
    @dataclasses.dataclass(frozen=True)
    class Listed(Poisson):
        rows: np.ndarray | None = None

    mechanism = Mechanism(Listed(1000, 100, 1, rows=np.arange(3)), 2.0, 1.0)
    plain = Mechanism(Poisson(1000, 100, 1), 2.0, 1.0)
    assert cost([Segment(mechanism)], 1e-5).epsilon == cost([Segment(plain)], 1e-5).epsilon


def quadratic(w, x):
    return jnp.square(w - x).sum()


PLAIN = dpsgd(quadratic, optax.sgd(0.1))
ROWS = np.linspace(0, 1, 1000, dtype=np.float32)


def trained(data=None, sampler=SAMPLERS["shuffle"], **how):
    data = ROWS if data is None else data
    how = {"block_steps": 8, "audit": False, **how}
    return train(PLAIN, mechanism(sampler), jnp.zeros(()), data, **how)


def test_training_returns_the_guarantee_of_what_ran():
    found = trained(delta=1e-5).guarantee
    planned = cost([Segment(mechanism(SAMPLERS["shuffle"]))], 1e-5)
    assert found.sentence() == planned.sentence()
    assert any("not made" in note for note in found.notes)
    assert trained().guarantee.delta == 1e-5


@pytest.mark.parametrize("delta", [0.1, 0.9])
@pytest.mark.parametrize("name", DELTAS)
def test_no_guarantee_is_given_at_a_delta_that_permits_a_failure(name, delta):
    with pytest.raises(ValueError, match=r"delta must lie in \(0, 0\.1\), got (0|1)\."):
        DELTAS[name](delta)


@pytest.mark.short("50")
@pytest.mark.parametrize("num_users", [None, 50])
def test_a_delta_is_compared_with_the_number_of_protected_units(num_users):
    sampler = UserPoisson(**SIZES, max_contributions=2, num_users=num_users)
    units = num_users or 1000
    for delta, warned in ((1 / units, True), (0.99 / units, False), (1e-5, False)):
        notes = cost([Segment(Mechanism(sampler, 1.0, 1.0))], delta).notes
        assert any(f"delta is not below 1 / {units:,}" in note for note in notes) == warned


@pytest.mark.parametrize(
    ("population", "expected"),
    [
        (Population(10**6), {"poisson": 2e-7}),
        (Population(10**5, "user"), {"poisson": 3e-6}),
        (Population(10**6, "example", 10, 10**5), {"poisson": 2e-7, "user-poisson": 3e-6}),
        (Population(10**6, "example", 10), {"user-poisson": 2e-7}),
    ],
)
def test_default_delta_follows_the_number_of_protected_units(population, expected):
    for name, delta in expected.items():
        settings = SETTINGS[name]()
        sampler = SETTINGS[name](batch_size=100).build(population)
        assert sampler.protected_unit(population) == ("user" if delta == 3e-6 else sampler.unit)
        for one in (settings, sampler):
            assert RunSpec.of(one, noise_multiplier=1.0).delta_of(population) == delta
        by_n = RunSpec.of(settings, noise_multiplier=1.0, target_delta="1/n").delta_of(population)
        assert by_n == (1e-5 if delta == 3e-6 else 1e-6)


def test_an_insecure_seed_gives_no_clean_epsilon():
    with pytest.warns(UserWarning, match="NO GUARANTEE: reproducible noise"):
        found = trained(insecure_seed=1).guarantee
    assert found.sentence().startswith("NO GUARANTEE: reproducible noise")
    assert found.record()["epsilon_upper"] is None


def test_stopped_run_says_so_and_costs_the_whole_run():
    whole = cost([Segment(mechanism(SAMPLERS["shuffle"]))], 1e-5)
    params, found = trained(on_block=lambda steps, w: steps >= 16)
    assert found.epsilon == whole.epsilon
    assert "for a run stopped after 16 of 30 steps" in found.sentence()
    assert any("the run was stopped" in note for note in found.notes)
    complete, guarantee = trained(on_block=lambda steps, w: None)
    assert guarantee.scope == ""
    assert params != complete


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_exception_that_ends_a_run_states_its_cost(error):
    def look(steps, w):
        raise error

    with pytest.raises(error) as raised:
        trained(on_block=look)
    (note,) = raised.value.__notes__
    assert note.startswith("training ended early: epsilon <= ")
    assert "stopped after 8 of 30 steps" in note


def test_the_unit_is_what_the_data_have():
    def loss_fn(w, user):
        return jnp.square(w - user["x"]).sum()

    algorithm, chosen = dpsgd(loss_fn, optax.sgd(0.1)), mechanism(Shuffle(500, 50))
    users = cap_contributions(np.arange(1000) // 2, 3).of_users({"x": ROWS})
    found = train(algorithm, chosen, jnp.zeros(()), users, audit=False).guarantee
    assert found.unit == "user"
    assert trained().guarantee.unit == "example"


def test_a_unit_that_the_data_do_not_have_is_refused():
    data = np.zeros(1000, np.float32)
    for sampler, message in (
        (UserPoisson(1000, 10, max_contributions=3), "a user may hold"),
        (SAMPLERS["units"], "no units"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            trained(data, sampler)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="delta"):
        trained(delta=0.0)


# --- A whole costs no less than a part of it ------------------------------------------------------


def priced(sampler, sigma, count=0, of_sums=1.5):
    """What a run costs that may end in sums over all rows."""
    sums = FullSums(count, of_sums) if count else None
    return cost([Segment(Mechanism(sampler, sigma, 1.0, full_sums=sums))], DELTA)


def declared(sigma):
    """What a ledger says of a costly whole run, and of a step of a cheap one."""
    found = History(lines={"name": None})
    for index, (each, steps) in enumerate([(sigma, range(30)), (20.0, range(10, 11))]):
        terms = Terms(Segment(mechanism(SAMPLERS["deterministic"], each)), DELTA)
        found.attempts.append(Attempt(index, terms, steps))
    return found.guarantee()


def selected(sigma):
    """What the best of some trials costs, of a costly candidate and a cheap one."""
    both = [mechanism(SAMPLERS["deterministic"], each) for each in (sigma, 9.0)]
    terms = tuple(Terms(Segment(one), DELTA) for one in both)
    how = ({}, {}), "loss", "lower", {}
    return cost([Selection(TrialCount(3.0, 1.0), terms, *how).trials()], DELTA)


def epsilon_is(change):
    """A profile's `epsilon` with another upper end."""

    def wrong(sound):
        def epsilon(self, delta, tolerance=1e-3):
            found = sound(self, delta, tolerance)
            return Bound(0.0, change * found.upper)

        return epsilon

    return wrong


TRUNCATED = Poisson(**SIZES, epochs=3, max_batch_size=150)
COMPOSED_WRONGLY = {
    "k sums cost less than one": (
        lambda: priced(SAMPLERS["deterministic"], 9.0, 4), FullSums, "release",
        lambda sound: lambda self, count: GaussianProfile(self.noise_multiplier * count),
    ),
    "sums are left out": (
        lambda: priced(SAMPLERS["deterministic"], 9.5, 4), Mechanism, "_with_sums",
        lambda sound: lambda self, trained, count=None: trained,
    ),
    "steps are left out": (
        lambda: priced(SAMPLERS["deterministic"], 0.7, 1, 50.0), Mechanism, "_with_sums",
        lambda sound: lambda self, trained, count=None: self.full_sums.release(1),
    ),
    "attempts cost less than one": (
        lambda: declared(2.25), Mechanism, "privacy_of",
        lambda sound: lambda self, ranges, **how: GaussianProfile(100.0),
    ),
    "a selection costs half": (
        lambda: selected(2.5), SelectionProfile, "epsilon", epsilon_is(0.25),
    ),
    "a costly candidate is left out": (
        lambda: selected(0.5), EnvelopeProfile, "epsilon",
        lambda sound: lambda self, *of: min(
            (one.epsilon(*of) for one in self.profiles), key=lambda found: found.upper
        ),
    ),
    "truncation costs less than none": (
        lambda: priced(TRUNCATED, 1.75), Poisson, "with_cuts",
        lambda sound: lambda self, profile: (
            GaussianProfile(60.0) if self.truncates else profile
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("price", "where", "name", "wrong"), COMPOSED_WRONGLY.values(), ids=COMPOSED_WRONGLY
)
def test_a_whole_that_costs_less_than_a_part_is_never_printed(
    price, where, name, wrong, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(where, name, wrong(getattr(where, name)))
        with pytest.raises(ContradictoryBounds, match="on a whole contradicts"):
            price()
    epsilon.cache_clear()
    assert price().epsilon.upper > 0


# --- Of several segments, each counts -------------------------------------------------------------

FLOAT = Mechanism(SAMPLERS["deterministic"], 2.0, 1.0)  # priced at once
CHOSEN = Trials(TrialCount(3.0, 1.0), (Segment(FLOAT),), "loss of validation")
TOLD = {
    "lazy tables": ([Segment(FLOAT, lazy_tables=True), Segment(FLOAT)], True, 0),
    "a selection": ([CHOSEN, Segment(FLOAT)], False, 3),
    "two selections": ([CHOSEN, CHOSEN], False, 3),
    "a lazy segment of no step": (
        [Segment(FLOAT, range(0), lazy_tables=True), Segment(FLOAT)], False, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("segments", "lazy", "left_out"), TOLD.values(), ids=TOLD)
def test_notes_on_tables_and_selections_cover_every_segment(segments, lazy, left_out):
    found = cost(segments, DELTA)
    assert found.lazy_tables == lazy
    assert sum(note.startswith("tables are lazy") for note in found.notes) == lazy
    assert len(found.left_out) == left_out
    assert any(str(CHOSEN) in note for note in found.notes) == bool(left_out)
    assert any("must stay secret" in line for line in found.left_out) == bool(left_out)
    assert any("they are not protected" in line for line in found.left_out) == bool(left_out)


def test_notes_on_earlier_segments_appear_once():
    delta, plain = 0.03, Mechanism(Poisson(20, 10), 2.0, 1.0)
    few = dataclasses.replace(plain, sampler=Poisson(40, 10))
    notes = cost([Segment(few), Segment(plain, range(1)), Segment(few)], delta).notes
    assert sum("delta is not below 1 / 40" in note for note in notes) == 1
    alone = cost([Segment(few, range(1))], delta).notes
    assert set(alone[1:-1]) <= set(cost([Segment(few, range(1)), Segment(plain)], delta).notes)


SEEDED = Segment(FLOAT, reproducible_noise=True)
VOID = {
    "units": ([Segment(FLOAT), Segment(FLOAT, range(0), unit="user")], "protect different units"),
    "a seed": ([SEEDED], "reproducible noise"),
    "a seed of one candidate": (
        [dataclasses.replace(CHOSEN, candidates=(Segment(FLOAT), SEEDED)), Segment(FLOAT)],
        "reproducible noise",
    ),
    "no noise": ([Segment(mechanism(SAMPLERS["poisson"], 0.0), range(0))], "no noise was added"),
    "no noise before": (
        [Segment(mechanism(SAMPLERS["poisson"], 0.0), range(3)), Segment(FLOAT)],
        "no noise was added",
    ),
}


@pytest.mark.parametrize(("segments", "why"), VOID.values(), ids=VOID)
def test_a_last_segment_hides_nothing_that_voids_a_guarantee(segments, why):
    last = segments[-1]
    for steps in (range(0), range(3)):
        found = cost([*segments[:-1], dataclasses.replace(last, steps=steps)], DELTA)
        assert found.epsilon is None
        assert found.sentence().startswith("NO GUARANTEE: ")
        assert why in found.sentence()


# --- No release is left out -----------------------------------------------------------------------

IN_ORDER = [
    Mechanism(SAMPLERS["deterministic"], sigma, clip, full_sums=sums)
    for sigma, clip, sums in [(2.0, 1.0, None), (2.0, 0.5, None), (3.0, 1.0, FullSums(4, 9.0))]
]


def random_run(rng):
    """A finished run of random attempts, some of no step and some of sums over all rows alone."""
    found = History(released="digest", lines={"name": None})
    for index in range(rng.integers(1, 4)):
        mechanism = IN_ORDER[rng.integers(len(IN_ORDER))]
        first = [0, 30, rng.integers(30)][rng.integers(3)]
        steps = range(first, rng.integers(first, mechanism.num_steps + 1))
        terms = Terms(Segment(mechanism), DELTA)
        found.attempts.append(Attempt(index, terms, steps))
    return found


def precision_of(runs):
    """The square of 1 / sigma of all releases together, of the example of which most is told."""
    found = np.zeros(10)
    for attempt in (each for run in runs for each in run.attempts):
        mechanism = attempt.terms.mechanism
        for step in attempt.steps:
            if step < 30:
                found[step % 10] += mechanism.noise_multiplier**-2
            else:
                found += mechanism.full_sums.noise_multiplier**-2
    return found.max()


def test_every_release_of_every_attempt_and_run_is_counted():
    rng = np.random.default_rng(0)
    for _ in range(100):
        *earlier, last = runs = [random_run(rng) for _ in range(rng.integers(1, 3))]
        found, precision = last.guarantee(*earlier), precision_of(runs)
        epsilon = GaussianProfile(precision**-0.5).epsilon(DELTA).lower if precision else 0
        assert found.epsilon.upper >= epsilon
        assert found.attack_advantage.upper >= math.erf(math.sqrt(precision / 8))


def test_a_sum_of_costs_is_never_rounded_down():
    sampler = SAMPLERS["deterministic"]
    for sigma in np.linspace(2.0, 3.0, 12):
        runs = [mechanism(sampler, float(sigma)), mechanism(sampler, 4.0)]
        exact = sum(Fraction(run.privacy().epsilon(DELTA / 2).upper) for run in runs)
        assert cost([*map(Segment, runs)], DELTA).epsilon.upper >= exact


@pytest.mark.short("stops0")
@pytest.mark.parametrize("stops", [(376, 312), (500, 470), (200, 100)])
def test_interrupted_epoch_has_two_prices_and_lower_ends(stops):
    sampler = BallsAndBins(62_500, 100, overflow="accumulate")  # 625 steps
    of = Mechanism(sampler, 0.5, 1.0)
    stop, start = stops
    guarantee = cost([Segment(of, range(stop)), Segment(of, range(start, 625))], 1e-5)
    whole, twice = (epsilon(sampler.with_epochs(n).privacy(0.5), 1e-5) for n in (1, 2))
    assert whole.upper < guarantee.epsilon.lower <= guarantee.epsilon.upper <= 3.80
    assert guarantee.otherwise.upper == twice.upper
    assert (
        f"epsilon <= {guarantee.epsilon.format_upper()} if interruptions did not depend on what "
        f"the run had released; otherwise <= {twice.format_upper()}, for at most 2 attempts, at "
    ) in guarantee.sentence()
    assert "; if they did not, certified: epsilon in [" in guarantee.sentence()
    record = guarantee.record()
    assert record["epsilon_upper_otherwise"] == twice.upper
    assert record["epsilon_lower"] == guarantee.epsilon.lower


def test_interruption_at_equal_rows_in_known_order_costs_nothing():
    of = Mechanism(Deterministic(6_250, 10, epochs=2), 2.0, 1.0)
    attempts = [range(700), range(700, 1_250)]
    alone = epsilon(of.privacy(), DELTA)
    assert (
        cost([Segment(of, one, rows="a") for one in attempts], DELTA).epsilon.upper == alone.upper
    )
    for rows in ("", "a"), ("", ""), ("b", "a"):  # an example may have moved
        parts = [
            Segment(of, one, rows=of_rows) for one, of_rows in zip(attempts, rows, strict=True)
        ]
        assert cost(parts, DELTA).epsilon.upper > 1.2 * alone.upper


@pytest.mark.long
def test_limits_of_adaptive_interruptions_count_epochs_and_steps():
    ranges = [range(30), range(25, 60)]
    for sampler, limits in (
        (Poisson(2_000, 100, 3), "at most 2 attempts of 65 steps in all"),
        (BallsAndBins(2_000, 100, 3), "at most 2 attempts of 4 epochs in all"),
        (Poisson(2_000, 100, 3, cycle_length=4), "at most 2 attempts of 4 epochs in all"),
        (
            BallsAndBins(2_000, 100, 3, assignment="fixed"),
            "at most 2 attempts of 6 epochs in all",
        ),
    ):
        of = Mechanism(sampler, 1.0, 1.0)
        guarantee = cost([Segment(of, steps) for steps in ranges], DELTA)
        assert guarantee.limits == limits
        assert guarantee.otherwise.upper >= guarantee.epsilon.upper
        assert cost([Segment(of)], DELTA).otherwise is None
        twice = cost([Segment(of), Segment(of)], DELTA)
        assert twice.otherwise.upper == twice.epsilon.upper
        assert f"epsilon <= {twice.epsilon.format_upper()}, for at most 2 att" in twice.sentence()
    of = Mechanism(BallsAndBins(2_000, 100), 1.0, 1.0, full_sums=FullSums(2, 9.0, 1.0))
    limits = cost([Segment(of), Segment(of, range(15, 22))], DELTA).limits
    assert limits == "at most 2 attempts of 2 epochs and 4 sums over all rows in all"
