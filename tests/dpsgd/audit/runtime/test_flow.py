"""What the trace of a program proves: it passes all that is sound, and names what is not."""

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import (
    BandedToeplitz,
    Independent,
    LazyTables,
    Mechanism,
    Noise,
    dpsgd,
    with_rows,
)
from dpsgd.audit.runtime.flow import flow_checks
from dpsgd.core.gaussian import add_gaussian_noise, standard_normal
from dpsgd.engine.feed import Layout
from dpsgd.engine.lazy import group as lazy
from dpsgd.engine.placement import Placement
from samplers import BallsAndBins, FullBatch, Poisson

pytestmark = pytest.mark.audit

N, D = 96, 5
ROWS = {
    "x": np.ones((N, D), np.float32),
    "ids": np.ones((N, 2), np.int32),
}
PARAMS = {"table": jnp.zeros((40, 2)), "w": jnp.zeros(D)}
POISSON = Poisson(N, 8, 3)
SEVERAL = Poisson(N, 8, 3, overflow="accumulate", max_batch_size=4)
ADAM, SGD = optax.adam(1e-2), optax.sgd(1e-2)
TABLES = LazyTables(0.1, momentum=0.9)


def loss_of_rows(params, rows, example):
    return jnp.dot(params["w"], example["x"]) + rows["table"].sum()


def dropped(params, rows, example, key):
    return loss_of_rows(params, rows, example) * jax.random.bernoulli(key)


def lookups(example):
    return {"table": example["ids"]}


loss_fn, dropping = with_rows(lookups, loss_of_rows), with_rows(lookups, dropped)


@dataclass(frozen=True)
class Own(Noise):
    """Noise of two bands that is added by its own `+`, and that reads the step."""

    @property
    def bands(self):
        return 2

    def init(self, like):
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), like)

    def add(self, total, state, key, step, scales):
        zeros = jax.tree.map(jnp.zeros_like, total)
        fresh = add_gaussian_noise(zeros, key, step, 1.25 * scales.noise_stddev)
        noise = jax.tree.map(lambda z, before: z - 0.5 * (step > 0) * before, fresh, state)
        return jax.tree.map(lambda s, n: (s + n) / scales.expected_batch_size, total, noise), noise


@dataclass(frozen=True)
class Drawn(Noise):
    """Noise by JAX's own generator, whose draws are not marked."""

    def add(self, total, state, key, step, scales):
        key = jax.random.fold_in(jax.random.wrap_key_data(key[:2]), step)
        z = jax.tree.map(lambda s: jax.random.normal(key, s.shape), total)
        noised = jax.tree.map(lambda s, z: s + scales.noise_stddev * z, total, z)
        return jax.tree.map(lambda s: s / scales.expected_batch_size, noised), state


@functools.cache
def traced_once(loss, optimizer, tables):
    """An algorithm whose sum is traced for the first of all faults elsewhere."""
    algorithm = dpsgd(loss, optimizer, tables=tables)
    if tables:
        return algorithm
    return algorithm._replace(clipped_sum=jax.jit(algorithm.clipped_sum))


def faults(
    sampler=POISSON, noise=None, loss=loss_fn, optimizer=SGD, tables=None, change=None, **how
):
    """Whatever the check finds wrong."""
    mechanism = Mechanism(sampler, 1.0, 1.0, noise or Independent())
    algorithm = traced_once(loss, optimizer, tables)
    rows = (ROWS,) if tables else ()
    state = jax.eval_shape(lambda params: algorithm.init(params, mechanism, *rows), PARAMS)
    algorithm = algorithm._replace(**change(algorithm)) if change else algorithm
    layout = Layout.choose(sampler, ROWS, **how)
    checks = flow_checks(algorithm, mechanism, state, ROWS, layout)
    return "; ".join(check.detail for check in checks if not check.passed)


