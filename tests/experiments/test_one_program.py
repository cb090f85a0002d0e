"""One program: a run compiles its training step once in a process, and its scoring once."""

import logging
import os
import signal

import jax
import pytest

from dpsgd.runs.stop import Stopped
from dpsgd.training import programs as compiled_programs
from experiments import programs
from experiments import train as training
from experiments.cli import config
from experiments.tasks.clicks import predict


@pytest.fixture
def compiled(caplog):
    """Says how often a function of this name was compiled so far."""

    def count(name):
        return sum(f"Compiling jit({name})" in message for message in caplog.messages)

    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        yield count


def new_process():
    programs.click_algorithm.cache_clear()
    compiled_programs._compiled.cache_clear()
    predict._scorer.cache_clear()


@pytest.mark.parametrize(
    ("sampler", "data_on"),
    [
        (config.Shuffle(batch_size=16, epochs=3), "device"),
        (config.BallsAndBins(16, 3, max_batch_size=5, overflow="accumulate"), "host"),
    ],
    ids=["one pass, device", "several passes, host"],
)
def test_a_run_compiles_its_step_once_and_so_does_its_resumption(
    sampler, data_on, store, tmp_path, compiled, monkeypatch
):
    counts, taken = [], []
    train_blocks = training.train_blocks

    def counting(*args, **options):
        before = compiled("_run_block")
        for block in train_blocks(*args, block_steps=8, **options):
            counts.append(compiled("_run_block") - before)
            taken.extend(block.steps)
            if len(counts) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            yield block

    monkeypatch.setattr(training, "train_blocks", counting)
    monkeypatch.setattr(training, "audit_run", lambda *of: "made")  # it compiles a step of its own
    asked = config.TrainConfig(
        data=store, sampler=sampler, out=tmp_path / "run", noise_multiplier=1.0, embedding_dim=2,
        max_buckets=8, hidden=(4,), data_on=data_on,
    )  # fmt: skip
    new_process()
    with pytest.raises(Stopped):
        training.train(asked)
    new_process()
    training.resume(asked.out)
    assert taken == list(range(30))
    assert len(counts) >= 4
    assert set(counts) == {1}
    assert compiled("apply") == 1  # validation and test rows are scored by one program
