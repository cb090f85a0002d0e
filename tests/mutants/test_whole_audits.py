"""Whole audits at real sizes, each of a library into which one fault is planted.

A fault goes around one of the functions of `planting.SEAMS`, and the audit runs as it does before a
run. Faults of draws that a sampler can have by itself are in `test_sampler_mutants.py`; others of
the noise, which the same comparison catches wherever it is drawn, in `test_noise_mutants.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from planting import SEAMS, Fault, after, before, largest_norm, plant, planted, seam

from dpsgd import Mechanism, dpsgd
from dpsgd.audit import audit
from dpsgd.core.algorithm import privatize
from dpsgd.noise.keys import RootKey
from samplers import Poisson

pytestmark = [pytest.mark.mutants, pytest.mark.usefixtures("unoptimised")]

# Of the scales that a step is given.


def quieter(scales, where, factor=0.0):
    """The scales of a step, with another noise where that is so."""
    return {
        "scales": dataclasses.replace(
            scales, noise_stddev=jnp.where(where, factor, 1.0) * scales.noise_stddev
        )
    }


def rescaled(field, factor):
    """A fault of the scales of a mechanism: one of them, times `factor(mechanism)`."""

    def changed(found, self):
        number = np.float32(factor(self)) * getattr(found, field)
        return dataclasses.replace(found, **{field: number})

    return Fault("scales", after(changed))


def steps_noise(change):
    """A fault of the noise's scale in a step of a block."""
    return Fault("step", before(change))


def size_of(plan, j):
    return jnp.sum(plan.weights[plan.starts[j]])


def divided_by(scales, size):
    return {"scales": dataclasses.replace(scales, expected_batch_size=jnp.maximum(1.0, size))}


# Of noise that is drawn.


def of_noise(change):
    """`change` makes other noise of that of the leaves, and of a function that draws them."""

    def make(sound):
        def faulty(tree, noise_key, step, stddev, *, divisor=1.0, **how):
            zeros = jax.tree.map(jnp.zeros_like, tree)

            def draw(leaf, number=None, step=step, key=noise_key):
                """Noise of a leaf's shape, as of another number and step."""
                number = leaf_number(leaf) if number is None else number
                named = key.at[2].set(key[2] ^ jnp.uint32(number))
                return sound({"": jnp.zeros(leaf.shape)}, named, step, stddev, **how)[""]

            leaves, structure = jax.tree.flatten(zeros)
            numbers = {id(leaf): number for number, leaf in enumerate(leaves)}

            def leaf_number(leaf):
                return numbers[id(leaf)]

            noise = jax.tree.leaves(sound(zeros, noise_key, step, stddev, **how))
            noise = jax.tree.unflatten(structure, change(leaves, noise, draw, step, stddev))
            return jax.tree.map(lambda s, n: (s + n) / divisor, tree, noise)

        return faulty

    return make


def each(change):
    """A fault of each leaf's noise by itself, in standard deviations."""

    def of_all(leaves, noise, draw, step, stddev):
        scale = jnp.maximum(stddev, 2.0**-100)
        return [stddev * change(z / scale) for z in noise]

    return Fault("noise", of_noise(of_all))


def at(z, where):
    """Where a coordinate of an array has such a place."""
    return where(jnp.arange(z.size)).reshape(z.shape)


def leaves_share(distance):
    def of_all(leaves, noise, draw, step, stddev):
        return [draw(leaf, k % distance) for k, leaf in enumerate(leaves)]

    return Fault("noise", of_noise(of_all), kind="leaves")


def interchangeable(leaves, noise, draw, step, stddev):
    step = jnp.uint32(step)
    return [draw(leaf, k + step, k * step) for k, leaf in enumerate(leaves)]


# Of the update.


