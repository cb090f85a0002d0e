"""To resume is to know one integer: however a run is cut, its parameters are the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import BandedToeplitz, Mechanism, dpsgd, train_blocks
from dpsgd.engine import loop
from dpsgd.runs.checkpoint import Checkpoint, Checkpoints
from samplers import BallsAndBins, Deterministic, Poisson, Shuffle

pytestmark = pytest.mark.usefixtures("optimised")  # bits are the claim

SIZES = {"num_examples": 90, "batch_size": 8, "epochs": 2}  # 12 steps an epoch
SAMPLERS = [
    Deterministic(**SIZES),
    Shuffle(**SIZES),
    Poisson(**SIZES, max_batch_size=32),  # of one width: they share programs
    BallsAndBins(**SIZES, max_batch_size=32),
    BallsAndBins(**SIZES, assignment="fixed", max_batch_size=32),
    Poisson(**SIZES, overflow="accumulate", max_batch_size=3),
    BallsAndBins(**SIZES, max_batch_size=10, num_shards=3),
]
QUICK = [*SAMPLERS[:-1], pytest.param(SAMPLERS[-1], marks=pytest.mark.long)]
SEED = 3


def loss(params, example):
    return (example["x"] @ params["w"] - example["y"]) ** 2


ALGORITHM = dpsgd(loss, optax.adam(optax.cosine_decay_schedule(0.1, SAMPLERS[0].num_steps)))


def mechanism(sampler, noise_multiplier=1.0):
    return Mechanism(sampler, noise_multiplier, 1.0)


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SIZES["num_examples"], 3)).astype(np.float32)
    return {"x": x, "y": x.sum(axis=1)}


def initial():
    return ALGORITHM.init({"w": jnp.zeros(3)})


def run(mechanism, state, **how):
    """The steps at which blocks end, and the last state."""
    ends = []
    how = {"insecure_seed": SEED, "block_steps": 4, **how}
    for block in train_blocks(ALGORITHM, mechanism, state, data(), **how):
        ends.append(block.steps.stop)
        state = block.state
    return ends, state


def assert_same_bits(a, b):
    def bits(leaf):
        return np.asarray(leaf).tobytes()

    assert jax.tree.map(bits, a) == jax.tree.map(bits, b)


@pytest.mark.short("Shuffle*")
@pytest.mark.parametrize("sampler", QUICK, ids=repr)
def test_a_resumed_run_ends_in_the_same_bits(sampler, tmp_path):
    private, checkpoints = mechanism(sampler), Checkpoints(tmp_path / "checkpoints")
    ends = []
    blocks = train_blocks(ALGORITHM, private, initial(), data(), insecure_seed=SEED, block_steps=4)
    for block in blocks:
        ends.append(block.steps.stop)
        if len(ends) == 2:
            checkpoints.save(Checkpoint(block.state, "", 0.0))
    assert ends[-1] == sampler.num_steps
    rest, resumed = run(private, checkpoints.latest(initial()).state)
    assert rest == ends[2:]
    assert_same_bits(resumed, block.state)


def test_block_runs_only_after_it_is_declared(monkeypatch):
    private = mechanism(SAMPLERS[1])
    happened = []

    def declare(steps):
        if steps.start == 8:
            raise OSError("disk full")
        happened.append(("declared", steps))

    def compile_block(*of, compiled=loop.compiled_block):
        run_block = compiled(*of)

        def running(state, *inputs):
            happened.append(("runs", int(state.step)))
            return run_block(state, *inputs)

        return running

    monkeypatch.setattr(loop, "compiled_block", compile_block)
    blocks = train_blocks(
        ALGORITHM, private, initial(), data(), insecure_seed=SEED, block_steps=4, declare=declare
    )
    for first in (0, 4):  # nothing is declared, and no noise is drawn, ahead of its block
        assert next(blocks).steps.start == first
        assert happened[-2:] == [("declared", range(first, first + 4)), ("runs", first)]
    with pytest.raises(OSError, match="disk full"):
        next(blocks)
    assert len(happened) == 4


def test_run_keeps_its_first_program_when_settings_change(monkeypatch):
    used = []

    def compile_block(*of, compiled=loop.compiled_block):
        used.append(compiled(*of))
        return used[-1]

    monkeypatch.setattr(loop, "compiled_block", compile_block)
    blocks = train_blocks(
        ALGORITHM, mechanism(SAMPLERS[1]), initial(), data(), insecure_seed=SEED, block_steps=4
    )
    next(blocks)
    with jax.default_matmul_precision("bfloat16"):
        next(blocks)
    assert len(used) == 1


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_resuming_draws_one_epoch_however_many_were_done(sampler, monkeypatch):
    sampler = sampler.with_epochs(200_000)
    private = mechanism(sampler)
    first = sampler.num_steps - 4
    drawn, planned, usual = [], [], type(sampler).shard_plan

    def shard_plan(self, seed, epoch, shard):
        drawn.append(epoch)
        return usual(self, seed, epoch, shard)

    monkeypatch.setattr(type(sampler), "shard_plan", shard_plan)
    idle = lambda state, *inputs: (state, None, None)  # noqa: E731  what is drawn is asked, not trained
    monkeypatch.setattr(loop, "compiled_block", lambda *of: idle)
    start = initial()._replace(step=jnp.int32(first))
    ends, _ = run(private, start, declare=planned.append)
    assert ends[-1] == sampler.num_steps
    assert [step for steps in planned for step in steps] == [*range(first, sampler.num_steps)]
    assert set(drawn) == {sampler.drawn_epoch(199_999)}


WHOLE = {"num_examples": 260, "batch_size": 20, "epochs": 10}
"""130 steps: two full blocks of 64 and a short one."""
WHOLE_RUNS = {
    "batches that are cut": Mechanism(Poisson(**WHOLE, max_batch_size=22), 0.7, 2.0),
    "passes": Mechanism(BallsAndBins(**WHOLE, overflow="accumulate", max_batch_size=5), 0.7, 2.0),
    "noise remembered": Mechanism(Deterministic(**WHOLE), 0.7, 2.0, BandedToeplitz((1.0, 0.5))),
}


@pytest.mark.long
@pytest.mark.parametrize("mechanism", WHOLE_RUNS.values(), ids=WHOLE_RUNS)
def test_blocks_of_64_steps_have_the_bits_of_single_steps(mechanism):
    rows = np.random.default_rng(0).normal(size=(260, 64)).astype(np.float32)
    algorithm = dpsgd(
        lambda params, row: (row[1:] @ params - row[0]) ** 2,
        optax.adam(optax.cosine_decay_schedule(0.1, 130)),
    )

    def steps(block_steps):
        seen, state = [], algorithm.init(np.zeros(63, np.float32), mechanism)
        for block in train_blocks(
            algorithm, mechanism, state, rows, insecure_seed=SEED, block_steps=block_steps
        ):
            watched = np.asarray(block.watched)[: len(block.steps)]
            seen.append(np.stack([*block.diagnostics, *watched.T]))
        state = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(block.state)]
        return np.concatenate(seen, axis=1), state

    (together, state), (alone, last) = steps(64), steps(1)
    assert together.shape == (4 + 63, 130)
    assert together.tobytes() == alone.tobytes()
    assert state == last
