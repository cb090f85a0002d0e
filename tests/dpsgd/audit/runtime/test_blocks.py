"""What the loop gives to blocks is seen in them: other batches, keys, scales or steps."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import Mechanism, dpsgd
from dpsgd.audit.probe import Probe
from dpsgd.audit.runtime.blocks import block_checks
from dpsgd.engine import feed, loop
from dpsgd.noise.keys import RootKey
from samplers import BallsAndBins, FullBatch, Multistage, Poisson, Shuffle, UnitTree

pytestmark = [pytest.mark.audit, pytest.mark.usefixtures("unoptimised")]

N, D = 240, 20
ROWS = {"x": np.random.default_rng(0).normal(size=(64, D)).astype(np.float32)}
BATCHES = "blocks train on the drawn batches"
FIRST = "the loop's first step releases the gradient of its batch"
STEPS = "blocks use the keys, scales and steps of the run"
SHUFFLE = Shuffle(N, 20, 20)  # 240 steps: the blocks that are looked at begin in an epoch's midst


def loss_fn(params, example):
    return jnp.sum(jnp.square(jnp.vdot(params, example["x"].mean(axis=tuple(range(
        example["x"].ndim - 1)))) - 1))  # fmt: skip


ALGORITHM = dpsgd(loss_fn, optax.sgd(0.1))


def audited(sampler, *noise, step=0):
    mechanism = Mechanism(sampler, 1.0, 0.5, *noise)
    state = ALGORITHM.init(np.zeros(D, np.float32), mechanism)._replace(step=jnp.int32(step))
    return Probe(ALGORITHM, mechanism, state, ROWS, root=RootKey.from_insecure_seed(2))


def failed(program):
    return {check.name for check in block_checks(program) if not check.passed}


TREE = UnitTree.from_columns({"user": np.arange(N) // 6})


@pytest.mark.short("sampler0*", "sampler2*")
@pytest.mark.parametrize(
    ("sampler", "noise", "step"),
    [
        (SHUFFLE, (), 0),
        (SHUFFLE, (), 239),
        pytest.param(Poisson(N, 20, 2), (), 0, marks=pytest.mark.long),
        (BallsAndBins(N, 20, 8, overflow="accumulate", max_batch_size=8), (), 0),
        (Multistage(TREE, (5, 4), steps=70, clipped_level=1), (), 0),
    ],
)
def test_sound_blocks_pass(sampler, noise, step):
    assert not failed(audited(sampler, *noise, step=step))


def test_a_leaf_without_coordinates_hides_no_missing_noise():
    def loss(params, example):
        return loss_fn(params["w"], example) + jnp.sum(example["x"][..., :0] @ params["none"])

    algorithm, mechanism = dpsgd(loss, optax.sgd(0.1)), Mechanism(SHUFFLE, 1.0, 0.5)
    params = {"none": np.zeros((0, 1), np.float32), "w": np.zeros(D, np.float32)}
    state = algorithm.init(params, mechanism)
    checks = block_checks(Probe(algorithm, mechanism, state, ROWS))
    assert all(check.passed for check in checks)


def first_batches_again(patch):
    def plans(*arguments, sound=feed.plan_blocks, **named):
        first = None
        for steps, plan in sound(*arguments, **named):
            first = plan if first is None else first
            yield steps, plan._replace(indices=first.indices, weights=first.weights)

    patch.setattr(feed, "plan_blocks", plans)


def dispatched(patch, change):
    """Changes the arguments of what the loop runs, and of nothing else."""

    def compiled(*of, sound=loop.compiled_block):
        program = sound(*of)
        return lambda *arguments: program(*change(*arguments))

    patch.setattr(loop, "compiled_block", compiled)


def public_key(is_public):
    """Plants a public noise key in the blocks that `is_public` selects.

    `is_public` takes the steps (start, stop) of all blocks so far, that of the block last.
    """

    def plant(patch):
        blocks = []

        def change(state, inputs):
            start = int(state.step)
            blocks.append((start, start + int(inputs.plan.num_steps)))
            key = inputs.noise_key
            return state, inputs._replace(
                noise_key=jnp.zeros_like(key) if is_public(blocks) else key
            )

        dispatched(patch, change)

    plant.__name__ = f"public_key_{is_public.__name__}"
    return plant


def after_the_first(blocks):
    return len(blocks) > 1


def in_the_middle_of_the_run(blocks):
    return 64 <= blocks[-1][0] < SHUFFLE.num_steps - 67


def continued_before_the_last(blocks):
    """Returns True for a block that continues the one before it, and is not the run's last."""
    start, stop = blocks[-1]
    return len(blocks) > 1 and blocks[-2][1] == start and stop < SHUFFLE.num_steps


