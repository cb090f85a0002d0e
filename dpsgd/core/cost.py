"""`cost`: what a run costs, however it was put together; nothing else prices anything.

The proofs are in docs/explanation/privacy-cost-of-several-attempts.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from accounting import Bound, PrivacyProfile, attack_advantage, epsilon
from dpsgd.core.guarantee import UNKNOWN, Guarantee
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.segments import Initial, Part, Segment, Trials, check_together
from samplers.base import BatchSampler, stated_law
from samplers.settings import name_of

_T = TypeVar("_T")

LAZY_TABLES = (
    "tables are lazy: a row got the noise of the steps in which no batch read it when it was next "
    "read, or before it was released, with the law of noise that comes at once and so the same "
    "privacy cost; training states before that noise is drawn are not covered: keep them secret"
)
"""What a reader should know of tables with deferred noise (`dpsgd.engine.lazy.group`)."""

WARM_START = (
    "training started from a trained model. A unit with rows in both runs pays for both, also if "
    "its rows differ; choosing the initial model by private rows is not covered"
)
"""Note on runs that started from a trained model (`dpsgd.runs.initial`)."""


def cost(segments: Sequence[Part], delta: float) -> Guarantee:
    """Returns the guarantee of all that the segments released together.

    For a run that is whole this is the guarantee. Of a run that is not, it holds two numbers, of
    which each covers something else:

    * The *interval* is the cost of a run that stops here for reasons in which no release has a
      part: a plan, a clock, a machine that dies.
    * For a stop that is decided by looking at the model, at a loss of public rows, or at other
      functions of the releases, it is none: that step was chosen among many, perhaps as the one
      that tells most about somebody. What holds then, whatever the rule, is the cost of the *whole
      run*, which the notes name: wherever it stops, all that is known is a function of the releases
      that the whole run would have made. So a planned budget is a privacy filter, and these
      intervals, read one after another, are not an odometer. Decisions by private rows, training
      rows without noise among them, are covered by neither.

    >>> from samplers import Poisson
    >>> mechanism = Mechanism(Poisson(10_000, batch_size=100), 1.0, l2_clip_norm=1.0)
    >>> print(f"{cost([Segment(mechanism)], delta=1e-5).epsilon:.2f}")
    [0.71, 0.72]

    Args:
      segments: In the order in which they ran: the attempts of a run, of which each has keys of its
        own, or a selection. At least one; the last one says what was planned.
      delta: Of the guarantee, in (0, 0.1).

    Raises:
      ValueError: if `delta` is not in (0, 0.1), or the privacy profile of a sampler is not proved.
      ContradictoryBounds: if the whole were to cost less than a part of it.

    Source: Y. Zhu, J. Dong, Y.-X. Wang, Optimal Accounting of Differential Privacy via
    Characteristic Function (2022), on the adaptive composition of dominating pairs; C. Dwork et
    al., Our Data, Ourselves (2006), Theorem 1, on basic composition; R. Rogers et al., Privacy
    Odometers and Filters (2016); N. Papernot, T. Steinke (2022) on selection, see
    `accounting.SelectionProfile`.
    """
    *before, last = segments
    told = tuple(part for part in segments if part.steps or part is last)
    taken = tuple(without_initial(part) for part in segments if part.steps)
    planned = tuple(without_initial(part) for part in (*before, last.planned()) if part.steps)
    whole = Guarantee(
        epsilon=None,
        delta=delta,
        mechanism=last.mechanism,
        unit=last.unit,
        lazy_tables=any(part.lazy_tables for part in told),
        scope=_scope(taken, planned),
        void=_void(taken, last),
        left_out=_left_out(told),
        by_task=tuple(dict.fromkeys(text for part in told for text in part.not_covered)),
    )
    if whole.void:
        return whole
    interval = _epsilon(taken, delta)
    notes = [*filter(None, [interval.note]), *_caveats(told, delta)]
    if any(part.mechanism != planned[0].mechanism for part in planned[1:]):
        notes.append(
            "the mechanism was changed between steps, and this is a guarantee only if no change "
            "was decided by looking at what was released or written before (parameters, metrics, "
            "losses or other diagnostics)"
        )
    if whole.scope and not isinstance(last, Trials):
        of_all = "none" if _void(planned, last) else _epsilon(planned, delta)
        notes.append(
            "this is the privacy cost if the run stops here for reasons that do not depend on what "
            "it released; a stop decided by looking at the model costs what the whole run costs "
            f"(epsilon in {of_all}), and one decided by losses or other diagnostics is not covered"
        )
    if whole.lazy_tables:
        notes.append(LAZY_TABLES)
    initials = tuple(dict.fromkeys(part.initial for part in told if part.initial))
    if initials:
        notes.append(WARM_START)
    return dataclasses.replace(
        whole,
        epsilon=interval,
        total_variation=_total_variation(taken),
        notes=tuple(notes),
        initial_names=tuple(initial.name for initial in initials),
        together=_together(initials, segments, delta),
    )


def _together(
    initials: Sequence[Initial], segments: Sequence[Part], delta: float
) -> Guarantee | None:
    """Returns the guarantee of a run and of the runs before it, or None if it is not known."""
    if not initials or not all(initial.segments for initial in initials):
        return None
    before = [segment for initial in initials for segment in initial.segments]
    parts = [*before, *map(without_initial, segments)]
    try:
        check_together(parts)
    except ValueError:
        return None
    return cost(parts, delta)


def without_initial(part: Part) -> Part:
    """Returns a part as that of a run from fresh parameters."""
    return part if part.initial is None else dataclasses.replace(part, initial=None)


def _left_out(parts: Sequence[Part]) -> tuple[str, ...]:
    found = (
        line
        for part in parts
        if isinstance(part, Trials)
        for line in (
            "how long the selection took, and what else its machine shows of it (processes, disk "
            "use, numbers of files), which tells of the number of trials: that number must stay "
            "secret",
            f"the rows of {part.score}, by which the best trial was chosen: they are not protected",
            "whatever lay in the folder of the selection before it was released",
        )
    )
    return tuple(dict.fromkeys(found))


def _void(taken: Sequence[Part], last: Part) -> str:
    """Returns why nothing is guaranteed, or an empty text."""
    if len({part.unit for part in (*taken, last)}) > 1:
        return "the attempts of this run protect different units"
    parts = taken or (last,)
    if any(one.noise_multiplier == 0 for part in parts for one in part.mechanisms):
        return "no noise was added"
    if any(part.reproducible_noise for part in parts):
        return "reproducible noise: whoever guesses the seed can subtract it"
    return ""


def _scope(taken: Sequence[Part], planned: Sequence[Part]) -> str:
    if planned and isinstance(last := planned[-1], Trials):
        return "the best of a secret number of trials"
    if [part.steps for part in taken] == [part.steps for part in planned]:
        return ""
    if len(planned) > 1 or last.steps.start:
        return "the steps declared so far, if no release decides to stop there"
    done, whole = sum(len(part.steps) for part in taken), len(last.steps)
    return f"the first {done:,} of {whole:,} steps, if no release decides to stop there"


def _once(compute: Callable[..., _T]) -> Callable[..., _T]:
    """Returns `compute`, which computes once of equal terms, however often it is asked."""
    remembered = functools.lru_cache(maxsize=256)(compute)

    @functools.wraps(compute)
    def found(*terms: Any) -> _T:
        try:
            hash(terms)
        except TypeError:  # a sampler from elsewhere may hold arrays
            return compute(*terms)
        return remembered(*terms)

    return found


@_once
def _of_sampler(sampler: BatchSampler, noise_multiplier: float, delta: float) -> tuple[str, ...]:
    return sampler.caveats(noise_multiplier, delta)


def _caveats(parts: Sequence[Part], delta: float) -> list[str]:
    """Returns what a reader should know of the samplers and queries of all segments, once each."""
    found: list[str] = []
    for part, mechanism in [(kind, one) for kind in parts for one in kind.mechanisms]:
        sampler, sums = mechanism.sampler, mechanism.full_sums
        notes = [*_of_sampler(sampler, mechanism.noise_multiplier, delta)]
        if delta >= 1 / sampler.num_units:
            notes.append(
                f"delta is not below 1 / {sampler.num_units:,}, one over the number of protected "
                "units: to publish one unit at random is as private; take a smaller delta"
            )
        if stated_law(sampler) is None:
            notes.append(
                f"the sampler {name_of(type(sampler))} is not audited: it states no law of its "
                "rows, so that its draws are not held against what is claimed"
            )
        if sums is not None:
            notes.append(
                f"the run ends in {sums}, such as those of a calibration: they are counted as its "
                f"last {sums.count} of {mechanism.num_steps:,} steps"
            )
        found += [f"of one trial: {note}" for note in notes] if isinstance(part, Trials) else notes
    return list(dict.fromkeys(found))


@_once
def _epsilon(taken: Sequence[Part], delta: float) -> Bound:
    """Bounds epsilon of what was taken, and holds it against each whole run among it."""
    if not taken:
        return Bound(0.0, 0.0, note="no step was declared: nothing was released")
    profiles = _profiles(taken)
    bounds = [epsilon(profile, delta / len(profiles)) for profile in profiles]
    if estimated := [bound for bound in bounds if bound.confidence < 1]:
        raise ValueError(
            f"epsilon {estimated[0]} holds only with confidence {estimated[0].confidence}: an "
            "estimate is not a guarantee"
        )
    wholes = [one for part in taken if part.complete for one in part.mechanisms]
    parts = [bound for mechanism in wholes for bound in mechanism.parts(delta)]
    return _total(taken, bounds, _note_on(taken, bounds)).covering(parts)


@_once
def _total_variation(taken: Sequence[Part]) -> Bound:
    """Bounds the total variation distance delta(0) of what was taken."""
    if not taken:
        return Bound(0.0, 0.0)
    bounds = [attack_advantage(profile) for profile in _profiles(taken)]
    if any(bound.confidence < 1 for bound in bounds):
        return UNKNOWN
    found = _total(taken, bounds, "")
    return found if found.upper <= 1 else Bound(min(found.lower, 1.0), 1.0)


def _profiles(taken: Sequence[Part]) -> list[PrivacyProfile]:
    """Returns one profile for all segments that differ in no more than clipping norm and store.

    Given all that was released before, a segment is part of a run of its own mechanism with a fresh
    seed and fresh noise: the sampler bounds several of them together (`BatchSampler.privacy_of`).
    """
    if len(taken) == 1 and isinstance(taken[0], Segment) and taken[0].complete:
        return [taken[0].mechanism.privacy()]
    kinds: list[tuple[Mechanism, list[range]]] = []
    for part in taken:
        if isinstance(part, Trials) or not part.steps:
            continue
        for known, ranges in kinds:
            if dataclasses.replace(part.mechanism, l2_clip_norm=known.l2_clip_norm) == known:
                ranges.append(part.steps)
                break
        else:
            kinds.append((part.mechanism, [part.steps]))
    selections = [part.profile for part in taken if isinstance(part, Trials)]
    return [*(kind.privacy_of(ranges) for kind, ranges in kinds), *selections]


def _total(taken: Sequence[Part], bounds: Sequence[Bound], note: str) -> Bound:
    """Bounds a sum. Below, something is proved of one whole run alone, whose epochs are whole."""
    if len(taken) == 1 and isinstance(taken[0], Segment) and taken[0].complete:
        return bounds[0]
    total = math.fsum(bound.upper for bound in bounds)  # of one number: that number
    return Bound(0.0, total if len(bounds) == 1 else math.nextafter(total, math.inf), note=note)


def _note_on(taken: Sequence[Part], bounds: Sequence[Bound]) -> str:
    if isinstance(taken[-1], Trials):
        return (
            f"this is the privacy cost of the whole selection: {taken[-1]}; one trial would cost "
            "less, and this model is not one trial: it was chosen. The noise multiplier and the "
            "clipping norm are those of its trial. No lower end is computed"
        )
    declared = "; ".join(map(_declared, taken))
    note = (
        f"counted as declared ({declared}); epochs that were entered count whole except under "
        "Poisson, and no lower end is computed"
    )
    return "; ".join([*dict.fromkeys(bound.note for bound in bounds if bound.note), note])


def _declared(part: Part) -> str:
    if isinstance(part, Trials):
        return str(part)
    if not part.steps:
        return "no step"
    first, last = part.steps.start, part.steps.stop - 1
    return f"steps {first:,} to {last:,} of {part.mechanism.num_steps:,}"
