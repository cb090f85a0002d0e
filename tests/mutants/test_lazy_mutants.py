"""Planted bugs of lazy tables: the audit says what is wrong with noise that comes late.

One program holds them all, and which is at work is the first word of its key.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from planting import forget

from dpsgd import LazyTables, Mechanism, RootKey, dpsgd
from dpsgd.audit.probe import Probe
from dpsgd.audit.runtime.deferred import FLUSHED, FRESH, LAW, SILENT, deferred_checks
from dpsgd.audit.runtime.sums import sum_checks
from dpsgd.engine import algorithm
from dpsgd.engine.lazy import group as lazy
from dpsgd.engine.lazy import rows
from dpsgd.noise.base import Independent
from dpsgd.noise.gaussian import STEP, VALUE
from samplers import BallsAndBins

pytestmark = [pytest.mark.mutants, pytest.mark.usefixtures("unoptimised")]

N, B, STEPS, R, WIDTH = 100, 10, 30, 2_500, 8

BUGS = {
    "none": "",
    "rows are never flushed": FLUSHED,
    "caught up to t": LAW,
    "noise of a gap is drawn twice": LAW,
    "one key for two steps": LAW,
    "one key for all gaps": LAW,
    "a key that is not heeded": LAW,
    "momentum without noise": LAW,
    "covariance with the wrong sign": LAW,
    "a gap has the noise of its step": LAW,
    "noise at the first read alone": LAW,
    "noise of duplicates counts twice": LAW,
    "noise comes again after 700 rows": LAW,
    "noise comes again in rows that are read": LAW,
    "momentum of sums without noise": LAW,
    "no noise where a sum is 0": SILENT,
    "a coarser grid for rows that nobody read": LAW,
    "a finer grid for rows that nobody read": LAW,
    "gradients of rows that are not up to date": FRESH,
    "one percent less": LAW,
    "tables are clipped apart": "an example moves the sum by at most C",
    "duplicates are clipped apart": "an example moves the sum by at most C",
}
NAMES = list(BUGS)


def choose(number, sound, **planted):
    """What one of the bugs makes of something; or what is sound."""
    for name, wrong in planted.items():
        chosen = number == NAMES.index(name.replace("_", " "))
        sound = jax.tree.map(lambda a, b, c=chosen: jnp.where(c, b, a), sound, wrong)
    return sound


def plant_all(patch):
    """Plants every bug."""
    caught_up, flushed_table, written = rows.caught_up, rows.flushed_table, lazy.written
    privatize, unique_rows, read = lazy.privatize, lazy.unique_rows, lazy.read
    clipped_grad, seen = algorithm.clipped_grad, {}

    def key_of(key, number, step):
        def with_step(other):
            return key.at[3].set(key[3] ^ step.astype(jnp.uint32) ^ jnp.uint32(other))

        return choose(
            number,
            key,
            one_key_for_two_steps=with_step(step // 4),
            one_key_for_all_gaps=with_step(0),
            a_key_that_is_not_heeded=0 * key,
            a_gap_has_the_noise_of_its_step=key.at[2].set(key[2] ^ np.uint32((VALUE ^ STEP) << 24)),
        )

    def caught_up_wrongly(values, momentum, steps, numbers, *, noise_key, stddev, **how):
        number = noise_key[0]
        steps = choose(number, steps, caught_up_to_t=jnp.maximum(steps - 1, 0))
        numbers = choose(
            number,
            numbers,
            noise_comes_again_after_700_rows=numbers % 700,
            noise_comes_again_in_rows_that_are_read=jnp.where(numbers < 150, numbers % 75, numbers),
        )
        stddev = choose(number, stddev, one_percent_less=0.99 * stddev)
        how["noise_key"] = key_of(noise_key, number, how["step"])
        theta, m = caught_up(values, momentum, steps, numbers, stddev=stddev, **how)
        moved = caught_up(values, momentum, steps, numbers, stddev=0 * stddev, **how)[1]
        return theta, choose(
            number, m, momentum_without_noise=moved, covariance_with_the_wrong_sign=2 * moved - m
        )

    def flushed_wrongly(table, *part, step, **how):
        number, after = how["noise_key"][0], flushed_table(table, *part, step=step, **how)
        covariance = rows.law_of(how["laws"], jnp.int32(0), step)[1]
        stddev = how["stddev"] * jnp.sqrt(covariance[-1][-1])
        unread, values = (table.steps < step - 9)[:, None], after.values
        coarse = rows.on_grid(values, 2 * stddev, jnp.float32(0.5))
        fine = values + rows.grid(stddev) * 2.0**7
        return choose(
            number,
            after,
            rows_are_never_flushed=table,
            a_coarser_grid_for_rows_that_nobody_read=after._replace(
                values=jnp.where(unread, coarse, values)
            ),
            a_finer_grid_for_rows_that_nobody_read=after._replace(
                values=jnp.where(unread, fine, values)
            ),
        )

    def read_wrongly(table, numbers, *part, **how):
        seen["number"] = how["noise_key"][0]
        seen["steps"] = table.steps.at[numbers].get(mode="fill", fill_value=0)
        seen["stale"] = table.values.at[numbers].get(mode="fill", fill_value=0)
        return read(table, numbers, *part, **how)

    def clipped_grad_wrongly(loss, *, l2_clip_norm, **how):
        sound = clipped_grad(loss, l2_clip_norm=l2_clip_norm, **how)

        def sums(params, row, weights, keys):
            number = seen["number"]
            (table,) = [x for x in jax.tree.leaves(params) if x.ndim == 2]
            stale = choose(number, table, gradients_of_rows_that_are_not_up_to_date=seen["stale"])
            params = jax.tree.map(lambda x: stale if x.ndim == 2 else x, params)
            total, diagnostics = sound(params, row, weights, keys)
            gradients = jax.vmap(jax.grad(loss), (None, 0))(params, row)
            (places,) = row.places.values()
            count = jax.vmap(lambda at: jnp.zeros(len(table)).at[at].add(1, mode="drop"))(places)

            def clipped(squares):
                factor = jnp.minimum(1, l2_clip_norm / jnp.sqrt(squares)) * weights
                return jnp.where(factor > 0, factor, 0)  # NaN is none

            def of(factors):
                return jax.tree.map(
                    lambda g, f: jnp.tensordot(f, jnp.nan_to_num(g), 1), gradients, factors
                )

            squares = jax.tree.map(
                lambda g: jnp.sum(g.reshape(len(weights), -1) ** 2, axis=1), gradients
            )
            of_rows = jax.tree.map(
                lambda g: (
                    jnp.sum(g**2 / jnp.maximum(1, count)[..., None], axis=(1, 2))
                    if g.ndim == 3
                    else jnp.sum(g**2, axis=1)
                ),
                gradients,
            )
            together = clipped(sum(jax.tree.leaves(of_rows)))
            total = choose(
                number,
                total,
                tables_are_clipped_apart=of(jax.tree.map(clipped, squares)),
                duplicates_are_clipped_apart=of(jax.tree.map(lambda _: together, squares)),
            )
            return total, diagnostics

        return sums

    def written_wrongly(table, new, *part):
        steps = choose(seen["number"], new.steps, noise_of_a_gap_is_drawn_twice=new.steps - 1)
        return written(table, new._replace(steps=steps), *part)

    def unique_wrongly(every, num_rows):
        seen["every"] = every
        return unique_rows(every, num_rows)

    def private_wrongly(total, state, key, step, scales, of_rows):
        g, _ = privatize(total, state, key, step, scales, of_rows)
        _, numbers = of_rows
        seen["silent"] = silent = total / scales.expected_batch_size
        often = (seen["every"] == numbers[:, None]).sum(axis=1, keepdims=True) > 1
        again, _ = privatize(0 * total, state, key, step + 2**20, scales, of_rows)
        found = choose(
            key[0],
            g,
            noise_at_the_first_read_alone=jnp.where(seen["steps"][:, None] == 0, g, silent),
            noise_of_duplicates_counts_twice=g + jnp.where(often, again, 0),
            no_noise_where_a_sum_is_0=jnp.where(total == 0, silent, g),
        )
        return found, state

    updated_rows = lazy._updated_rows

    def updated_wrongly(old, gradient, laws, reveals):
        new = updated_rows(old, gradient, laws, reveals)
        raw = updated_rows(old, seen["silent"], laws, reveals)
        momentum = choose(seen["number"], new.momentum, momentum_of_sums_without_noise=raw.momentum)
        return new._replace(momentum=momentum)

    patch.setattr(rows, "caught_up", caught_up_wrongly)
    patch.setattr(lazy, "flushed_table", flushed_wrongly)
    patch.setattr(algorithm, "clipped_grad", clipped_grad_wrongly)
    patch.setattr(lazy, "written", written_wrongly)
    patch.setattr(lazy, "read", read_wrongly)
    patch.setattr(lazy, "unique_rows", unique_wrongly)
    patch.setattr(lazy, "privatize", private_wrongly)
    patch.setattr(lazy, "_updated_rows", updated_wrongly)


def loss_fn(params, example):
    z = jnp.tanh(params["table"][example["ids"]]).ravel() @ params["w"]
    return (z - example["y"]) ** 2


def cosine(step):
    return 0.1 * (1 + np.cos(np.pi * step / STEPS))


ALGORITHM = dpsgd(loss_fn, optax.sgd(0.1), tables=LazyTables(cosine, 0.9))
MECHANISM = Mechanism(BallsAndBins(N, B, epochs=STEPS * B // N), 1.0, 0.5)


def audited(name, checks):
    """The names of the checks that find something wrong."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 200, (N, 4)).astype(np.int32)
    ids[:, 1] = ids[:, 0]
    data = {"ids": ids, "y": rng.normal(size=N).astype(np.float32)}
    params = {
        "table": 0.1 * rng.normal(size=(R, WIDTH)).astype(np.float32),
        "w": rng.normal(size=4 * WIDTH).astype(np.float32),
    }

    def key(self, root, attempt):
        words = root.noise_key(attempt)
        words[0] = NAMES.index(name)
        return words

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Independent, "key", key)
        state = ALGORITHM.init(params, MECHANISM, data)
        root = RootKey.from_insecure_seed(0)
        program = Probe(ALGORITHM, MECHANISM, state, data, root=root)
        return {check.name for check in checks(program) if not check.passed}


@pytest.fixture(scope="module")
def every_bug():
    with pytest.MonkeyPatch.context() as patch:
        plant_all(patch)
        forget()
        yield
    forget()


SECOND = {
    "a key that is not heeded",
    "noise comes again after 700 rows",
    "noise comes again in rows that are read",
    "momentum of sums without noise",
    "a finer grid for rows that nobody read",
}
"""Those that others stand for in the short tier."""


@pytest.mark.short(
    "none",
    "* percent less",
    "one key for all gaps",
    "no noise where a sum is 0",
    "gradients of rows that are not up to date",
    "momentum without noise",
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name in SECOND)) for name in NAMES],
)
def test_a_planted_bug_of_lazy_tables_is_caught(every_bug, name):
    checks = sum_checks if "clipped" in name else deferred_checks
    found = audited(name, checks)
    assert BUGS[name] in found if BUGS[name] else not found
