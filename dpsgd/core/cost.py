"""`cost`: the only function that prices a run, with all its attempts.

The proofs are in docs/explanation/privacy-cost-of-several-attempts.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from accounting import Bound, PrivacyProfile, attack_advantage, epsilon
from dpsgd.core.guarantee import UNKNOWN, Guarantee
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.segments import Initial, Part, Segment, Trials, check_together
from samplers.base import BatchSampler, stated_law
from samplers.settings import SAMPLERS

_T = TypeVar("_T")

_COARSE = 0.25  # of an epsilon, a width at which nothing takes long

LAZY_TABLES = (
    "tables are lazy: a row got the noise of the steps in which no batch read it when it was next "
    "read, or before it was released, with the law of noise that comes at once and so the same "
    "privacy cost; training states before that noise is drawn are not covered: keep them secret"
)
"""Note on tables with deferred noise (`dpsgd.engine.lazy.group`)."""

WARM_START = (
    "training started from a trained model. A unit with rows in both runs pays for both, also if "
    "its rows differ; choosing the initial model by private rows is not covered"
)
"""Note on runs that started from a trained model (`dpsgd.runs.initial`)."""


def cost(segments: Sequence[Part], delta: float) -> Guarantee:
    """Returns the joint guarantee of everything that the segments released.

    A complete run's guarantee is its epsilon interval. Other runs have further numbers:

    * The *interval* is the cost of a run that stops here for reasons independent of its releases: a
      plan, a clock, a machine that dies.
    * Several attempts have a second number, `otherwise`, which holds if interruptions depended on
      releases: each attempt then counts the steps, or the complete epochs, that it entered, and
      `Guarantee.limits` states their largest numbers.
    * A stop decided by looking at the model, at a loss of public rows, or at other functions of the
      releases costs the same as the *whole run*, which the notes name: the releases are a function
      of the whole run's. A planned budget is thus a privacy filter, and the intervals, read one
      after another, are not an odometer. Neither number covers decisions by private rows, training
      rows without noise included.

    >>> from samplers import Poisson
    >>> mechanism = Mechanism(Poisson(10_000, batch_size=100), 1.0, l2_clip_norm=1.0)
    >>> print(f"{cost([Segment(mechanism)], delta=1e-5).epsilon:.2f}")
    [0.71, 0.72]

    Args:
      segments: Attempts of a run in their order, each with its own keys, or a selection. At least
        one; the last states the plan.
      delta: Probability delta of the guarantee, in (0, 0.1).

    Raises:
      TypeError: If `segments` are others.
      ValueError: If `delta` is not in (0, 0.1), or the privacy profile of a sampler is not proved.
      ContradictoryBounds: If the whole were to cost less than a part of it.

    Source: Y. Zhu, J. Dong, Y.-X. Wang, Optimal Accounting of Differential Privacy via
    Characteristic Function (2022), on the adaptive composition of dominating pairs; C. Dwork et
    al., Our Data, Ourselves (2006), Theorem 1, on basic composition; R. Rogers et al., Privacy
    Odometers and Filters (2016); N. Papernot, T. Steinke (2022) on selection, see
    `accounting.SelectionProfile`.
    """
    listed = isinstance(segments, Sequence) and len(segments) > 0
    if not (listed and all(isinstance(piece, Part) for piece in segments)):
        raise TypeError(
            "segments must be a list of dpsgd.Segment, such as [Segment(mechanism)], got "
            f"{segments!r:.60}"
        )
    *earlier, last = segments
    pieces = tuple(piece for piece in segments if piece.steps or piece is last)
    taken = _anonymous(piece for piece in segments if piece.steps)
    planned = _anonymous(piece for piece in (*earlier, last.planned()) if piece.steps)
    initials = tuple(dict.fromkeys(piece.initial for piece in pieces if piece.initial))
    trained = [*pieces, *(segment for initial in initials for segment in initial.segments)]
    guarantee = Guarantee(
        epsilon=None,
        delta=delta,
        mechanism=last.mechanism,
        unit=last.unit,
        lazy_tables=any(piece.lazy_tables for piece in pieces),
        scope=_scope(taken, planned),
        void=_void(taken, last),
        left_out=_left_out(pieces),
        initial_names=tuple(initial.name for initial in initials),
        by_task=tuple(dict.fromkeys(text for piece in trained for text in piece.not_covered)),
    )
    if guarantee.void:
        return guarantee
    interval = _epsilon(taken, delta)
    otherwise, limits = _otherwise(taken, delta)
    notes = [*filter(None, [interval.note]), *_caveats(pieces, delta)]
    if any(piece.mechanism != planned[0].mechanism for piece in planned[1:]):
        notes.append(
            "the mechanism was changed between steps, and this is a guarantee only if no change "
            "was decided by looking at what was released or written before (parameters, metrics, "
            "losses or other diagnostics)"
        )
    if guarantee.scope and not isinstance(last, Trials):
        of_plan = "none" if _void(planned, last) else _epsilon(planned, delta)
        notes.append(
            "this is the privacy cost if the run stops here for reasons that do not depend on what "
            "it released; a stop decided by looking at the model costs what the whole run costs "
            f"(epsilon in {of_plan}), and one decided by losses or other diagnostics is not covered"
        )
    if guarantee.lazy_tables:
        notes.append(LAZY_TABLES)
    if initials:
        notes.append(WARM_START)
    return dataclasses.replace(
        guarantee,
        epsilon=interval,
        otherwise=otherwise,
        limits=limits,
        total_variation=_total_variation(taken),
        notes=tuple(notes),
        together=_together(initials, segments, delta),
    )


def _otherwise(taken: Sequence[Part], delta: float) -> tuple[Bound | None, str]:
    """Returns the cost if interruptions depended on releases, and the limits that it needs.

    None for one attempt, or if a selection is among them.
    """
    attempts = [piece for piece in taken if isinstance(piece, Segment)]
    if len(attempts) < max(2, len(taken)):
        return None, ""
    entered = tuple(piece.entered for piece in attempts)
    counts: dict[str, int] = {}
    for piece in entered:
        sampler = piece.mechanism.sampler
        by_step = sampler.as_entered([range(1)]) == [[range(1)]]
        steps = len(range(piece.steps.start, min(piece.steps.stop, sampler.num_steps)))
        unit = "steps" if by_step else "epochs"
        counts[unit] = counts.get(unit, 0) + (
            steps if by_step else steps // sampler.steps_per_epoch
        )
        if sums := len(range(max(piece.steps.start, sampler.num_steps), piece.steps.stop)):
            counts["sums over all rows"] = counts.get("sums over all rows", 0) + sums
    limits = f"at most {len(attempts)} attempts"
    if counts != {"epochs": len(attempts)}:
        limits += f" of {' and '.join(f'{n:,} {unit}' for unit, n in counts.items())} in all"
    return _epsilon(entered, delta), limits


def _together(
    initials: Sequence[Initial], segments: Sequence[Part], delta: float
) -> Guarantee | None:
    """Returns the joint guarantee of a run and its initial models', or None if unknown."""
    if not initials or not all(initial.segments for initial in initials):
        return None
    earlier = [segment for initial in initials for segment in initial.segments]
    pieces = [*earlier, *map(without_initial, segments)]
    try:
        check_together(pieces)
    except ValueError:
        return None
    return cost(pieces, delta)


