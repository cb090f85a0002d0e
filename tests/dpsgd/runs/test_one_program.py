"""One program: a run compiles its training step once in a process, and equal runs share it."""

import logging
import os
import signal

import jax
import pytest
from tiny_task import Line

from dpsgd import RunSpec, resume, run
from dpsgd.engine import loop, programs
from dpsgd.runs import audit, training
from dpsgd.runs.ledger import read
from dpsgd.runs.stop import Stopped
from samplers.settings import SETTINGS


@pytest.fixture
def compiled(caplog):
    """Says how often a function of this name was compiled so far."""

    def count(name):
        return sum(f"Compiling jit({name})" in message for message in caplog.messages)

    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        yield count


@pytest.mark.long
@pytest.mark.parametrize(
    ("sampler", "data_on"),
    [
        pytest.param(
            SETTINGS["shuffle"](batch_size=16, epochs=3), "device", marks=pytest.mark.long
        ),
        (
            SETTINGS["balls-and-bins"](
                batch_size=16, epochs=3, max_batch_size=5, overflow="accumulate"
            ),
            "host",
        ),
    ],
    ids=["one pass, device", "several passes, host"],
)
def test_a_run_compiles_its_step_once_and_so_does_its_resumption(
    sampler, data_on, tmp_path, compiled, monkeypatch
):
    blocks, taken = [], []
    train_blocks = training.train_blocks

    def counting(*args, **options):
        for block in train_blocks(*args, **options):
            blocks.append(block.steps)
            taken.extend(block.steps)
            if len(blocks) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            yield block

    monkeypatch.setattr(training, "train_blocks", counting)
    config = RunSpec.of(sampler, noise_multiplier=1.0, data_on=data_on, audit=False)
    programs._executable.cache_clear()
    with pytest.raises(Stopped):
        run(Line(width=5), config, tmp_path / "run")
    assert compiled("_run_block") == 1  # for the fingerprint, and to train
    programs._executable.cache_clear()
    resume(tmp_path / "run")
    assert compiled("_run_block") == 2
    assert taken == list(range(30))
    assert len(blocks) >= 4
    assert len(read(tmp_path / "run" / "ledger.jsonl").attempts) == 1


@pytest.mark.long
def test_runs_of_equal_tasks_that_differ_in_numbers_share_one_program(tmp_path, compiled):
    for number in range(2):
        config = RunSpec.of(
            SETTINGS["shuffle"](batch_size=16, epochs=1 + number),
            noise_multiplier=1.0 + number,
            learning_rate=0.1 + number,
            audit=False,
        )
        run(Line(width=6), config, tmp_path / str(number))
    assert compiled("_run_block") == 1


@pytest.mark.long
def test_what_is_audited_is_the_program_that_trains(tmp_path, compiled, monkeypatch):
    programs._executable.cache_clear()
    ran, audited = set(), []
    executable, audit_program = loop.compiled_block, audit.audit_program

    def auditing(*args, **options):
        report = audit_program(*args, **options)
        audited.extend(ran)
        return report

    def running(*args):
        program = executable(*args)
        ran.add(program)
        return program

    monkeypatch.setattr(audit, "audit_program", auditing)
    monkeypatch.setattr(loop, "compiled_block", running)
    # Rows that travel, in several passes; and the numbers of the audit's mechanisms are arguments.
    sampler = SETTINGS["balls-and-bins"](
        batch_size=16, epochs=2, max_batch_size=5, overflow="accumulate"
    )
    config = RunSpec.of(sampler, noise_multiplier=1.0, data_on="host")
    run(Line(width=7), config, tmp_path / "run")
    assert len(ran) == len(audited) == 1
    assert compiled("_run_block") == 1