def of_several_steps(blocks):
    return blocks[-1][1] - blocks[-1][0] > 2


def full_near_the_end(blocks):
    start, stop = blocks[-1]
    return stop - start == 64 and start > 64


def as_short_as_the_last_of_the_run(blocks):
    start, stop = blocks[-1]
    return stop == SHUFFLE.num_steps and stop - start == SHUFFLE.num_steps % 64


def no_noise_in_the_first_block(patch):
    first_steps = []

    def change(state, inputs):
        first_steps.append(int(state.step))
        faint = dataclasses.replace(inputs.scales, noise_stddev=np.float32(2.0**-100))
        return state, inputs._replace(scales=faint if len(first_steps) == 1 else inputs.scales)

    dispatched(patch, change)


def the_keys_of_the_first_attempt(patch):
    def first(algorithm, keys, sound=loop.keys_of):
        return sound(algorithm, dataclasses.replace(keys, attempt=0))

    patch.setattr(loop, "keys_of", first)


def declared_in_part(patch):
    def blocks(*arguments, declare, sound=loop.train_blocks, **named):
        return sound(*arguments, declare=lambda steps: declare(steps[:-1]), **named)

    patch.setattr("dpsgd.audit.probe.train_blocks", blocks)


@pytest.mark.parametrize(
    ("plant", "checks", "sampler"),
    [
        (declared_in_part, {STEPS}, SHUFFLE),
        (first_batches_again, {BATCHES}, SHUFFLE),
        (public_key(after_the_first), {STEPS}, SHUFFLE),
        (public_key(in_the_middle_of_the_run), {STEPS}, SHUFFLE),
        (public_key(continued_before_the_last), {STEPS}, SHUFFLE),
        (public_key(full_near_the_end), {STEPS}, SHUFFLE),
        (public_key(as_short_as_the_last_of_the_run), {STEPS}, SHUFFLE),
        (public_key(of_several_steps), {STEPS}, Shuffle(N, 20)),  # 12 steps: no block is full
        (no_noise_in_the_first_block, {FIRST}, SHUFFLE),
        (the_keys_of_the_first_attempt, {STEPS}, SHUFFLE),
    ],
)
def test_a_bug_of_the_loop_is_seen(plant, checks, sampler, monkeypatch):
    program = audited(sampler)
    plant(monkeypatch)
    found = failed(program)
    assert checks <= found <= checks | {FIRST}


def test_other_rows_of_as_many_examples_are_seen_without_floats(monkeypatch):
    def loss(params, example):
        return jnp.sum(params[example["ids"]])

    algorithm, mechanism = dpsgd(loss, optax.sgd(0.1)), Mechanism(SHUFFLE, 1.0, 0.5)
    rows = {"ids": np.arange(64, dtype=np.int32)[:, None] % D}
    state = algorithm.init(np.zeros(D, np.float32), mechanism)
    program = Probe(algorithm, mechanism, state, rows, root=RootKey.from_insecure_seed(2))
    assert not failed(program)

    def next_rows(*arguments, sound=feed.plan_blocks, **named):
        for steps, plan in sound(*arguments, **named):
            yield steps, plan._replace(indices=(plan.indices + 1) % N)

    monkeypatch.setattr(feed, "plan_blocks", next_rows)
    assert failed(program) == {FIRST}


@pytest.mark.long
def test_audit_checks_every_pass_of_sums_above_2_24_rows():
    def product(params, example):
        return params * example["x"]

    algorithm = dpsgd(product, optax.sgd(0.1))
    full = FullBatch(2**24 + 3)
    mechanism = Mechanism(full, 1.0, 0.5)
    state = algorithm.init(np.zeros((), np.float32), mechanism)
    rows = {"x": ROWS["x"][:, 0]}
    program = Probe(algorithm, mechanism, state, rows, root=RootKey.from_insecure_seed(2))
    assert not failed(program)

    def all_but_the_last_pass(*arguments, sound=loop.compiled_block):
        compiled = sound(*arguments)

        def run(state, inputs):
            starts = np.maximum(np.asarray(inputs.plan.starts) - 1, 0)
            plan = inputs.plan._replace(starts=jnp.asarray(starts))
            return compiled(state, inputs._replace(plan=plan))

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "compiled_block", all_but_the_last_pass)
        assert BATCHES in failed(program)