def without_initial(part: Part) -> Part:
    """Returns a segment or selection without its initial model."""
    return part if part.initial is None else dataclasses.replace(part, initial=None)


def _anonymous(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Returns what the cost depends on, equal for equal runs on any rows.

    Initial models are left out. Digests of rows are numbered, as the cost depends on their equality
    alone; a complete run's depends on none.
    """
    pieces, numbers = [*map(without_initial, parts)], {"": ""}
    for i, piece in enumerate(pieces):
        if isinstance(piece, Segment):
            number = numbers.setdefault(piece.rows, str(len(numbers)))
            alone = len(pieces) == 1 and piece.complete
            pieces[i] = dataclasses.replace(piece, rows="" if alone else number)
    return tuple(pieces)


def _left_out(parts: Sequence[Part]) -> tuple[str, ...]:
    lines = (
        line
        for piece in parts
        if isinstance(piece, Trials)
        for line in (
            "how long the selection took, and what else its machine shows of it (processes, disk "
            "use, numbers of files), which tells of the number of trials: that number must stay "
            "secret",
            f"the rows of {piece.score}, which chose the best trial: they are not protected",
            "whatever lay in the folder of the selection before it was released",
        )
    )
    return tuple(dict.fromkeys(lines))


def _void(taken: Sequence[Part], last: Part) -> str:
    """Returns why nothing is guaranteed, or an empty text."""
    if len({piece.unit for piece in (*taken, last)}) > 1:
        return "the attempts of this run protect different units"
    pieces = taken or (last,)
    if any(mechanism.noise_multiplier == 0 for piece in pieces for mechanism in piece.mechanisms):
        return "no noise was added"
    if any(piece.reproducible_noise for piece in pieces):
        return "reproducible noise: whoever guesses the seed can subtract it"
    return ""


def _scope(taken: Sequence[Part], planned: Sequence[Part]) -> str:
    if planned and isinstance(last := planned[-1], Trials):
        return "the best of a secret number of trials"
    if [piece.steps for piece in taken] == [piece.steps for piece in planned]:
        return ""
    if len(planned) > 1 or last.steps.start:
        return "the steps declared so far, if no release decides to stop there"
    done_steps, all_steps = sum(len(piece.steps) for piece in taken), len(last.steps)
    return f"the first {done_steps:,} of {all_steps:,} steps, if no release decides to stop there"


def _once(compute: Callable[..., _T]) -> Callable[..., _T]:
    """Returns `compute` with a cache for hashable terms."""
    remembered = functools.lru_cache(maxsize=256)(compute)

    @functools.wraps(compute)
    def cached(*terms: Any) -> _T:
        """Returns `compute(*terms)`, remembered if the terms are hashable."""
        try:
            hash(terms)
        except TypeError:  # a sampler from elsewhere may hold arrays
            return compute(*terms)
        return remembered(*terms)

    return cached


@_once
def _sampler_caveats(sampler: BatchSampler, sigma: float, delta: float) -> tuple[str, ...]:
    return sampler.caveats(sigma, delta)


def _caveats(parts: Sequence[Part], delta: float) -> list[str]:
    """Returns the notes on the samplers and queries of all segments, without repeats."""
    unique: list[str] = []
    for piece, mechanism in [(p, mechanism) for p in parts for mechanism in p.mechanisms]:
        sampler, sums = mechanism.sampler, mechanism.full_sums
        notes = [*_sampler_caveats(sampler, mechanism.noise_multiplier, delta)]
        if delta >= 1 / sampler.num_units:
            notes.append(
                f"delta is not below 1 / {sampler.num_units:,}, one over the number of protected "
                "units: publishing one random unit would satisfy it; use a smaller delta"
            )
        if stated_law(sampler) is None:
            notes.append(
                f"the sampler {SAMPLERS.name_of(type(sampler))} is not audited: it states no law "
                "of its draws (row_law) to compare them with"
            )
        if sums is not None:
            notes.append(
                f"the run ends in {sums}, such as those of a calibration: they are counted as its "
                f"last {sums.count} of {mechanism.num_steps:,} steps"
            )
        prefix = "of one trial: " if isinstance(piece, Trials) else ""
        unique += [prefix + note for note in notes]
    return list(dict.fromkeys(unique))


@_once
def _epsilon(taken: Sequence[Part], delta: float) -> Bound:
    """Bounds epsilon of the segments, and checks it against each complete run among them."""
    if not taken:
        return Bound(0.0, 0.0, note="no step was declared: nothing was released")
    profiles = _profiles(taken)
    bounds = [epsilon(profile, delta / len(profiles)) for profile in profiles]
    if estimated := [bound for bound in bounds if bound.confidence < 1]:
        raise ValueError(
            f"epsilon {estimated[0]} holds only with confidence {estimated[0].confidence}: an "
            "estimate is not a guarantee"
        )
    complete = [mechanism for piece in taken if piece.complete for mechanism in piece.mechanisms]
    part_bounds = [bound for mechanism in complete for bound in mechanism.parts(delta)]
    lower = 0.0
    if not any(isinstance(piece, Trials) for piece in taken):
        # Of one kind alone, at the whole delta: together they cost no less.
        kinds = bounds if len(bounds) == 1 else [p.epsilon(delta, _COARSE) for p in profiles]
        lower = max(bound.lower for bound in kinds)
    return _total(taken, bounds, lower, _note_on(taken, bounds)).covering(part_bounds)


@_once
def _total_variation(taken: Sequence[Part]) -> Bound:
    """Bounds the total variation distance delta(0) of the segments."""
    if not taken:
        return Bound(0.0, 0.0)
    bounds = [attack_advantage(profile) for profile in _profiles(taken)]
    if any(bound.confidence < 1 for bound in bounds):
        return UNKNOWN
    trials = any(isinstance(piece, Trials) for piece in taken)
    lower = 0.0 if trials else max(bound.lower for bound in bounds)
    total = _total(taken, bounds, lower, "")
    return total if total.upper <= 1 else Bound(min(total.lower, 1.0), 1.0)


def _profiles(taken: Sequence[Part]) -> list[PrivacyProfile]:
    """Returns one profile for all segments that differ only in clipping norm and store.

    Given all earlier releases, a segment is part of a run of its mechanism with a fresh seed and
    fresh noise: the sampler bounds several of them together (`BatchSampler.privacy_of`).
    """
    if len(taken) == 1 and isinstance(taken[0], Segment) and taken[0].complete:
        return [taken[0].mechanism.privacy()]
    kinds: list[tuple[Mechanism, list[Segment]]] = []
    for piece in taken:
        if isinstance(piece, Trials) or not piece.steps:
            continue
        for kind, pieces in kinds:
            if dataclasses.replace(piece.mechanism, l2_clip_norm=kind.l2_clip_norm) == kind:
                pieces.append(piece)
                break
        else:
            kinds.append((piece.mechanism, [piece]))
    return [
        *(
            mechanism.privacy_of([piece.steps for piece in pieces], same_rows=_same_rows(pieces))
            for mechanism, pieces in kinds
        ),
        *(piece.profile for piece in taken if isinstance(piece, Trials)),
    ]


def _same_rows(pieces: Sequence[Segment]) -> bool:
    """Returns whether all segments are known to be of the same rows."""
    return pieces[0].rows != "" and len({piece.rows for piece in pieces}) == 1


def _total(taken: Sequence[Part], bounds: Sequence[Bound], lower: float, note: str) -> Bound:
    """Bounds a sum of costs from above, and from below by a part's proved cost."""
    if len(taken) == 1 and isinstance(taken[0], Segment) and taken[0].complete:
        return bounds[0]
    total = math.fsum(bound.upper for bound in bounds)  # of one number: that number
    upper = total if len(bounds) == 1 else math.nextafter(total, math.inf)
    return Bound(min(lower, upper), upper, note=note)


def _note_on(taken: Sequence[Part], bounds: Sequence[Bound]) -> str:
    if isinstance(taken[-1], Trials):
        return (
            f"this is the privacy cost of the whole selection: {taken[-1]}; one trial would cost "
            "less, and this model is not one trial: it was chosen. The noise multiplier and the "
            "clipping norm are those of its trial. No lower end is computed"
        )
    note = f"counted as declared ({'; '.join(map(_declared, taken))})"
    return "; ".join([*dict.fromkeys(bound.note for bound in bounds if bound.note), note])


def _declared(part: Part) -> str:
    if isinstance(part, Trials):
        return str(part)
    if not part.steps:
        return "no step"
    first, last = part.steps.start, part.steps.stop - 1
    return f"steps {first:,} to {last:,} of {part.mechanism.num_steps:,}"