SAMPLERS: dict[str, dict[str, Any]] = {
    "poisson": {},
    "several passes": {"sampler": SEVERAL},
    "full batch": {"sampler": FullBatch(N, 3)},
    "streamed": {"data_on": "host"},
    "a loss that draws": {"loss": dropping},
    "placed": {"placement": Placement.default()},
    "several passes, placed": {"sampler": SEVERAL, "placement": Placement.default()},
}
BANDED = {"sampler": BallsAndBins(N, 8, 3, cycle_length=3), "noise": BandedToeplitz((1, 0.5, 0.2))}
SOUND = {
    **SAMPLERS,
    "bands": BANDED,
    "bands, placed": {**BANDED, "placement": Placement.default()},
    "noise of one's own": {"sampler": BANDED["sampler"], "noise": Own()},
    "lazy tables": {"tables": LazyTables(0.1)},
    "lazy tables with momentum": {"tables": TABLES},
    "lazy tables, streamed": {"tables": TABLES, "data_on": "host"},
    "lazy tables, placed, a loss that draws": {
        "tables": TABLES,
        "placement": Placement.default(),
        "loss": dropping,
    },
    "an optimizer with a schedule": {
        "optimizer": optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 9)),
        )
    },
}


@pytest.mark.short(
    "several passes, placed",
    "full batch",
    "streamed",
    "bands",
    "noise of*",
    "*tables, placed*",
    "an optimizer*",
)
@pytest.mark.parametrize("how", SOUND.values(), ids=SOUND)
def test_sound_programs_pass(how):
    assert faults(**how) == ""


def size(total):
    return optax.tree.norm(total)


def next_multiple(step):
    return jax.lax.while_loop(lambda k: k % 64 != 0, lambda k: k + 1, step)