def with_raw(change):
    """A fault of what a step leaves, which sees the step that it would be without noise."""

    def make(sound):
        def faulty(self, state, total, noise_key, scales, **how):
            outputs = sound(self, state, total, noise_key, scales, **how)
            raw = jax.tree.map(
                lambda x, p: (x / scales.expected_batch_size).astype(p.dtype),
                total,
                state.params,
            )
            updates, opt_state = self.optimizer.update(raw, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            next_state = outputs[0]._replace(raw_params=params, opt_state=opt_state)
            return change(outputs, (next_state, raw))

        return faulty

    return make


def leaking(found, raw):
    gradient = raw[1]
    params = jax.tree.map(lambda p, r: (p + 1e-3 * r).astype(p.dtype), found[0].params, gradient)
    return found[0]._replace(raw_params=params), found[1]


def released_twice(sound):
    """The update sees the mean of two releases of the sum, of which one is shown."""

    def faulty(self, state, total, noise_key, scales, **how):
        next_state, released = sound(self, state, total, noise_key, scales, **how)
        doubled, _ = privatize((total, total), state.noise, noise_key, state.step, scales)
        mean = jax.tree.map(lambda x, y, p: ((x + y) / 2).astype(p.dtype), *doubled, state.params)
        updates, opt_state = self.optimizer.update(mean, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return next_state._replace(raw_params=params, opt_state=opt_state), released

    return faulty


def second_moment(found, raw):
    leaves, structure = jax.tree.flatten(found[0].opt_state)
    last = leaves[-1] + 1e-3 * jax.tree.leaves(raw[1])[-1].astype(leaves[-1].dtype)
    opt_state = jax.tree.unflatten(structure, [*leaves[:-1], last])
    return found[0]._replace(opt_state=opt_state), found[1]


# Of the sum.


def loosely(where):
    """A fault of the clipping of examples in some places of the batch."""

    def make(sound):
        def faulty(self, params, batch, weights, scales, *rest, **how):
            def of(mask, clip):
                scaled = dataclasses.replace(scales, l2_clip_norm=clip)
                return sound(self, params, batch, weights * mask, scaled, *rest, **how)

            mask = where(jnp.arange(weights.size), weights.size).astype(weights.dtype)
            clip = jnp.asarray(scales.l2_clip_norm, jnp.float32)
            total, log = of(1 - mask, clip)
            return jax.tree.map(jnp.add, total, of(mask, jnp.inf * clip)[0]), log

        return faulty

    return make


def filling_counts(sound):
    def faulty(self, params, batch, weights, scales, *rest, **how):
        total, log = sound(self, params, batch, weights, scales, *rest, **how)
        again = weights * (jnp.arange(weights.size) < -weights.size % 100)
        second_sum, _ = sound(self, params, batch, again, scales, *rest, **how)
        return jax.tree.map(jnp.add, total, second_sum), log

    return faulty


def later_passes_loosely(sound):
    def faulty(self, state, j, inputs, *rest, **how):
        starts, scales = inputs.plan.starts, inputs.scales
        first = jnp.minimum(starts[j] + 1, starts[j + 1])
        loose = dataclasses.replace(scales, l2_clip_norm=jnp.inf * scales.l2_clip_norm)
        outputs = []
        for place, step_scales in ((j + 1, scales), (j, loose)):
            plan = inputs.plan._replace(starts=starts.at[place].set(first))
            step_inputs = inputs._replace(plan=plan, scales=step_scales)
            outputs.append(sound(self, state, j, step_inputs, *rest, **how))
        return jax.tree.map(jnp.add, *outputs)

    return faulty


def first_pass_alone(j, plan):
    first = jnp.minimum(plan.starts[j] + 1, plan.starts[j + 1])
    return {"plan": plan._replace(starts=plan.starts.at[j + 1].set(first))}


def nan_counts(sound):
    def faulty(factor, x):
        x = jnp.nan_to_num(x.astype(jnp.float32), nan=1.0)
        return sound(factor._replace(keep=factor.keep | (factor.target > 0)), x)

    return faulty


# Of what the loop gives to blocks.


def in_block(sound):
    def faulty(self, state, j, *rest):
        next_state, *outputs = sound(self, state._replace(step=j), j, *rest)
        return next_state._replace(step=state.step + 1), *outputs

    return faulty


def blocks_by_twos(sound):
    def faulty(step, state, *rest, **how):
        wrong_step = state.step // 128 * 64 + state.step % 64
        next_state, *outputs = sound(step, state._replace(step=wrong_step), *rest, **how)
        return next_state._replace(step=next_state.step - wrong_step + state.step), *outputs

    return faulty


def public_key(run):
    """The second of two blocks of a run, one after the other, has a public key."""
    if isinstance(run, jax.stages.Traced):
        return run
    stop = []

    def faulty(state, inputs):
        step = int(state.step)
        key = inputs.noise_key * np.uint32(step not in stop)
        stop[:] = [step + int(inputs.plan.num_steps)]
        return run(state, inputs._replace(noise_key=key))

    return faulty


def first_plan(found):
    first = None
    for steps, plan in found:
        first = first or plan
        yield steps, first


STEPS = {
    "no noise at the first step of a block": steps_noise(lambda scales, j: quieter(scales, j == 0)),
    "no noise in blocks that are not full": steps_noise(
        lambda scales, plan: quieter(scales, plan.num_steps < plan.starts.shape[0] - 1)
    ),
    "no noise at the first step of the run": steps_noise(
        lambda scales, state: quieter(scales, state.step == 0)
    ),
    "no noise in every 50th step": steps_noise(
        lambda scales, state: quieter(scales, state.step % 50 == 49)
    ),
    "less noise for small batches": steps_noise(
        lambda scales, plan, j: quieter(scales, size_of(plan, j) < 4, 0.5)
    ),
    "less noise for large batches": steps_noise(
        lambda scales, plan, j: quieter(scales, size_of(plan, j) > plan.indices.shape[1] / 2, 0.5)
    ),
    "the step within the block names the noise": Fault("step", in_block),
    "a public key from the second block on": Fault("executable", after(public_key)),
    "the key of the first attempt for all": Fault(
        "keys", before(lambda keys: {"keys": dataclasses.replace(keys, attempt=0)})
    ),
    "the noise of a block used for the next one as well": Fault("block", blocks_by_twos),
    "every block trains on the first one's batches": Fault("plans", after(first_plan)),
    "leaves k and k + 32 share noise": leaves_share(32),
    "no noise in leaves above 2^20": dataclasses.replace(
        each(lambda z: z * (z.size <= 2**20)), kind="leaves"
    ),
    "half the noise in leaves of one entry": Fault(
        "noise",
        before(lambda tree: {"tree": jax.tree.map(lambda x: x * (1 + (x.size == 1)), tree)}),
    ),
    "step and leaf are interchangeable": Fault("noise", of_noise(interchangeable)),
    "no noise in the last entry of large leaves": each(
        lambda z: z * at(z, lambda i: (i < z.size - 1) | (z.size <= 4096))
    ),
    "momentum is made of sums without noise": Fault(
        "update", with_raw(lambda found, raw: (raw[0], found[1]))
    ),
    "the optimizer's state is made of sums without noise": Fault(
        "update",
        with_raw(lambda found, raw: (found[0]._replace(opt_state=raw[0].opt_state), found[1])),
    ),
    "a thousandth of the sum is added to the parameters": Fault("update", with_raw(leaking)),
    "the mean of two releases of a sum is trained on": Fault("update", released_twice),
    "the second moment sees the sum": Fault("update", with_raw(second_moment)),
    "divided by the realised size": Fault(
        "step", before(lambda scales, plan, j: divided_by(scales, size_of(plan, j)))
    ),
    "a step is the sum of its first pass": Fault(
        "step's sum", before(first_pass_alone), kind="passes"
    ),
    "the mechanism's scales with 2 % more clip": rescaled("l2_clip_norm", lambda of: 1.02),
    "the mechanism's scales with twice the clip": rescaled("l2_clip_norm", lambda of: 2),
    "the noise scaled to sigma, without C": rescaled("noise_stddev", lambda of: of.l2_clip_norm),
    "the neighbour's norm in microbatches above 64": Fault(
        "factor",
        before(lambda norm: {"norm": jax.tree.map(lambda x: jnp.roll(x, int(x.size > 64)), norm)}),
    ),
    "the last example of a microbatch is not clipped": Fault(
        "clipped sum",
        loosely(lambda i, size: i % 100 == 99),
    ),
    "the first example of a batch is not clipped": Fault(
        "clipped sum", loosely(lambda i, size: i == 0)
    ),
    "microbatches after the first are not clipped": Fault(
        "clipped sum", loosely(lambda i, size: i >= 100)
    ),
    "twice the clip in batches above 256": Fault(
        "clipped sum",
        before(
            lambda scales, weights: {
                "scales": dataclasses.replace(
                    scales, l2_clip_norm=scales.l2_clip_norm * (1 + (weights.size > 256))
                )
            }
        ),
    ),
    "gradients a thousand times too long are not clipped": Fault(
        "factor",
        before(
            lambda norm, l2_clip_norm: {
                "l2_clip_norm": jnp.where(
                    norm.scale * norm.length > 1000 * l2_clip_norm, jnp.inf, l2_clip_norm
                )
            }
        ),
    ),
    "the filling of the last microbatch counts": Fault("clipped sum", filling_counts),
    "padding counts in one place": Fault(
        "clipped sum", before(lambda weights: {"weights": weights.at[7].set(1)})
    ),
    "padding counts where it is not row 0": Fault(
        "step's sum",
        before(
            lambda plan: {
                "plan": plan._replace(weights=jnp.where(plan.indices > 0, 1.0, plan.weights))
            }
        ),
    ),
    "leaves are clipped one by one": Fault("combined", after(largest_norm)),
    "the norm leaves out the last leaf": Fault(
        "combined", before(lambda squares: {"squares": squares[: max(1, len(squares) - 1)]})
    ),
    "repeated rows are summed after the norm": Fault("repeated", after(lambda found, h: h)),
    "NaN counts as a number": Fault("selected", nan_counts),
    "passes after the first are not clipped": Fault(
        "step's sum", later_passes_loosely, kind="passes"
    ),
}


# The step: batches of 397 places in microbatches of 100, full blocks, leaves of two types.

N = 20_000
SAMPLERS = {
    "": Poisson(N, 256, 15),
    "leaves": Poisson(N, 256),
    "passes": Poisson(N, 256, overflow="accumulate", max_batch_size=150),
}


def params_of(kind):
    rng = np.random.default_rng(0)
    large = kind == "leaves"

    def normal(*shape, dtype=np.float32):
        return (0.1 * rng.normal(size=shape)).astype(dtype)

    few = {f"a{k:02}": normal(16) for k in range(20 if large else 2)}
    few |= {
        f"b{k:02}": normal(5, 7, dtype=jnp.bfloat16 if k % 2 else np.float32)
        for k in range(12 if large else 2)
    }
    few |= {"c": normal(16, 300), "d": normal(300), "e": normal(300), "t": normal()}
    few["table"] = normal(2**18 + 1 if large else 1000, 4)
    return few | {"z": normal(300, dtype=jnp.bfloat16)}


def loss_fn(params, example):
    x, few = example["x"], params["table"][example["ids"] % len(params["table"])]
    hidden = jnp.tanh(x @ params["c"] + params["d"] + jnp.tile(few.sum(axis=0), 75))
    out = jnp.dot(hidden, params["e"] + params["z"].astype(jnp.float32)) + params["t"]
    for name, leaf in params.items():
        if name.startswith("a"):
            out += jnp.dot(leaf, x) * (int(name[1:]) + 1) / 10
        elif name.startswith("b"):
            out += jnp.sum(leaf.astype(jnp.float32) * x[:5, None] * x[None, :7])
    return optax.sigmoid_binary_cross_entropy(out, example["y"]) + 0.5 * out


def rows():
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(64, 16)).astype(np.float32),
        "ids": rng.integers(0, 2**18, (64, 3)).astype(np.int32),
        "y": rng.integers(0, 2, 64).astype(np.float32),
    }


def audited(kind):
    root = RootKey.from_insecure_seed(5)
    algorithm = dpsgd(loss_fn, optax.adam(1e-3), microbatch_size=100)
    mechanism = Mechanism(SAMPLERS[kind], 0.8, 0.5)
    return audit.audit_program(algorithm, mechanism, params_of(kind), rows(), root=root)


def failed(checks):
    return {check.name for check in checks if not check.passed}


@pytest.mark.parametrize("name", SEAMS)
def test_every_seam_is_a_function_of_the_library(name):
    owner, last, _, function = seam(name)
    assert callable(function)
    assert getattr(owner, last) is not None


@pytest.mark.parametrize("fault", STEPS.values(), ids=STEPS)
def test_a_fault_can_still_be_planted(fault, monkeypatch):
    plant(fault, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("fault", STEPS.values(), ids=STEPS)
def test_a_fault_of_the_step_is_caught_by_the_audit_of_a_run(fault):
    with planted(fault):
        assert failed(audited(fault.kind).checks)


@pytest.mark.long
@pytest.mark.parametrize("kind", SAMPLERS)
def test_without_a_bug_the_audit_of_a_run_passes(kind):
    assert not failed(audited(kind).checks)
