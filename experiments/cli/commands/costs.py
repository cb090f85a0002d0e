"""`dpsgd ledger`, `epsilon`, `calibrate` and `compare`: privacy costs of runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accounting import Bound, TrialCount
from accounting.conversions import compare_with_peer, to_dp_event
from accounting.profile import format_delta
from dpsgd import Segment, Trials, cost
from dpsgd.core.guarantee import Guarantee
from dpsgd.core.noise import Noise
from dpsgd.noise.registry import NOISES
from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.history import History
from dpsgd.runs.mechanism import resolved
from experiments.cli.console import Console, counted, going_on
from experiments.cli.questions.about_runs import OfSizes
from experiments.cli.questions.costs import Calibrate, Compare, Epsilon
from experiments.cli.questions.directories import Ledger
from experiments.papers import episodic
from samplers import BatchSampler, Multistage
from samplers.settings import SAMPLERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _segment(question: OfSizes) -> tuple[Segment, float]:
    """Returns the releases of a planned run, and delta; any clipping norm costs the same."""
    population = question.population()
    run = resolved(question.spec.but(l2_clip_norm=1.0), population)
    sampler = run.mechanism.sampler
    _check_prices(run.mechanism.noise, [(sampler, run.mechanism.noise_multiplier)], run.delta)
    return Segment(run.mechanism, unit=sampler.protected_unit(population)), run.delta


def _check_prices(noise: Noise, runs: list[tuple[BatchSampler, float]], delta: float) -> None:
    """Raises ValueError if own parts state less than their cost, as the audit of a run does."""
    if not (NOISES.is_own(noise) or any(SAMPLERS.is_own(sampler) for sampler, _ in runs)):
        return
    from dpsgd.audit.prices import own_price_checks  # imports JAX
    from dpsgd.audit.report import AuditReport

    AuditReport(tuple(own_price_checks(noise, runs, delta))).require_passed()


def epsilon(question: Epsilon) -> None:
    """Prints the certified epsilon of a run or private search."""
    with going_on("accounting"):
        segment, delta = _segment(question)
        if question.peer is not None:
            profile = segment.mechanism.privacy()
            try:
                to_dp_event(profile)
            except ValueError:
                raise ValueError(
                    f"--peer: dp_accounting has no event for sampler:{question.spec.sampler.name} "
                    "with these options, only for independent noise on batches of poisson, "
                    "user-poisson and deterministic"
                ) from None
        guarantee = cost([segment], delta)
    print(guarantee.sentence())
    for note in guarantee.notes:
        print(f"note: {note}")
    mechanism = segment.mechanism
    if question.peer is not None:
        with going_on("accounting by dp_accounting"):
            line = compare_with_peer(mechanism.privacy(), delta)
        print(line)
    if isinstance(sampler := mechanism.sampler, Multistage):
        with going_on("accounting for alternatives"):
            sizes = sampler.steps, sampler.draws, question.sizes
            alternatives = episodic.compare(mechanism.noise_multiplier, *sizes, delta)
        print("at equal noise, protecting one example:")
        for name, bound in alternatives.items():
            print(f"  {name}: {bound}")
    if question.mean_trials is not None:
        count = TrialCount(question.mean_trials, question.trials_shape)
        with going_on("accounting for the search"):
            best = cost([Trials(count, (segment,), "any score")], delta)
        print(
            f"the best of {count.mean:g} such runs on average (negative binomial, shape "
            f"{count.shape:g}; nothing else released): {best.sentence()}"
        )


def calibrate(question: Calibrate) -> None:
    """Prints the smallest noise multiplier that certifies the wanted epsilon."""
    with going_on("calibrating"):
        segment, delta = _segment(question)
        guarantee = cost([segment], delta)
    sigma, sums = segment.mechanism.noise_multiplier, segment.mechanism.full_sums
    rounded = Bound(sigma, sigma).format_upper(".6g")  # rounded up: suffices as it is printed
    then = "" if sums is None else f", then {sums},"
    print(f"noise multiplier {rounded}{then} gives {guarantee.sentence()}")


def compare(question: Compare) -> None:
    """Prints and draws certified epsilons of all samplers over noise."""
    from experiments.figures import comparison  # other costs need no matplotlib
    from experiments.figures.drawing import save
    from experiments.results.points import pivot

    sizes, delta = (question.rows, question.batch_size, question.epochs), question.delta
    noise = question.spec.noise
    assert isinstance(noise, Noise), "compare offers no bands"
    samplers = comparison.all_samplers(*sizes, question.sampler, noise)
    equal_privacy = bool(question.target_epsilon)
    with Console() as console:
        profiles = {name: partial(noise.privacy, sampler) for name, sampler in samplers.items()}
        bounds: Callable[..., list[dict[str, Any]]]
        if equal_privacy:
            measure, corner = "smallest noise multiplier", "epsilon"
            xs, bounds = question.target_epsilon, comparison.noise_multipliers
        else:
            measure, corner = "epsilon", "sigma"
            xs, bounds = question.noise_multiplier, comparison.epsilons
        points = comparison.curves(profiles, xs, delta, console.progress, bounds)
        sigma = "upper" if equal_privacy else "x"
        pairs = [(samplers[row["curve"]], row[sigma]) for row in points.to_dicts()]
        _check_prices(noise, pairs, delta)
        terms = f"at delta {format_delta(delta)} ({comparison.TERMS})"
        console.line(f"{measure} [lower, upper] {terms}")
        console.table(*pivot(points.to_dicts(), corner=corner))
        title = "n = {:,}, b = {:,}, E = {:,}, δ = {}".format(*sizes, format_delta(delta))
        if question.train is not None:
            figure = _trained(question, console, samplers, points, title)
        elif question.plot is not None:
            figure = comparison.draw(points, title, equal_privacy=equal_privacy)
        if question.plot is not None:
            save(figure, question.plot)
            console.line(f"drawn: {question.plot}")


def _trained(question: Compare, console: Console, samplers: Any, points: Any, title: str) -> Figure:
    """Trains and prints the compared samplers; returns the figure of their metric."""
    from experiments.cli.commands.results import show_sweep
    from experiments.figures.comparison import sampler_entries, sweep_file
    from experiments.results.draw import draw
    from experiments.results.views import CERTIFIED, View
    from experiments.sweeps import engine
    from experiments.sweeps.config import Sweep

    store, out = question.train, question.out
    assert store is not None, "checked"
    assert out is not None, "checked"
    axis = "target_epsilon" if question.target_epsilon else "noise_multiplier"
    grid = {
        axis: getattr(question, axis),
        "sampler": sampler_entries(samplers),
        "batch_size": question.batch_size,
        "epochs": question.epochs,
        **{option: [value] for option, value in question.run_settings.items()},
    }
    content = sweep_file(store, points, grid, question.delta, question.repetitions)
    sweep = Sweep.parse(content, "compare")
    options: Any = {"where": "compare", "progress": console.progress}
    summary = engine.run_sweep(sweep, store, out, **options)
    console.line("")
    show_sweep(console, summary, out, content)
    views = [*summary.views]
    if axis == "noise_multiplier":  # the cost of shuffling is a band of epsilon
        views.append(View(summary.table, CERTIFIED, summary.headline))
    return draw(views, title)


def ledger(config: Ledger) -> None:
    """Prints the releases of a run, and their cost."""
    history = _history(config.run)
    earlier = [_history(path) for path in config.earlier]
    if history.selection is not None and not history.attempts:
        print("nothing is released yet; the guarantee below covers all that will be")
    for attempt in history.attempts:
        mechanism, steps = attempt.terms.mechanism, attempt.steps
        print(
            f"attempt {attempt.index}: {counted(len(steps), 'step')} from {steps.start:,} "
            f"declared of {mechanism.num_steps:,}; noise multiplier "
            f"{mechanism.noise_multiplier:.6g}; {mechanism.sampler}"
        )
    if history.audit:
        print(f"audit: {history.audit}")
    if history.released:
        print(f"released: parameters with the SHA-256 {history.released}")
    with going_on("accounting"):
        guarantee = history.guarantee()
    for note in filter(None, guarantee.notes):
        print(f"note: {note}")
    print(guarantee.sentence())
    if earlier:
        with going_on("accounting"):
            joint = history.guarantee(*earlier)
            alone = [guarantee, *(run_history.guarantee() for run_history in earlier)]
        for note in filter(None, joint.notes):
            print(f"note on all {len(earlier) + 1} runs: {note}")
        print(f"for a unit with rows in one of the runs alone: {_largest(alone, joint)}")
        print(f"for a unit with rows in all {len(earlier) + 1} runs: {joint.sentence()}")
        print(
            "not checked: which runs have rows of a unit; even runs on disjoint rows may share a "
            "person. Choosing among the runs by private rows is not covered"
        )


def _largest(guarantees: list[Guarantee], together: Guarantee) -> str:
    """Returns the guarantee that each of several runs gives, in words.

    Args:
      guarantees: Guarantee of each run.
      together: Joint guarantee, which names initial models that none of the runs trained.
    """
    if void := [
        guarantee
        for guarantee in guarantees
        if guarantee.epsilon is None or isinf(guarantee.epsilon.upper)
    ]:
        return f"{void[0].sentence()} (of one of the runs)"
    upper = max(guarantee.epsilon.upper for guarantee in guarantees if guarantee.epsilon)
    delta = max(guarantee.delta for guarantee in guarantees)
    stated = f"epsilon <= {Bound(0.0, upper).format_upper()} at delta {format_delta(delta)}"
    if any(guarantee.otherwise for guarantee in guarantees):
        most = max(
            bound.upper
            for guarantee in guarantees
            if (bound := guarantee.otherwise or guarantee.epsilon)
        )
        if most > upper:
            stated += " if interruptions did not depend on what the runs had released; otherwise "
            stated += f"<= {Bound(0.0, most).format_upper()}"
        stated += ", for as many attempts, epochs and steps"
    rows = ", for rows that trained no initial model" if together.initial_names else ""
    return f"{stated}, the largest of the runs{rows}"


def _history(path: Path) -> History:
    folder = RunDirectory(path)
    if not folder.ledger_path.is_file():
        folder = RunDirectory.open(path, finished=False)
    return folder.history()
