"""A fingerprint is that of the program that trains: the same wherever it is, and no other's."""

import functools
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_task import config_of, line

from dpsgd import Placement, RootKey
from dpsgd.engine import programs
from dpsgd.runs.job import Job
from dpsgd.runs.ledger import read
from dpsgd.runs.resolve import resolved
from dpsgd.runs.terms import differing
from samplers import Population

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[2]

_UNOPTIMISED = jax.config.values["jax_disable_most_optimizations"]

RESUME = """
import sys
from pathlib import Path
from tiny_task import short_blocks
from dpsgd import resume

with short_blocks():
    resume(Path(sys.argv[1]))
"""


def resumed(run, *, path=(CHECKOUT, HERE), folder=CHECKOUT, **variables):
    """The attempts of a run that another process, elsewhere, has gone on with."""
    installed = distribution("dpsgd").locate_file("")  # as this process has it
    subprocess.run(
        [sys.executable, "-c", RESUME, run],
        check=True,
        cwd=folder,
        env={
            **os.environ,
            # A program from a cache would be what the run was begun in: it is compiled again.
            "JAX_ENABLE_COMPILATION_CACHE": "0",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(_UNOPTIMISED)),
            "PYTHONPATH": os.pathsep.join(map(str, (*path, installed))),
            **variables,
        },
    )
    return read(run / "ledger.jsonl").attempts


@pytest.fixture
def killed(stopped):
    """A run that died behind its last checkpoint: it repeats what it had declared."""
    shutil.rmtree(stopped / "checkpoints")
    return stopped


@pytest.mark.long
def test_another_process_in_another_checkout_and_folder_goes_on_to_the_same_bits(
    killed, finished, tmp_path
):
    elsewhere = tmp_path / "a checkout" / "of the same"
    for package in ("accounting", "samplers", "dpsgd"):
        shutil.copytree(CHECKOUT / package, elsewhere / package)
    shutil.copytree(HERE, elsewhere / "tests")
    attempts = resumed(
        killed, path=(elsewhere, elsewhere / "tests"), folder=tmp_path, PYTHONHASHSEED="17"
    )
    assert differing([one.terms.fingerprint for one in attempts]) == []
    assert len(attempts) == 1
    for name in ("params.npz", "ledger.jsonl"):
        assert (killed / name).read_bytes() == (finished / name).read_bytes()


@pytest.mark.parametrize(
    ("variables", "changed"),
    [
        pytest.param(
            {"JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(not _UNOPTIMISED))},
            ["jax_disable_most_optimizations"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"JAX_MEMORY_FITTING_LEVEL": "O0", "NPROC": "1"},
            ["jax_memory_fitting_level", "NPROC"],
            marks=pytest.mark.long,
        ),
    ],
    ids=["optimised otherwise", "other options"],
)
def test_a_copy_that_is_compiled_otherwise_draws_other_noise(killed, finished, variables, changed):
    first, second = resumed(killed, **variables)
    fingerprints = [one.terms.fingerprint for one in (first, second)]
    assert set(changed) <= set(differing(fingerprints)) <= {*changed, "program"}
    assert first.key != second.key
    ours, theirs = (np.load(run / "params.npz")["['w']"] for run in (killed, finished))
    # Other noise and other batches: not what another machine code makes of the same.
    assert np.abs(ours - theirs).max() > 1e-4


def program_of(function, *arguments):
    return jax.jit(function).lower(*arguments).compile()


def test_a_digest_is_of_all_that_computes_and_of_no_name(tmp_path):
    source = """
import numpy as np
import jax.numpy as jnp

TABLE = np.random.default_rng({seed}).normal(size=100).astype(np.float32)

def {name}(of_{name}):
    return jnp.sin(of_{name}) {operation} TABLE
"""

    def digest(file="one.py", name="loss", seed=0, operation="+"):
        path = tmp_path / file
        path.write_text(source.format(name=name, seed=seed, operation=operation))
        space = {}
        exec(compile(path.read_text(), str(path), "exec"), space)
        return programs.digest(program_of(space[name], np.zeros(100, np.float32)))

    assert digest() == digest(file="two.py", name="another_name")
    assert digest() != digest(operation="*")
    assert digest() != digest(seed=1)  # a hundred numbers, which a text of the program leaves out


def test_devices_and_what_is_sharded_to_them_are_named(monkeypatch):
    monkeypatch.setattr(Job, "program_digest", lambda job: "of its program")
    (device,) = jax.devices()
    record, root = {"task": {"name": "tiny_task:line"}}, RootKey.from_insecure_seed(0)

    def terms(*placement):
        where = Placement(*placement) if placement else None
        job = Job.of(line, resolved(config_of(), Population(160)), placement=where)
        return job.terms(record, "of its data", root).fingerprint

    alone, placed, dealt = terms(), terms((device,)), terms((device,), 2**16)
    assert placed["devices"] == [device.device_kind]
    assert differing([alone, placed]) == differing([placed, dealt]) == ["placement"]


def test_flags_in_a_file_are_flags(tmp_path, monkeypatch):
    flags = tmp_path / "flags"
    monkeypatch.setenv("XLA_FLAGS", str(flags))
    found = []
    for text in ("--xla_cpu_enable_fast_math=true", "--xla_cpu_enable_fast_math=false"):
        flags.write_text(text)
        found.append(programs.compilation()["xla_flags"])
    assert found[0] != found[1]


OPTIONS = [
    ("jax_enable_x64", True),
    ("jax_default_matmul_precision", "highest"),
    ("jax_threefry_partitionable", False),
    ("jax_default_prng_impl", "rbg"),
    ("jax_random_seed_offset", 1),
    ("jax_disable_most_optimizations", not _UNOPTIMISED),
    ("jax_optimization_level", "O1"),
    ("jax_exec_time_optimization_effort", -1.0),
]
VARIABLES = ["XLA_ANYTHING", "NPROC", "LIBTPU_INIT_ARGS", "DNNL_MAX_CPU_ISA"]
OTHERS = [("XLA_PYTHON_CLIENT_PREALLOCATE", "false"), ("JAX_PLATFORMS", "cpu"), ("HOME", "/")]


@pytest.mark.parametrize(("name", "value"), OPTIONS)
def test_an_option_that_changes_numbers_changes_the_fingerprint(name, value):
    before, usual = programs.compilation(), jax.config.values[name]
    jax.config.update(name, value)
    try:
        assert programs.compilation() != before
    finally:
        jax.config.update(name, usual)
    assert programs.compilation() == before


@pytest.mark.parametrize(("name", "value"), [*((name, "1") for name in VARIABLES), *OTHERS])
def test_a_variable_changes_the_fingerprint_if_the_compiler_reads_it(name, value, monkeypatch):
    before = programs.compilation()
    monkeypatch.setenv(name, value)
    assert differing([before, programs.compilation()]) == [name] * (name in VARIABLES)
    json.dumps(programs.compilation(), allow_nan=False)


def test_another_option_compiles_another_program():
    """What an option changes is not hidden by what a process has compiled before."""
    arguments = (np.zeros((8, 8), np.float32),)
    program = functools.partial(programs.program, lambda x: x @ x, (), arguments)
    usual = program().compiled
    assert program().compiled is usual
    with jax.default_matmul_precision("highest"):
        assert program().compiled is not usual
