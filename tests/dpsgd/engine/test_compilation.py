"""What decides the machine code of a program: its text, and the settings of the compiler."""

import dataclasses
import functools
import json

import jax
import numpy as np
import optax
import pytest

from dpsgd import AutomaticClipping, dpsgd
from dpsgd.engine import programs
from dpsgd.gradients.frozen import RunLoss

_UNOPTIMISED = jax.config.values["jax_disable_most_optimizations"]


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
def test_an_option_that_changes_numbers_is_told(name, value):
    before, usual = programs.compilation(), jax.config.values[name]
    jax.config.update(name, value)
    try:
        assert programs.compilation() != before
    finally:
        jax.config.update(name, usual)
    assert programs.compilation() == before


@pytest.mark.parametrize(("name", "value"), [*((name, "1") for name in VARIABLES), *OTHERS])
def test_a_variable_is_told_if_the_compiler_reads_it(name, value, monkeypatch):
    before = programs.compilation()
    monkeypatch.setenv(name, value)
    after = programs.compilation()
    changed = [n for n in {**before, **after} if before.get(n) != after.get(n)]
    assert changed == [name] * (name in VARIABLES)
    json.dumps(programs.compilation(), allow_nan=False)


def test_another_option_compiles_another_program():
    """What an option changes is not hidden by what a process has compiled before."""
    arguments = (np.zeros((8, 8), np.float32),)
    program = functools.partial(programs.program, lambda x: x @ x, (), arguments)
    usual = program().compiled
    assert program().compiled is usual
    with jax.default_matmul_precision("highest"):
        assert program().compiled is not usual


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Loss whose equality leaves out what it computes."""

    scale: float = dataclasses.field(compare=False)

    def __call__(self, params, example):
        return self.scale * params * example


SGD, LOSS = optax.sgd(0.1), Scaled(1.0)
SAME = {"the same functions": LOSS, "a wrapper of the library": RunLoss(LOSS, "w")}
OTHERS = {
    "another loss that is equal": lambda: dpsgd(Scaled(2.0), SGD),
    "another optimizer": lambda: dpsgd(LOSS, optax.sgd(0.1)),
    "another setting": lambda: dpsgd(LOSS, SGD, clipping=AutomaticClipping(0.5)),
}


@pytest.mark.parametrize("loss", SAME.values(), ids=SAME)
def test_programs_are_shared_by_the_same_functions_and_settings(loss):
    one, other = (programs.Parts(dpsgd(loss, SGD), 1.0, ("a",)) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_programs_of_other_functions_or_settings_differ(make):
    assert programs.Parts(make()) != programs.Parts(dpsgd(LOSS, SGD))
