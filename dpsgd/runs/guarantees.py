"""The guarantee that a ledger gives: what was declared costs, and lets a membership attack do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable

from accounting import Bound, attack_advantage
from dpsgd.runs.history import History, kinds_of
from dpsgd.training.guarantee import UNKNOWN, Guarantee


def guarantee_of(history: History) -> Guarantee:
    """Returns `history.guarantee()`, with what all that was declared lets a membership attack do.

    A process computes it once for all runs that declared alike.
    """
    declared: Hashable = tuple(
        (t.mechanism, t.delta, t.unit, t.reproducible_noise, t.lazy_tables, g.steps)
        for g in history.generations
        for t in (g.terms,)
    )
    if history.selection is not None:
        declared = declared, history.selection.key
    if declared not in _guarantees:
        guarantee = history.guarantee()
        if guarantee.epsilon is not None and history.selection is None:
            guarantee = dataclasses.replace(guarantee, total_variation=_total_variation(history))
        _guarantees[declared] = guarantee
    return _guarantees[declared]


_guarantees: dict[Hashable, Guarantee] = {}


def _total_variation(history: History) -> Bound:
    """Bounds the total variation distance delta(0) of all that the generations declared together.

    As `history.guarantee` composes them: generations that differ in the clipping norm alone are
    stretches of one sampler, whose joint profile it states; those of several kinds add up, by the
    triangle inequality, as each is bounded whatever the ones before released.
    """
    declared = [generation for generation in history.generations if generation.steps]
    kinds = kinds_of(declared)
    bounds = [attack_advantage(kind.privacy_of(stretches)) for kind, stretches in kinds]
    if any(bound.confidence < 1 for bound in bounds):
        return UNKNOWN
    total = math.fsum(bound.upper for bound in bounds)  # of one number: that number
    upper = total if len(bounds) <= 1 else math.nextafter(total, math.inf)
    # A profile's lower end is that of whole epochs, drawn once.
    mechanism = history.generations[-1].terms.mechanism
    whole = [generation.steps for generation in declared] == [range(mechanism.num_steps)]
    return Bound(bounds[0].lower if whole else 0.0, min(1.0, upper))
