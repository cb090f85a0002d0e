"""A run of any task: from its rows to a directory with model, report and guarantee."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_task import Line, config_of, line

from dpsgd import RunSpec, run
from dpsgd.engine.programs import digest
from dpsgd.runs.job import Job
from dpsgd.runs.mechanism import resolved
from dpsgd.runs.resolve import choose
from dpsgd.runs.result import FinishedRun
from dpsgd.runs.task import rows_of
from samplers import Deterministic


class Mixing(Line):
    """The same loss, in a function with a rule of its own for batches."""

    def loss(self, params, example):
        error = jax.custom_batching.sequential_vmap(super().loss)
        return error(jax.lax.stop_gradient(params), example) * params["w"].sum()


@pytest.mark.parametrize("audit", [True, False])
def test_a_cross_example_loss_is_refused_before_declaring_steps(audit, tmp_path):
    config = RunSpec.of(Deterministic(160, 16, 2), noise_multiplier=1.0, audit=audit)
    with pytest.raises(ValueError, match="examples could mix: the loss uses custom_vmap_call"):
        run(Mixing(), config, tmp_path / "run")
    ledger = tmp_path / "run" / "ledger.jsonl"
    assert not ledger.exists() or '"declare"' not in ledger.read_text()


def test_an_existing_directory_is_left_as_it_is(tmp_path):
    with pytest.raises(FileExistsError, match="exists already and is left as it is"):
        run(line, config_of(), tmp_path)


class Diverged(Line):
    def metrics(self, params):
        return {"test_error": float("nan"), "test_loss": float("inf"), "test_num_examples": 5}


@pytest.mark.long
def test_a_diverged_run_ends_with_undefined_metrics(tmp_path):
    record = run(Diverged(), config_of(), tmp_path / "run")
    assert record["metrics"] == {"test_error": None, "test_loss": None, "test_num_examples": 5}
    assert record["epsilon_upper"] > 0
    assert FinishedRun.read(tmp_path / "run").record == record


@dataclasses.dataclass(frozen=True)
class Faint(Line):
    """A task whose equality does not see what its loss depends on."""

    scale: object = dataclasses.field(default=1.0, compare=False)

    def loss(self, params, example):
        return jnp.mean(self.scale) * super().loss(params, example)

    def describe(self):
        return {}


@pytest.mark.short("array")
@pytest.mark.parametrize("kind", [float, np.array], ids=["number", "array"])
def test_equal_tasks_train_with_their_own_fields(kind):
    spec = config_of(noise_multiplier=1.0)
    programs = set()
    for scale in (1.0, 2.0):
        task = Faint(scale=kind(scale))
        assert task == Faint()
        rows = rows_of(task)
        chosen = choose(spec, task, rows).spec
        (program,) = Job.of_task(task, resolved(chosen, rows[1]), rows=rows).programs()
        programs.add(digest(program))
    assert len(programs) == 2
