"""Law checks of a sampler: its draws must be those that its privacy cost is about.

The law is stated by the sampler whose guarantee is claimed (`BatchSampler.row_law`); the draws are
whole epochs at the run's own size, as training reads them. What is exact is checked here; the rest
is left to chance by the law (`participation.py`, `independence.py`, `truncation.py`). A sampler
that states no law is *not audited*, which is said.
"""

from __future__ import annotations

import numpy as np

from dpsgd.audit.report import LAW, CheckResult
from dpsgd.audit.samplers.draws import Draws
from dpsgd.audit.samplers.independence import coincidence_checks
from dpsgd.audit.samplers.participation import share_checks
from dpsgd.audit.samplers.shards import shard_checks
from dpsgd.audit.samplers.truncation import cut_checks
from samplers import BatchSampler
from samplers.base import stated_law
from samplers.row_law import IndependentRows, RandomOrders, RowLaw
from samplers.shards import Shards

READ = "the batches are the rows that were claimed"

_SEPARATED = 1_000_000  # participations of which the steps are compared, about


def sampler_checks(
    sampler: BatchSampler,
    claimed: BatchSampler,
    *,
    seed: int,
    bands: int = 1,
    entries: int | None = None,
) -> list[CheckResult]:
    """Checks the draws of `sampler` against the law that the guarantee of `claimed` assumes.

    A check that fails where others rely on what it says is the last one.

    Args:
      sampler: Who draws, at its own n, b and E.
      claimed: Whose guarantee is claimed; the same object, unless a claim about another is tested.
      seed: Of the draws; must not be the run's.
      bands: Steps over which the noise is correlated.
      entries: Participations that are looked at, about; by default `draws.ENTRIES`.
    """
    law = stated_law(claimed)
    if law is not None and law.units is not None and law.units.shape[1] != sampler.num_examples:
        detail = f"units of {law.units.shape[1]:,} examples, and {sampler.num_examples:,} are drawn"
        return [CheckResult("the examples are those of the claimed units", False, detail)]
    try:
        draws = Draws(sampler, law, seed, entries)
    except (ValueError, IndexError) as error:
        return [CheckResult(READ, False, str(error))]
    checks = [_columns_are_rows(draws), *cut_checks(sampler, draws.seeds, draws.entries // 8)]
    if draws.fault:
        return checks
    if law is None:
        why = f"not audited: {type(claimed).__name__} states no law of its rows (row_law)"
        return [*checks, CheckResult.skipped(LAW, why)]
    checks.append(_length(sampler, law))
    if law.once:
        checks.append(_bounded_participation(draws, law))
    if bands > 1:
        checks.append(_separation(draws, law, bands, claimed))
    if law.any_order and claimed is not sampler:
        return checks
    if sampler.steps_per_epoch != law.steps_per_epoch:
        steps = f"{sampler.steps_per_epoch} steps, {law.steps_per_epoch} claimed"
        return [*checks, CheckResult("epochs have as many steps as claimed", False, steps)]
    if law.batch_sizes is not None or law.most_units:
        checks.append(_batches(draws, law))
    if law.once:
        wrong = sum(draw.strays for draw in draws.all)
        detail = f"{wrong:,} of {sampler.num_examples * len(draws.all):,} rows do not"
        checks.append(CheckResult("every example takes part once an epoch", wrong == 0, detail))
        if wrong:
            return checks
    if law.certain:
        return [*checks, _certain(draws, law)]
    if isinstance(law, RandomOrders):
        return checks + shard_checks(sampler, law, seed, entries)
    if law.cycle_length > 1:
        groups = _groups(draws, law)
        if not (groups.passed and isinstance(law, IndependentRows)):
            return [*checks, groups]
        checks.append(groups)
        draws, law = draws.folded(law.cycle_length), law.folded()
    return checks + share_checks(draws, law) + coincidence_checks(draws, law)


def _columns_are_rows(draws: Draws) -> CheckResult:
    """Compares the batches that training reads with the rows that the guarantee is about.

    Entry by entry, in the first and the last chunk; of a batch that was cut, the rest is missing.
    """
    if draws.fault:
        return CheckResult(READ, False, draws.fault)
    cap, compared = draws.sampler.shard_batch_size, 0
    for read, rows in draws.compared():
        compared += 1
        given, wanted = draws.keys(read), draws.keys(rows)
        missing = np.setdiff1d(wanted, given, assume_unique=True)
        if draws.cut:
            examples, steps = np.divmod(missing, draws.steps)
            shards = Shards(draws.sampler.num_examples, draws.sampler.num_shards)
            missing = missing[read.parts[shards.of(draws.numbers(examples)), steps] < cap]
        if missing.size or np.setdiff1d(given, wanted, assume_unique=True).size:
            return CheckResult(READ, False, f"they differ in epoch {read.epoch}")
    if draws.cut and (fault := _wrong_sizes(draws)):
        return CheckResult(READ, False, fault)
    detail = f"{len(draws.read)} epochs were read, and {compared} of them compared"
    return CheckResult(READ, True, detail)


def _wrong_sizes(draws: Draws) -> str:
    """Returns which batch was not cut to the cap, if any."""
    for read, drawn in zip(draws.read, draws.all, strict=True):
        if not np.array_equal(read.parts, np.minimum(drawn.parts, draws.sampler.shard_batch_size)):
            return f"batches of epoch {read.epoch} are not what is left of the drawn ones"
    return ""


def _length(sampler: BatchSampler, law: RowLaw) -> CheckResult:
    priced = law.steps_per_epoch * law.epochs
    # Where an example takes part once an epoch, epochs count, and not steps.
    fits = law.once or sampler.num_steps <= priced
    detail = f"{sampler.num_steps} steps, {priced} priced"
    return CheckResult("the run has no more steps than priced", fits, detail)


def _bounded_participation(draws: Draws, law: RowLaw) -> CheckResult:
    """An example takes part no more often than was paid for; epochs are read as alike."""
    seen = max(int(np.bincount(draw.examples, minlength=1).max()) for draw in draws.all)
    epochs = draws.sampler.epochs
    return CheckResult(
        "no example takes part more often than priced",
        seen * epochs <= law.epochs,
        f"{seen} times an epoch, {epochs} epochs; {law.epochs} times priced",
    )


def _separation(draws: Draws, law: RowLaw | None, bands: int, claimed: BatchSampler) -> CheckResult:
    """Two steps of an example are as far apart as correlated noise relies on.

    Two that it may take part in: under whatever seed; under one seed where any order is priced.
    """
    length, end = draws.steps, draws.sampler.num_steps
    entries = np.cumsum([draw.examples.size for draw in draws.all])
    some = draws.all[: max(2, int(np.searchsorted(entries, _SEPARATED)))]
    seeds = sorted({draw.seed for draw in some})
    nearest, priced = end, claimed.separation
    for together in [[seed] for seed in seeds] if law is not None and law.any_order else [seeds]:
        keys = [
            draw.examples.astype(np.int64) * end + (draw.steps + draw.epoch * length)
            for draw in some
            if draw.seed in together
        ]
        examples, steps = np.divmod(np.unique(np.concatenate(keys)), end)
        apart = np.diff(steps)[np.diff(examples) == 0]
        nearest = min(nearest, int(apart.min(initial=end)))
    passed = bands <= priced and nearest >= bands
    return CheckResult(
        "participations are as far apart as correlated noise needs",
        passed,
        f"{nearest} steps, {priced} priced, noise of {bands} bands",
    )


def _groups(draws: Draws, law: RowLaw) -> CheckResult:
    """Everybody takes part in the steps of their group alone."""
    cycle = law.cycle_length
    wrong = sum(
        int(np.count_nonzero((draws.numbers(draw.examples) - draw.steps) % cycle))
        for draw in draws.all
    )
    entries = sum(draw.examples.size for draw in draws.all)
    detail = f"{wrong:,} of {entries:,} participations do not"
    return CheckResult("every example keeps to the steps of its group", wrong == 0, detail)


def _batches(draws: Draws, law: RowLaw) -> CheckResult:
    """What is sure of each batch: its size, where it is not random, and how many units it holds."""
    name = "batches hold as many rows and units as claimed"
    for draw in draws.all:
        if law.batch_sizes is not None and not np.array_equal(draw.sizes, law.batch_sizes):
            return CheckResult(name, False, f"epoch {draw.epoch} has batches of other sizes")
    for units, _ in draws.held:
        for level, most in enumerate(law.most_units):
            held = np.unique(draws.choice.above(level, units)).size
            if held > most:
                return CheckResult(name, False, f"{held} units of level {level + 1}, {most} priced")
    return CheckResult(name, True, f"epochs drawn: {len(draws.all)}")


def _certain(draws: Draws, law: RowLaw) -> CheckResult:
    """Where nothing is random, each entry is the one that was claimed."""
    wrong = sum(
        int(np.sum(law.rate(draws.numbers(draw.examples), draw.steps) != 1)) for draw in draws.all
    )
    entries = sum(draw.examples.size for draw in draws.all)
    return CheckResult(
        "every example is where the order says", wrong == 0, f"{wrong} of {entries:,} are not"
    )
