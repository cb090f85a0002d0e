"""Law checks of a sampler: its draws must be those that its price is about.

The law is stated by the sampler whose price is claimed (`BatchSampler.row_law`), beside its price;
the draws are those of the sampler that trains. No sampler is known here by its class, and one that
states no law is *not audited*, which is said.

**Tests.** Every count below adds up entries, or events that entries make likelier, of one step and
of rows of different outermost units (one row of each, chosen by lot), or of independent draws. The
law says that such terms are negatively associated or independent, so with N terms of mean
probability p, for both signs of theta,

    E exp(theta count) <= prod (1 - p_i + p_i e^theta) <= (1 - p + p e^theta)^N,

and Chernoff's bound gives Pr[count >= k] <= exp(-N KL(k/N || p)) for k >= N p, and likewise below
(K. Joag-Dev, F. Proschan, Negative Association of Random Variables, 1983, property P2; W.
Hoeffding, 1963, Theorem 1). Twice that is a valid p-value, of whatever law. Counts of several
steps, examples or events are corrected by their number (Bonferroni). Each check fails by chance
with probability `FALSE_ALARM` at most. One is approximate: that of random batch sizes.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from dpsgd.audit.checks import LAW, Check, count_pvalue
from samplers import BatchSampler, BatchSource, RowLaw
from samplers.row_law import stated_law

_PARTICIPATIONS = 2**16  # wanted, over all draws
_MOST_DRAWS = 768
_MOST_EPOCHS = 64
_LARGEST_PLAN = 4_000_000  # examples of which a whole epoch is drawn for the comparison


def sampler_checks(sampler: BatchSampler, claimed: BatchSampler, *, seed: int) -> list[Check]:
    """Checks the draws of `sampler` against the law that the price of `claimed` assumes.

    Args:
      sampler: Who draws, at its own n, b and E; the first chunk of examples is looked at.
      claimed: Whose price is claimed; the same object, unless a claim about another is tested.
      seed: Of the draws; must not be the run's.
    """
    checks = [_columns_are_rows(sampler, seed)]
    law = stated_law(claimed)
    if law is None:
        why = f"not audited: {type(claimed).__name__} states no law of its rows (row_law)"
        return [*checks, Check(LAW, True, why, made=False)]
    draws = _Draws(sampler, law, seed)
    checks.append(_length(sampler, law))
    if law.once:
        checks.append(_bounded_participation(draws, law))
    if claimed.separation > 1:
        checks.append(_separation(draws, claimed.separation))
    if law.any_order and claimed is not sampler:
        return checks
    if sampler.steps_per_epoch != law.steps_per_epoch:
        steps = f"{sampler.steps_per_epoch} steps, {law.steps_per_epoch} priced"
        return [*checks, Check("epochs have as many steps as claimed", False, steps)]
    checks.append(_counts(draws, law))
    if law.batch_sizes is not None or law.most_units:
        checks.append(_batches(sampler, law, seed))
    if law.certain:
        return [*checks, _certain(draws, law)]
    checks += [_step_shares(draws, law), *_example_shares(draws, law), *_coincidences(draws, law)]
    checks += _pairs(draws, law)
    if law.independent:
        checks.append(_size_check(draws, law))
    return checks


class _Draws:
    """Rows of the first chunk, under several seeds, of the first epochs.

    Attributes:
      keys: For each seed and epoch, the entries (i, t) as ascending numbers i T + t.
      independent: Those of them that are independent draws, seed by seed.
    """

    def __init__(self, sampler: BatchSampler, law: RowLaw, seed: int):
        self.rows = len(sampler.chunk_range(0))
        self.steps = sampler.steps_per_epoch
        self.run_epochs = sampler.epochs
        rows_of_a_batch = sampler.expected_batch_size * math.prod(sampler.clipped_shape)
        entries = max(1.0, rows_of_a_batch * self.steps * self.rows / sampler.num_examples)
        epochs = math.ceil(_PARTICIPATIONS / entries) if law.redrawn else 2
        self.epochs = min(max(2, epochs), _MOST_EPOCHS, sampler.epochs)
        seeds = math.ceil(_PARTICIPATIONS / (entries * self.epochs) / 2)
        self.seeds = 2 * min(seeds, max(1, _MOST_DRAWS // self.epochs // 2))
        self.keys = [[self._keys(sampler, seed + k, e) for e in range(self.epochs)]
                     for k in range(self.seeds)]  # fmt: skip
        self.independent = self.keys if law.redrawn else [of_seed[:1] for of_seed in self.keys]
        self._rng = np.random.default_rng(seed % 2**64)
        self._order, self._starts = np.arange(self.rows), np.arange(self.rows)
        if law.units is not None:
            units = law.units[:, : self.rows]
            self._order = np.lexsort(units[::-1])
            outermost = units[0][self._order]
            self._starts = np.flatnonzero(np.diff(outermost, prepend=-1))
        self._sizes = np.diff(self._starts, append=self.rows)

    def _keys(self, sampler: BatchSampler, seed: int, epoch: int) -> np.ndarray:
        """Returns the nonzero entries (i, t) of one epoch as ascending numbers i T + t."""
        examples, steps = sampler.participations(seed, epoch, 0)
        return np.sort(examples.astype(np.int64) * self.steps + steps)

    def flat(self) -> list[np.ndarray]:
        """Returns the entries of all independent draws."""
        return [keys for of_seed in self.independent for keys in of_seed]

    def apart(self) -> np.ndarray:
        """Returns examples of different outermost units: one of each, chosen anew."""
        chosen = self._starts + (self._rng.random(self._sizes.size) * self._sizes).astype(np.int64)
        return self._order[chosen]

    def together(self, *, next_one: bool) -> tuple[np.ndarray, np.ndarray]:
        """Returns a pair of examples of each outermost unit: neighbours there, or any two."""
        starts, sizes = self._starts[self._sizes > 1], self._sizes[self._sizes > 1]
        first = (self._rng.random(sizes.size) * (sizes - 1)).astype(np.int64)
        step = (self._rng.random(sizes.size) * (sizes - 1 - first)).astype(np.int64)
        second = first + 1 + (0 if next_one else step)
        return self._order[starts + first], self._order[starts + second]

    def has(self, keys: np.ndarray, examples: np.ndarray, steps: np.ndarray | int) -> np.ndarray:
        """Returns which of these entries are among ascending `keys`."""
        wanted = examples.astype(np.int64) * self.steps + steps
        if not keys.size:
            return np.zeros(wanted.shape, bool)
        places = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
        return keys[places] == wanted


def _columns_are_rows(sampler: BatchSampler, seed: int) -> Check:
    """Compares the batches that training reads with the rows that the price is about."""
    name = "the batches are the rows that were claimed"
    if sampler.num_examples > _LARGEST_PLAN:
        detail = f"not drawn for more than {_LARGEST_PLAN:,} examples"
        return Check(name, True, detail, made=False)
    same = True
    source = BatchSource(sampler, seed)
    length, epochs = sampler.steps_per_epoch, min(2, sampler.epochs)
    cap = sampler.padded_batch_size
    for epoch in range(epochs):
        plan = sampler.plan(seed, epoch)
        steps = np.repeat(np.arange(length), np.diff(plan.starts))
        mine = plan.examples < len(sampler.chunk_range(0))
        rows = sampler.participations(seed, epoch, 0)
        same &= _same_entries((plan.examples[mine], steps[mine]), rows)
        for t in range(min(4, length)):
            members, step = plan.members(t), epoch * length + t
            if any(part.size > cap for part in sampler.passes(members, seed, step)):
                return Check(name, False, f"a pass has more rows than the cap of {cap}")
            passes = source.passes(step)
            read = np.concatenate([batch.indices[batch.weights > 0] for batch in passes])
            kept = members.size if sampler.accumulates else min(members.size, cap)
            same &= np.unique(read).size == read.size == kept and bool(np.isin(read, members).all())
    return Check(name, bool(same), f"epochs compared: {epochs}" if same else "they differ")


def _same_entries(a, b) -> bool:
    pairs = [np.stack([examples.astype(np.int64), steps.astype(np.int64)]) for examples, steps in
             (a, b)]  # fmt: skip
    ordered = [pair[:, np.lexsort(pair)] for pair in pairs]
    return ordered[0].shape == ordered[1].shape and bool((ordered[0] == ordered[1]).all())


def _length(sampler: BatchSampler, law: RowLaw) -> Check:
    priced = law.steps_per_epoch * law.epochs
    # Where an example takes part once an epoch, epochs count, and not steps.
    fits = law.once or sampler.num_steps <= priced
    detail = f"{sampler.num_steps} steps, {priced} priced"
    return Check("the run has no more steps than priced", fits, detail)


def _bounded_participation(draws: _Draws, law: RowLaw) -> Check:
    """An example takes part no more often than was paid for; epochs are read as alike."""
    seen = max(
        int(np.bincount(keys // draws.steps, minlength=1).max(initial=0))
        for of_seed in draws.keys
        for keys in of_seed
    )
    passed = seen * draws.run_epochs <= law.epochs
    return Check(
        "nobody takes part more often than priced",
        passed,
        f"{seen} times an epoch, {draws.run_epochs} epochs; {law.epochs} times priced",
    )


def _separation(draws: _Draws, claimed: int) -> Check:
    """Two participations of an example are as many steps apart as correlated noise relies on."""
    nearest = math.inf
    for of_seed in draws.keys:
        at = [(keys // draws.steps, keys % draws.steps + epoch * draws.steps)
              for epoch, keys in enumerate(of_seed)]  # fmt: skip
        examples, steps = (np.concatenate(parts) for parts in zip(*at, strict=True))
        order = np.lexsort((steps, examples))
        apart = np.diff(steps[order])[np.diff(examples[order]) == 0]
        nearest = min(nearest, int(apart.min(initial=draws.steps * draws.epochs)))
    return Check(
        "participations are as far apart as claimed",
        nearest >= claimed,
        f"{nearest} steps, {claimed} priced",
    )


def _certain(draws: _Draws, law: RowLaw) -> Check:
    """Where nothing is random, each entry is the one that was claimed."""
    drawn = np.concatenate([keys for of_seed in draws.keys for keys in of_seed])
    wrong = int(np.sum(law.rate(drawn // draws.steps, drawn % draws.steps) != 1))
    return Check(
        "everybody is where the order says", wrong == 0, f"{wrong} of {drawn.size:,} are not"
    )


def _counts(draws: _Draws, law: RowLaw) -> Check:
    """How often an example takes part in an epoch."""
    steps, rows = draws.steps, draws.rows
    counts = np.stack([np.bincount(keys // steps, minlength=rows) for keys in draws.flat()])
    if law.once:
        wrong = int(np.sum(counts != 1))
        detail = f"{wrong} of {counts.size:,} rows do not"
        return Check("everybody takes part once an epoch", wrong == 0, detail)
    pvalue, some = 1.0, draws.apart()
    q = np.broadcast_to(law.rate(some, 0), some.shape)
    found = counts[:, some]
    looked_at = found.size
    seen = np.array([np.sum(found == k) for k in range(3)])
    for k in range(1, min(3, steps) + 1):
        chance = float(np.mean(stats.binom.sf(k - 1, steps, q)))
        pvalue = min(pvalue, float(count_pvalue(np.sum(found >= k), looked_at, chance)))
    return Check.of(
        "how often an example takes part is binomial",
        3 * pvalue,
        f"{seen.tolist()} of {looked_at:,} rows take part 0, 1, 2 times in an epoch",
    )


def _batches(sampler: BatchSampler, law: RowLaw, seed: int) -> Check:
    """What is sure of each batch: its size, where it is not random, and how many units it holds."""
    name = "batches hold as many rows and units as claimed"
    if sampler.num_examples > _LARGEST_PLAN:
        detail = f"not drawn for more than {_LARGEST_PLAN:,} examples"
        return Check(name, True, detail, made=False)
    epochs = range(min(sampler.epochs, 16 if law.steps_per_epoch == 1 else 2))
    for epoch in epochs:
        plan = sampler.plan(seed, epoch)
        sizes = np.diff(plan.starts)
        if law.batch_sizes is not None and not np.array_equal(sizes, law.batch_sizes):
            return Check(name, False, f"epoch {epoch} has batches of other sizes")
        if law.units is None:
            continue
        for t in range(sampler.steps_per_epoch):
            for level, most in enumerate(law.most_units):
                held = np.unique(law.units[level, plan.members(t)]).size
                if held > most:
                    return Check(name, False, f"{held} units of level {level + 1}, {most} priced")
    return Check(name, True, f"epochs drawn: {len(epochs)}")


def _step_shares(draws: _Draws, law: RowLaw) -> Check:
    """How many take part in each step, over all draws."""
    steps = np.arange(draws.steps)
    count, expected, trials = np.zeros(draws.steps), np.zeros(draws.steps), 0
    for of_seed in draws.independent:
        some = draws.apart()
        for keys in of_seed:
            mine = keys if some.size == draws.rows else keys[np.isin(keys // draws.steps, some)]
            count += np.bincount(mine % draws.steps, minlength=draws.steps)
        q = np.mean(np.atleast_2d(law.rate(some[:, None], steps[None, :])), axis=0)
        expected += q * some.size * len(of_seed)
        trials += some.size * len(of_seed)
    pvalue = draws.steps * float(np.min(count_pvalue(count, trials, expected / trials)))
    detail = f"{int(count.sum()):,} participations, {expected.sum():.6g} expected"
    return Check.of("all steps take their share of the examples", pvalue, detail)


def _example_shares(draws: _Draws, law: RowLaw) -> list[Check]:
    """How often each example takes part, over independent steps."""
    if law.once:
        return []
    rows, trials = np.arange(draws.rows), len(draws.flat()) * draws.steps
    count = np.zeros(draws.rows, np.int64)
    for keys in draws.flat():
        count += np.bincount(keys // draws.steps, minlength=draws.rows)
    q = np.broadcast_to(law.rate(rows, 0), draws.rows)
    worst = count_pvalue(count, trials, q)
    i = int(np.argmin(worst))
    detail = f"example {i}: {count[i]} of {trials:,} steps, {q[i] * trials:.4g} expected"
    pvalue = draws.rows * float(worst[i])
    return [Check.of("all examples take part at the rate that was claimed", pvalue, detail)]


def _coincidences(draws: _Draws, law: RowLaw) -> list[Check]:
    """Draws of different seeds, and epochs where they are redrawn, share entries by chance."""
    once_drawn = range(draws.epochs if law.redrawn else 1)
    seeds = range(0, draws.seeds, 2)
    pairs = [(draws.keys[k][e], draws.keys[k + 1][e]) for k in seeds for e in once_drawn]
    checks = [_shared("draws of different seeds are independent", pairs, draws, law)]
    if draws.epochs > 1 and law.redrawn:
        epochs = range(0, draws.epochs - 1, 2)  # disjoint pairs: the first ones may be held fixed
        pairs = [(of_seed[e], of_seed[e + 1]) for of_seed in draws.keys for e in epochs]
        checks.append(_shared("epochs are independent, as claimed", pairs, draws, law))
    elif draws.epochs > 1:
        common = sum(
            np.intersect1d(of_seed[0], of_seed[1], assume_unique=True).size
            for of_seed in draws.keys
        )
        entries = sum(of_seed[0].size for of_seed in draws.keys)
        detail = f"{common} of {entries} entries are kept in the next epoch"
        checks.append(Check("epochs are alike, as claimed", bool(common == entries), detail))
    return checks


def _shared(
    name: str, pairs: list[tuple[np.ndarray, np.ndarray]], draws: _Draws, law: RowLaw
) -> Check:
    """Given the entries of the first of each pair, those of the second hit them by chance."""
    count, expected, trials = (np.zeros(draws.steps) for _ in range(3))
    for first, second in pairs:
        some = draws.apart()
        if some.size < draws.rows:
            first = first[np.isin(first // draws.steps, some)]
        examples, steps = first // draws.steps, first % draws.steps
        hit = draws.has(second, examples, steps)
        q = np.broadcast_to(law.rate(examples, steps), first.shape)
        count += np.bincount(steps, hit, minlength=draws.steps)
        expected += np.bincount(steps, q, minlength=draws.steps)
        trials += np.bincount(steps, minlength=draws.steps)
    return _over_steps(name, count, expected, trials, law)


def _over_steps(
    name: str, count: np.ndarray, expected: np.ndarray, trials: np.ndarray, law: RowLaw
) -> Check:
    """Tests counts of each step, or their sum where terms of different steps are independent."""
    if law.independent or not law.once:
        count, expected, trials = (np.array([a.sum()]) for a in (count, expected, trials))
    some = trials > 0
    count, expected, trials = count[some], expected[some], trials[some]
    detail = f"{int(count.sum())} coincidences, {expected.sum():.4g} expected"
    pvalues = count_pvalue(count, trials, np.minimum(1.0, expected / trials))
    return Check.of(name, count.size * float(np.min(pvalues, initial=1.0)), detail)


def _pairs(draws: _Draws, law: RowLaw) -> list[Check]:
    """Two rows take part in one step as often as claimed: in units, and across them."""
    if draws.rows == 1:
        return []
    if law.units is None:
        name = "pairs of examples take part together as often as claimed"
        if law.independent:
            name = "examples are independent of one another"
        return [_joint(name, draws, law, lambda: _couples(np.arange(draws.rows)))]
    within = "neighbours in a unit take part together as often as claimed"
    any_two = "examples of a unit take part together as often as claimed"
    across = "examples of different units take part together as often as claimed"
    return [
        _joint(within, draws, law, lambda: draws.together(next_one=True)),
        _joint(any_two, draws, law, lambda: draws.together(next_one=False)),
        _joint(across, draws, law, lambda: _couples(draws.apart())),
    ]


def _couples(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return rows[: rows.size // 2 * 2 : 2], rows[1::2]


def _joint(name: str, draws: _Draws, law: RowLaw, choose) -> Check:
    steps = draws.steps
    count, expected, trials = (np.zeros(steps) for _ in range(3))
    for of_seed in draws.independent:
        first, second = choose()
        partner = np.full(draws.rows, -1, np.int64)
        partner[first] = second
        for keys in of_seed:
            examples, at = keys // steps, keys % steps
            paired = partner[examples] >= 0
            both = draws.has(keys, partner[examples[paired]], at[paired])
            count += np.bincount(at[paired], both, minlength=steps)
        q = law.joint(first[:, None], second[:, None], np.arange(steps)[None, :])
        expected += np.mean(np.atleast_2d(q), axis=0) * first.size * len(of_seed)
        trials += first.size * len(of_seed)
    if law.once and law.independent:  # a pair that shares a step shares no other
        trials = trials / steps
    return _over_steps(name, count, expected, trials, law)


def _size_check(draws: _Draws, law: RowLaw) -> Check:
    """Pearson's statistic of the batch sizes, which sees fixed sizes as well as lumpy ones.

    Its mean and variance are exact (for independent binomial sizes, or a multinomial), its law is
    taken to be the scaled chi-square of that mean and variance.
    """
    name = "batch sizes vary as they should"
    steps, rows, q = draws.steps, draws.rows, float(np.max(law.rate(np.arange(1), 0)))
    if q == 1.0:
        return Check(name, True, "every batch is the whole data set")
    sizes = np.stack([np.bincount(keys % steps, minlength=steps) for keys in draws.flat()])
    if law.once:
        statistic = np.sum((sizes - rows * q) ** 2) / (rows * q)
        mean, variance = steps - 1, 2 * (steps - 1) * (1 - 1 / rows)
    else:
        spread = rows * q * (1 - q)
        statistic = np.sum((sizes - rows * q) ** 2) / spread
        mean, variance = steps, steps * (2 + (1 - 6 * q * (1 - q)) / spread)
    mean, variance = mean * len(sizes), variance * len(sizes)
    if variance == 0:
        return Check(name, True, "there is one step, or one example")
    scale, freedom = variance / (2 * mean), 2 * mean**2 / variance
    below = float(stats.chi2.cdf(statistic / scale, freedom))
    above = float(stats.chi2.sf(statistic / scale, freedom))
    detail = f"{statistic / mean:.4g} times the variance of the law that was claimed"
    return Check.of(name, 2 * min(below, above), detail)
