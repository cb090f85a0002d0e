"""What tests of whole runs share."""

import shutil
from pathlib import Path

import pytest

from experiments import cli
from experiments.tasks.clicks.synthetic import rows as synthetic


class Command:
    """The command `dpsgd`: called with words, it returns what it prints."""

    def __init__(self, capsys):
        self._capsys = capsys

    def _said(self, words, status):
        self._capsys.readouterr()
        assert cli.main([str(word) for word in words]) == status, self._capsys.readouterr()
        return self._capsys.readouterr()

    def __call__(self, *words, status=0):
        return self._said(words, status).out

    def help(self, *words):
        assert cli.main([*words, "--help"]) == 0
        return self._capsys.readouterr().out

    def refuses(self, *words):
        """Returns the one line that says why it does not do what words ask, and does nothing."""
        said = self._said(words, 2)
        (line,) = (line for line in said.err.splitlines() if not line.endswith(" s in all)"))
        assert line.startswith("dpsgd: ")
        assert line.isprintable()
        assert all(one.startswith(("note: ", "chosen: ")) for one in said.out.splitlines())
        return line


@pytest.fixture
def command(capsys):
    return Command(capsys)


@pytest.fixture(scope="session")
def generated_store(tmp_path_factory):
    """A store of 200 generated rows, to be copied."""
    path = tmp_path_factory.mktemp("generated") / "store"
    synthetic.write_store(path, 200, seed=0)
    return path


@pytest.fixture(scope="module")
def store(generated_store, tmp_path_factory):
    """A store of 200 generated rows."""
    return Path(shutil.copytree(generated_store, tmp_path_factory.mktemp("data") / "store"))


METRICS = ("validation_auc", "test_auc", "test_log_loss")
CLICKS = {"headline": "test_auc", "better": "higher"}
TERMS = {"delta": 1.0001e-5, "adjacency": "zero-out", "audit": "passed", "notes": []}
SIZES = {"num_params": 1234, "num_examples": 5678, "num_steps": 10, "attempts": 1}
TIMES = {"seconds": 3.0, "training_seconds": 2.0, "examples_per_second": 1e4}


def as_toml(grid):
    """A grid as a file has it."""
    return {name: list(x) if isinstance(x, tuple) else x for name, x in grid.items() if x != ()}


@pytest.fixture
def summary_of():
    """Returns the summary of a sweep whose runs, made up, report `auc(run, metric)`.

    A run costs the epsilon that it was to cost, and `excess`; or 1.25, where none was asked for.
    """
    # Not where Beam is installed, which comes without what draws tables.
    from experiments.results.table import Table, sampler_settings
    from experiments.sweeps.config import Sweep, plan
    from experiments.sweeps.grid import Grid
    from experiments.sweeps.summary import Summary

    def row_of(run, auc, metrics, unit, excess, task):
        options, sampler = run.spec.options(), run.spec.sampler
        sigma = options.get("noise_multiplier") or 0.0
        if epsilon := options.get("target_epsilon"):
            sigma = 2.0 / epsilon
        upper, known = (epsilon or 1.25) + excess, sigma and run.spec.insecure_seed is None
        return {
            "target_epsilon": epsilon,
            **{name: options.get(name) for name in ("learning_rate", "init_seed", "insecure_seed")},
            **{name: getattr(sampler, name) for name in ("batch_size", "epochs")},
            **TERMS,
            **SIZES,
            **TIMES,
            **task,
            "run": run.out.name,
            "task": "clicks",
            "sampler": sampler.name,
            "sampler_settings": sampler_settings(sampler),
            "noise": "independent noise",
            "noise_multiplier": sigma,
            "optimistic": options.get("optimistic"),
            "l2_clip_norm": options["l2_clip_norm"] if sigma else None,
            "bands": 1 if sigma else None,
            "data": 0,
            "epsilon_lower": 0.8 * upper if known else None,
            "epsilon_upper": upper if known else None,
            "attack_advantage_upper": 0.5 if known else None,
            "unit": unit(run) if callable(unit) else unit,
            "not_covered": ["the weather"],
            **{metric: auc(run, metric) for metric in metrics},
            "test_num_examples": 910,
        }

    def make(
        auc,
        *grids,
        repetitions=2,
        insecure_seeds=(),
        excess=0.0,
        metrics=METRICS,
        task=CLICKS,
        unit="user",
        **more,
    ):
        count = None if insecure_seeds else repetitions
        found = tuple(Grid.parse(as_toml(grid), "grid") for grid in grids)
        seeds = tuple(insecure_seeds)
        sweep = Sweep("A title", found, repetitions=count, insecure_seeds=seeds, **more)
        runs = plan(sweep, Path("runs"), "sweep")
        rows = [row_of(run, auc, metrics, unit, excess, task) for run in runs]
        table = Table.of_rows(rows, [*metrics, "test_num_examples"])
        record = {"name": "clicks", "settings": {"data": "store"}, "description": task}
        return Summary(sweep, record, table, {run.out.name: run.cell for run in runs})

    return make