@dataclass(frozen=True)
class Scaled(Independent):
    """Noise whose scales, or whose key and step, are not those that it is given."""

    how: str = ""

    def add(self, total, state, key, step, scales):
        large = size(total) > 3.0
        off = (step >= 100) & (step < 120)
        stddev, b = scales.noise_stddev, scales.expected_batch_size
        stddev, b, key, step = {
            "large": (jnp.where(large, 0.5, 1.0) * stddev, b, key, step),
            "off": (jnp.where(off, 0.0, stddev), b, key, step),
            "last": (jnp.where(step % 64 == 63, 0.0, stddev), b, key, step),
            "less": (0.9 * stddev, b, key, step),
            "realised": (stddev, jnp.maximum(1.0, size(total)), key, step),
            "key": (stddev, b, key ^ jnp.uint32(large), step),
            "constant key": (stddev, b, jnp.arange(4, dtype=jnp.uint32), step),
            "twice": (stddev, b, key, step // 2),
            "byte": (stddev, b, key, step.astype(jnp.uint8)),
            "float": (stddev, b, key, step.astype(jnp.float32).astype(jnp.int32)),
            "rounded up": (stddev, b, key, next_multiple(step)),
            "bfloat16": (stddev.astype(jnp.bfloat16), b, key, step),
            "whole": (stddev.astype(jnp.int32).astype(jnp.float32), b, key, step),
        }[self.how]
        scales = dataclasses.replace(scales, noise_stddev=stddev, expected_batch_size=b)
        return super().add(total, state, key, step, scales)


@dataclass(frozen=True)
class Mixed(Independent):
    """Noise that not every sum gets, or not at every step."""

    how: str = ""

    def add(self, total, state, key, step, scales):
        raw = jax.tree.map(lambda s: s / scales.expected_batch_size, total)
        moved = jax.tree.map(lambda s: s * (1 + size(total)), total) if self.how == "sum" else total
        noised, state = super().add(moved, state, key, step, scales)
        off = {"leaf": True, "off": (step >= 100) & (step < 120), "last": step % 64 == 63}
        if self.how == "sum":
            return noised, state
        position = jnp.asarray(off[self.how])
        return noised | {"w": jnp.where(position, raw["w"], noised["w"])}, state


@dataclass(frozen=True)
class Given(BandedToeplitz):
    """Correlated noise that is computed, and not what is added."""

    how: str = ""

    def add(self, total, state, key, step, scales):
        from dpsgd.noise.correlated import rounded
        from dpsgd.noise.recursion import next_noise

        last_noise = state[0][0, -D:]
        noise, state = next_noise(total, state, key, step, *rounded(tuple(self.coefficients)))
        noise |= {
            "w": {
                "off": jnp.where((step >= 100) & (step < 120), 0.0, noise["w"]),
                "rows": noise["w"] * (size(total) < 3.0),
                "leaf": jnp.zeros(D),
                "key": jnp.full(D, key[0], jnp.float32),
                "old": last_noise,
                "draw": standard_normal(key, step, (size(total) > 3.0).astype(jnp.uint32), (D,)),
            }[self.how]
        }
        state = jax.tree.map(lambda x: x + size(total), state) if self.how == "rows" else state
        scaling = {"divisor": scales.expected_batch_size, "noise": noise, "spread": self.spread}
        return add_gaussian_noise(total, key, step, scales.noise_stddev, **scaling), state


@dataclass(frozen=True)
class Counting(Own):
    """Noise of one band that is zero once its state has counted 500 steps."""

    @property
    def bands(self):
        return 1

    def init(self, like):
        return jnp.int32(0)

    def add(self, total, state, key, step, scales):
        zeros, b = jax.tree.map(jnp.zeros_like, total), scales.expected_batch_size
        noise = add_gaussian_noise(zeros, key, step, scales.noise_stddev)
        mean = jax.tree.map(lambda s, n: (s + n * (state < 500)) / b, total, noise)
        return mean, state + 1


@dataclass(frozen=True)
class OwnWrong(Own):
    """The same `+`, of a noise that rows switch off."""

    def add(self, total, state, key, step, scales):
        stddev = jnp.where(size(total) > 3.0, 0.0, scales.noise_stddev)
        return super().add(
            total, state, key, step, dataclasses.replace(scales, noise_stddev=stddev)
        )


@dataclass(frozen=True)
class Again(Independent):
    """Two releases of every sum, or more, of which the mean is trained on."""

    how: str = ""

    def add(self, total, state, key, step, scales):
        def one(total):
            return Independent().add(total, (), key, step, scales)[0]

        def own(s):
            z = standard_normal(key, step, 9, s.shape)
            return (s + scales.noise_stddev * z) / scales.expected_batch_size

        def mean(*trees):
            return jax.tree.map(lambda *xs: sum(xs) / len(xs), *trees)

        def in_a_loop(w):
            return jax.lax.fori_loop(0, 2, lambda _, x: x + one(total["w"]) / 2, jnp.zeros_like(w))

        def copies(s):
            return one(jnp.broadcast_to(s, (4, *s.shape))).mean(axis=0)

        def mapped(w):
            def given(z):
                scaling = {"divisor": scales.expected_batch_size, "noise": z}
                return add_gaussian_noise(w, key, step, scales.noise_stddev, **scaling)

            return jax.vmap(given)(standard_normal(key, step, 9, (2, D))).mean(axis=0)

        w = total["w"]
        noise_by_name = {
            "numbered": lambda: mean(*one({"a": total, "b": total}).values()),
            "by its own +": lambda: mean(one(total), jax.tree.map(own, total)),
            "in parts": lambda: one(total) | {"w": mean(one([w, w[:3]])[0], one(w))},
            "gathered": lambda: one(total) | {"w": one(w[jnp.zeros(D, jnp.int32)])},
            "in a loop": lambda: one({"table": total["table"]}) | {"w": in_a_loop(w)},
            "in a called loop": lambda: one(total) | {"w": jax.jit(in_a_loop)(w)},
            "copies": lambda: jax.tree.map(copies, total),
            "mapped": lambda: one(total) | {"w": mapped(w)},
        }
        return noise_by_name[self.how](), state


def update_of(change):
    """An algorithm's update, with `change` made to what it returns."""

    def replaced(algorithm):
        def update(state, total, key, scales):
            next_state, gradient = algorithm.update(state, total, key, scales)
            return change(state, next_state, gradient, total, key)

        return {"update": update}

    return {"change": replaced}


def moving(change):
    """An update that leaves w as `change(w, total, state, gradient, key)` makes it."""

    def moved(state, after, gradient, total, key):
        w = change(after.params["w"], total, state, gradient, key)
        return after._replace(raw_params=after.params | {"w": w}), gradient

    return update_of(moved)


def stepping(change):
    """An update that leaves the number `change(step, total)` of steps."""
    return update_of(
        lambda state, after, gradient, total, key: (
            after._replace(step=change(state.step, total)),
            gradient,
        )
    )


def members_counted(state, after, gradient, total, key):
    adam, *other_states = after.opt_state
    has_rows = jnp.int32(size(total) > 0)
    return after._replace(
        opt_state=(adam._replace(count=adam.count + has_rows), *other_states)
    ), gradient


def shown(state, after, gradient, total, key):
    return after, gradient | {"w": total["w"]}


def aggregated(state, after, gradient, total, key):
    mean = jax.tree.map(lambda m, s: 0.9 * m + s, after.opt_state[0].mu, total)
    return after._replace(opt_state=(after.opt_state[0]._replace(mu=mean), *after.opt_state[1:])), (
        gradient
    )


def skipped(state, after, gradient, total, key):
    taken = size(total) > 0
    return jax.tree.map(lambda x, y: jnp.where(taken, y, x), state, after), gradient


def skipped_by_cond(state, after, gradient, total, key):
    return jax.lax.cond(size(total) > 0, lambda: after, lambda: state), gradient


def shrunk(w, total, *_):
    return jax.lax.fori_loop(0, size(total).astype(jnp.int32), lambda _, w: 0.9 * w, w)


def clip_of_rows(algorithm):
    def clipped_sum(params, batch, weights, scales):
        clip = scales.l2_clip_norm * (1 + weights.mean())
        return algorithm.clipped_sum(
            params, batch, weights, dataclasses.replace(scales, l2_clip_norm=clip)
        )

    return {"clipped_sum": clipped_sum}


def lazily(change):
    def replaced(algorithm):
        def update(state, total, *rest, **how):
            next_state, gradient = algorithm.update(state, total, *rest, **how)
            return change(next_state, total, rest[0]), gradient

        return {"update": update}

    return {"change": replaced, "tables": TABLES}


def key_leaked(after, total, key):
    table = after.lazy_tables[0]
    return after.with_tables({0: table._replace(momentum=table.momentum + key[0])})


def row_leaked(after, total, key):
    table = after.lazy_tables[0]
    return after.with_tables({0: table._replace(values=table.values + total["w"].sum())})


def times_leaked(after, total, key):
    w = after.raw_params["w"] + after.tables[0].steps.sum()
    return after._replace(raw_params=after.raw_params | {"w": w})


ROWS_IN_W = "parameters['w'] .*private rows"
PLANTED = {
    "parameters leaked": (
        moving(lambda w, total, *_: w + 1e-6 * total["w"]), f"{ROWS_IN_W} except through releases"),
    "parameters leaked in the last step": (
        moving(lambda w, total, state, *_: jnp.where(state.step == 35, w + 1e-6 * total["w"], w)),
        ROWS_IN_W),
    "last bits that tell": (
        moving(lambda w, total, *_: w * jnp.where(size(total) > 0, 1 + 2.0**-23, 1)), ROWS_IN_W),
    "a trip count of rows": (moving(shrunk), ROWS_IN_W),
    "a place of rows": (
        moving(lambda w, total, *_: w * jnp.array([1, 0.5])[(size(total) > 3).astype(jnp.int32)]),
        ROWS_IN_W),
    "noise is subtracted": (
        moving(lambda w, total, state, gradient, key:
               gradient["w"] - 0.1 * standard_normal(key, state.step, 1, (D,))),
        "parameters['w'] .*fresh noise"),
    "noise of earlier steps is subtracted": (
        BANDED | moving(lambda w, total, state, *_: w - 0.1 * state.noise[0][0, -D:]),
        "parameters['w'] .*noise of earlier steps"),
    "steps are counted twice": (
        stepping(lambda step, total: step + 2), "step counter does not advance"),
    "steps are counted by rows": (
        stepping(lambda step, total: step + (size(total) > 0)), "step counter does not advance"),
    "members counted": (
        {**update_of(members_counted), "optimizer": ADAM}, "optimizer state.*count.*private rows"),
    "a sum is shown": (update_of(shown), ROWS_IN_W),
    "a sum is kept": (
        {**update_of(aggregated), "optimizer": ADAM}, "optimizer state.*private rows"),
    "skip if empty": (update_of(skipped), "parameters['table'] .*private rows"),
    "skip if empty, by a branch": (update_of(skipped_by_cond), ROWS_IN_W),
    "a leaf without noise": ({"noise": Mixed(how="leaf")}, ROWS_IN_W),
    "noise off in some steps": ({"noise": Mixed(how="off")}, ROWS_IN_W),
    "noise off in a last step": ({"noise": Mixed(how="last")}, ROWS_IN_W),
    "a sum is scaled": ({"noise": Mixed(how="sum")}, "computed from a sum, not to the sum"),
    "half noise": ({"noise": Scaled(how="large")}, "sigma C, computed from private rows"),
    "sigma off": ({"noise": Scaled(how="off")}, "sigma C, computed from .*the step"),
    "sigma off last": ({"noise": Scaled(how="last")}, "sigma C, computed from .*the step"),
    "less noise": ({"noise": Scaled(how="less")}, "sigma C, computed from sigma C"),
    "sigma in 16 bits": ({"noise": Scaled(how="bfloat16")}, "sigma C, computed"),
    "batch size realised": ({"noise": Scaled(how="realised")}, "b, computed from private"),
    "a key of rows": ({"noise": Scaled(how="key")}, "key, computed from private rows"),
    "a constant key": ({"noise": Scaled(how="constant key")}, "key, computed from consta"),
    "a step twice": ({"noise": Scaled(how="twice")}, "the step, computed from the step"),
    "a step in a byte": ({"noise": Scaled(how="byte")}, "the step, computed"),
    "a step in a float": ({"noise": Scaled(how="float")}, "the step, computed"),
    "a step rounded up": ({"noise": Scaled(how="rounded up")}, "the step, computed"),
    "sigma in whole numbers": ({"noise": Scaled(how="whole")}, "sigma C, computed"),
    "bands off": ({**BANDED, "noise": Given((1, 0.5), "off")}, "depends on the step"),
    "bands of rows": ({**BANDED, "noise": Given((1, 0.5), "rows")}, "noise state.* private rows"),
    "bands without noise": ({**BANDED, "noise": Given((1, 0.5), "leaf")}, "no fresh draw"),
    "bands of a draw of rows": (
        {**BANDED, "noise": Given((1, 0.5), "draw")},
        "noise that depends on private rows",
    ),
    "bands of old noise": ({**BANDED, "noise": Given((1, 0.5), "old")}, "no fresh draw"),
    "bands of the key": (
        {**BANDED, "noise": Given((1, 0.5), "key")},
        "depends on no fresh draw and the noise key",
    ),
    "noise that counts its own steps": ({"noise": Counting()}, ROWS_IN_W),
    "own noise of rows": ({**BANDED, "noise": OwnWrong()}, ROWS_IN_W),
    "noise of another generator": ({"noise": Drawn()}, "depends on private rows and the noise key"),
    **{
        f"released again, {how}": ({"noise": Again(how=how)}, named)
        for how, named in {
            "numbered": "a sum is released more than once",
            "by its own +": "a sum is released more than once",
            "in parts": "a sum is released more than once",
            "in a loop": "a sum is released more than once",
            "in a called loop": "a sum is released more than once",
            "gathered": "computed from a sum, not to the sum",
            "copies": "computed from a sum, not to the sum",
            "mapped": "computed from a sum, not to the sum",
        }.items()
    },
    "C of rows": ({"change": clip_of_rows}, "in place of C, computed from .*private"),
    "rows of a table leaked": (lazily(row_leaked), "tables.*values depends on private rows"),
    "the key in a table": (lazily(key_leaked), "tables.*momentum depends on the noise key"),
    "times of a table leaked": (lazily(times_leaked), "parameters['w'] .*rows of tables were read"),
}  # fmt: skip


@pytest.mark.parametrize(("how", "named"), PLANTED.values(), ids=PLANTED)
def test_planted_bugs_are_named(how, named):
    messages = faults(**how)
    pattern = named.replace("['", r"\['").replace("']", r"'\]")
    assert re.search(pattern, messages), messages


@pytest.mark.parametrize("part", ["values", "momentum"])
def test_a_flush_without_noise_is_named(part, monkeypatch):
    sound = lazy.flushed_table

    def unnoised(table, *passes, **how):
        return sound(table, *passes, **how)._replace(**{part: getattr(table, part)})

    monkeypatch.setattr(lazy, "flushed_table", unnoised)
    sampler = Poisson(
        N, 8, {"values": 5, "momentum": 7}[part]
    )  # of shapes no other test has traced
    assert "a table is flushed without noise" in faults(sampler=sampler, tables=TABLES)


def test_a_flush_under_another_key_is_named(monkeypatch):
    sound = lazy.flushed_table

    def rekeyed(table, *passes, noise_key, **how):
        return sound(table, *passes, noise_key=noise_key ^ jnp.uint32(1), **how)

    monkeypatch.setattr(lazy, "flushed_table", rekeyed)
    assert "key, computed from the noise key" in faults(sampler=Poisson(N, 8, 9), tables=TABLES)
