"""Planted bugs of lazy tables: the audit says what is wrong with noise that comes late."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from planting import Fault, after, before, largest_norm, planted

from dpsgd import LazyTables, Mechanism, dpsgd, with_rows
from dpsgd.audit.probe import Probe
from dpsgd.audit.runtime.deferred import FLUSHED, FRESH, LAW, deferred_checks
from dpsgd.audit.runtime.differential import STEP as RELEASED
from dpsgd.audit.runtime.differential import step_checks
from dpsgd.core.gaussian import STEP, VALUE
from dpsgd.core.state import join_leaves
from dpsgd.engine.lazy import rows
from dpsgd.noise.keys import RootKey
from samplers import BallsAndBins

pytestmark = [pytest.mark.mutants, pytest.mark.usefixtures("unoptimised")]

N, B, STEPS, R, WIDTH = 100, 10, 30, 2_500, 8


def gap(change, check=LAW):
    """A fault of what a gap is given."""
    return [Fault("gap", before(change), check)]


def named(change):
    """A fault of the key of a gap: `change(step)` is the step that names its noise."""

    def other(noise_key, step):
        word = noise_key[3] ^ step.astype(jnp.uint32) ^ jnp.uint32(change(step))
        return {"noise_key": noise_key.at[3].set(word)}

    return gap(other)


def of_momentum(change):
    """A fault of momentum: `change(m, m without noise)` takes its place."""

    def make(sound):
        def faulty(*arguments, stddev, **how):
            noise = sound(*arguments, stddev=stddev, **how)
            without = sound(*arguments, stddev=0 * stddev, **how)
            return noise._replace(momentum=change(noise.momentum, without.momentum))

        return faulty

    return [Fault("gap", make, LAW)]


def on_another_grid(change):
    """A fault of what is flushed of rows that were not read for long."""

    def flushed(found, table, step, how):
        low = rows.law_of(how["laws"], jnp.int32(0), step)[1]
        stddev = how["stddev"] * rows.norm(low[-1])
        unread = (table.steps < step - 9)[:, None]
        return found._replace(values=jnp.where(unread, change(found.values, stddev), found.values))

    return [Fault("flush", after(flushed), FLUSHED)]


def with_seen(seam, seen, changed, change):
    """A fault of a function that looks at `seen(arguments of a seam)`, which is called before."""
    snapshots = []

    def of_dense_leaves(name, arguments):
        return name == "row noise" and len(arguments) < 6

    def look(sound):
        def faulty(*arguments, **how):
            if not of_dense_leaves(seam, arguments):
                snapshots[:] = [seen(*arguments)]
            return sound(*arguments, **how)

        return faulty

    def make(sound):
        def faulty(*arguments):
            if of_dense_leaves(changed, arguments):
                return sound(*arguments)
            return change(sound, snapshots[0], *arguments)

        return faulty

    return [Fault(seam, look, LAW), Fault(changed, make, LAW)]


def at_the_first_read(sound, steps, total, state, key, step, scales, of_rows):
    gradient, state = sound(total, state, key, step, scales, of_rows)
    silent = total / scales.expected_batch_size
    return jnp.where(steps[:, None] == 0, gradient, silent), state


def twice_in_duplicates(sound, every, total, state, key, step, scales, of_rows):
    gradient, state = sound(total, state, key, step, scales, of_rows)
    often = (every == of_rows[1][:, None]).sum(axis=1, keepdims=True) > 1
    again, _ = sound(0 * total, state, key, step + 2**20, scales, of_rows)
    return gradient + jnp.where(often, again, 0), state


def momentum_of_sums(sound, silent, old, gradient, laws, shown):
    raw = sound(old, silent, laws, shown)
    rows = sound(old, gradient, laws, shown)
    return rows._replace(table=rows.table._replace(momentum=raw.table.momentum))


def without_noise_where_nothing_is(found, clipped_sum, scales, rows):
    if rows is None:  # of the dense leaves
        return found
    silent = clipped_sum / scales.expected_batch_size
    return jnp.where(clipped_sum == 0, silent, found[0]), found[1]


def stale(found, state):
    view, viewed = found
    old = {
        k: state.lazy_tables[k].values.at[x.numbers].get(mode="fill", fill_value=0)
        for k, x in viewed.rows.items()
    }
    return view._replace(params=join_leaves(state.params_without_tables, old)), viewed


BUGS = {
    "none": [],
    "rows are never flushed": [Fault("flush", after(lambda found, table: table), FLUSHED)],
    "caught up to t": gap(
        lambda old: {"old": old._replace(steps=jnp.maximum(old.steps - 1, 0))}),
    "noise of a gap is drawn twice": [
        Fault("written", before(lambda rows: {"rows": rows._replace(
            table=rows.table._replace(steps=rows.table.steps - 1))}), LAW)],
    "one key for two steps": named(lambda step: step // 4),
    "one key for all gaps": named(lambda step: 0),
    "a key that is not heeded": gap(lambda noise_key: {"noise_key": 0 * noise_key}),
    "momentum without noise": of_momentum(lambda m, moved: moved),
    "covariance with the wrong sign": of_momentum(lambda m, moved: 2 * moved - m),
    "a gap has the noise of its step": gap(lambda noise_key: {
        "noise_key": noise_key.at[2].set(noise_key[2] ^ np.uint32((VALUE ^ STEP) << 24))}),
    "noise at the first read alone": with_seen(
        "read rows", lambda table, numbers, *_: table.steps.at[numbers].get(mode="fill"),
        "row noise", at_the_first_read),
    "noise of duplicates counts twice": with_seen(
        "unique rows", lambda every, num_rows: every, "row noise", twice_in_duplicates),
    "noise comes again after 700 rows": gap(lambda numbers: {"numbers": numbers % 700}),
    "noise comes again in rows that are read": gap(lambda numbers: {
        "numbers": jnp.where(numbers < 150, numbers % 75, numbers)}),
    "momentum of sums without noise": with_seen(
        "row noise", lambda total, state, key, step, scales, *_: total / scales.expected_batch_size,
        "row update", momentum_of_sums),
    "no noise where a sum is 0": [
        Fault("row noise", after(without_noise_where_nothing_is), LAW)],
    "a coarser grid for rows that nobody read": on_another_grid(
        lambda x, stddev: rows.on_grid(x, 2 * stddev, jnp.float32(0.5))),
    "a finer grid for rows that nobody read": on_another_grid(
        lambda x, stddev: x + rows.grid(stddev) * 2.0**7),
    "gradients of rows that are not up to date": [Fault("lazy view", after(stale), FRESH)],
    "one percent less": gap(lambda stddev: {"stddev": 0.99 * stddev}),
    "tables are clipped apart": [Fault("combined", after(largest_norm), RELEASED)],
    "duplicates are clipped apart": [Fault("repeated", after(lambda found, h: h), RELEASED)],
}  # fmt: skip


loss_fn = with_rows(
    lambda example: {"table": example["ids"]},
    lambda params, rows, example: (
        (jnp.tanh(rows["table"]).ravel() @ params["w"] - example["y"]) ** 2
    ),
)


def cosine(step):
    return 0.1 * (1 + np.cos(np.pi * step / STEPS))


def failed(checks):
    """The names of the checks that find something wrong."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 200, (N, 4)).astype(np.int32)
    ids[:, 1] = ids[:, 0]
    data = {"ids": ids, "y": rng.normal(size=N).astype(np.float32)}
    params = {
        "table": 0.1 * rng.normal(size=(R, WIDTH)).astype(np.float32),
        "w": rng.normal(size=4 * WIDTH).astype(np.float32),
    }
    algorithm = dpsgd(loss_fn, optax.sgd(0.1), tables=LazyTables(cosine, 0.9))
    mechanism = Mechanism(BallsAndBins(N, B, epochs=STEPS * B // N), 1.0, 0.5)
    state, root = algorithm.init(params, mechanism, data), RootKey.from_insecure_seed(0)
    program = Probe(algorithm, mechanism, state, data, root=root)
    return {check.name for check in checks(program) if not check.passed}


@pytest.mark.long
@pytest.mark.parametrize("faults", BUGS.values(), ids=BUGS)
def test_a_planted_bug_of_lazy_tables_is_caught(faults):
    checks = {fault.check for fault in faults}
    with planted(*faults):
        failures = failed(step_checks if checks == {RELEASED} else deferred_checks)
    assert checks <= failures if checks else not failures
