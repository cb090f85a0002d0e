"""A sweep's file is read as it is meant, or refused in one line that names file and key."""

import textwrap
from pathlib import Path

import pytest

from dpsgd import Settings
from experiments.cli.commands.sweep import SweepConfig
from experiments.results.table import AXES
from experiments.sweeps.config import SHIPPED, Sweep, file_of, plan
from experiments.sweeps.engine import task_of
from experiments.sweeps.private import SHIPPED as SELECTIONS
from samplers.settings import SETTINGS

GRID = """
[[grid]]
x = "noise_multiplier"
sampler = ["shuffle", { name = "poisson", overflow = "accumulate" }]
noise_multiplier = [0.5, 1]
non_private = true
epochs = [1, 2]
"""


def read(tmp_path, text):
    path = tmp_path / "sweep.toml"
    path.write_text(text)
    return Sweep.read(path)


def planned(sweep, tmp_path):
    return plan(sweep, tmp_path / "runs", "sweep.toml")


def test_every_combination_is_a_run_once_a_repetition(tmp_path):
    sweep = read(tmp_path, 'title = "t"\nrepetitions = 3\n' + GRID)
    runs = planned(sweep, tmp_path)
    assert len(runs) == 2 * 3 * 2 * 3  # samplers, privacy, epochs, repetitions
    assert len({run.out.name for run in runs}) == len(runs)
    assert {run.spec.sampler.overflow for run in runs if run.spec.sampler.name == "poisson"} == {
        "accumulate"
    }
    assert sum(not run.spec.private for run in runs) == 2 * 2 * 3
    # Independent randomness from the system, and beginnings that all cells share.
    assert {run.spec.insecure_seed for run in runs} == {None}
    assert {run.spec.init_seed for run in runs} == {0, 1, 2}


def test_a_run_in_two_grids_is_one_run_under_a_name_that_says_what_it_is(tmp_path):
    sweep = read(tmp_path, 'title = "t"\nrepetitions = 1\n' + GRID + GRID.replace("[1, 2]", "1"))
    runs = planned(sweep, tmp_path)
    assert len(runs) == 2 * 3 * 2
    assert runs[0].out.name == "shuffle-sigma0.5-b1024-e1-lr0.003-c4-r0"
    assert "poisson-overflow-accumulate-nonprivate-b1024-e2-lr0.003-r0" in {
        r.out.name for r in runs
    }


@pytest.mark.parametrize("one", ['"shuffle"', '{ name = "shuffle", order = "fixed" }'])
def test_one_sampler_needs_no_list(tmp_path, one):
    several = '["shuffle", { name = "poisson", overflow = "accumulate" }]'
    begin = 'title = "t"\nrepetitions = 1\n'
    alone, listed = (
        planned(read(tmp_path, begin + GRID.replace(several, asked)), tmp_path)
        for asked in (one, f"[{one}]")
    )
    assert alone == listed


def test_explicit_seeds_make_every_run_insecure(tmp_path):
    sweep = read(tmp_path, 'title = "t"\ninsecure_seeds = [5, 6]\n' + GRID)
    runs = planned(sweep, tmp_path)
    assert {run.spec.insecure_seed for run in runs} == {5, 6}
    assert all(run.out.name.endswith(f"-seed{run.spec.insecure_seed}") for run in runs)


def test_the_settings_of_all_runs_reach_each_of_them(tmp_path):
    shared = "[run]\nmicrobatch_size = 8\ntarget_delta = 1e-6\ninit_seed = 7\n"
    sweep = read(tmp_path, f'title = "t"\nrepetitions = 1\n{shared}' + GRID)
    for run in planned(sweep, tmp_path):
        assert run.spec.microbatch_size == 8
        assert run.spec.delta == 1e-6
        assert run.spec.init_seed == 7


@pytest.mark.parametrize("norms", ["[1, 4]", "[1, 4, 8]", "2"])
def test_a_run_without_clipping_is_the_same_whatever_norms_its_grid_has(tmp_path, norms):
    sweep = read(tmp_path, f'title = "t"\nrepetitions = 1\n{GRID}l2_clip_norm = {norms}\n')
    plain = [run.spec for run in planned(sweep, tmp_path) if not run.spec.private]
    assert len(plain) == 2 * 2
    assert {config.l2_clip_norm for config in plain} == {Settings.l2_clip_norm}


def test_bands_are_an_axis_of_the_runs_that_have_noise(tmp_path):
    text = f'title = "t"\nrepetitions = 1\n{GRID}bands = [1, 4]\n'.replace('"shuffle"', '"poisson"')
    runs = planned(read(tmp_path, text), tmp_path)
    assert {run.spec.options().get("bands") for run in runs if run.spec.private} == {None, 4}
    assert {run.spec.options().get("bands") for run in runs if not run.spec.private} == {None}
    names = {run.out.name for run in runs}
    assert len(names) == len(runs)
    assert {
        "poisson-sigma1-b1024-e1-lr0.003-c4-r0",
        "poisson-sigma1-b1024-e1-lr0.003-c4-bands4-r0",
    } < names


WITH_NOISE = {
    'clipping = "automatic"\nclip_gamma = 0.1': {"clipping": "automatic", "clip_gamma": 0.1},
    'calibration = "platt"': {"calibration": "platt"},
}


@pytest.mark.parametrize(("asked", "found"), WITH_NOISE.items())
@pytest.mark.parametrize("place", ["run", "grid"])
def test_what_goes_with_noise_is_asked_of_the_runs_that_have_noise(tmp_path, place, asked, found):
    begin, grid = 'title = "t"\nrepetitions = 1\n', GRID.replace('"shuffle", ', "")
    text = begin + (f"[run]\n{asked}\n{grid}" if place == "run" else f"{grid}{asked}\n")
    text = text if place == "run" else text.replace("[0.5]", "[[0.5]]")
    runs, others = (planned(read(tmp_path, one), tmp_path) for one in (text, begin + grid))
    assert [r.spec for r in runs if not r.spec.private] == [
        r.spec for r in others if not r.spec.private
    ]
    noised = [r.spec.options() for r in runs if r.spec.private]
    assert noised
    assert all(options.items() >= found.items() for options in noised)


def test_any_value_is_a_part_of_a_folders_name_of_its_own(tmp_path):
    values = """["a/b", "a+b", "^a|b$", "../c"]\nclip_groups = [["a", "b"], ["a+b"]]"""
    text = f'title = "t"\nrepetitions = 1\n{GRID}clipping = "per-layer"\ntrain = {values}\n'
    runs = planned(read(tmp_path, text), tmp_path)
    assert len({run.out.name for run in runs}) == len(runs) == 2 * 2 * (2 * 4 * 2 + 4)
    assert {run.out.parent for run in runs} == {tmp_path / "runs"}


NEEDED = {
    "multistage": "draws = [8, 4], steps = 20",
    "units-then-poisson": "draws = [8], steps = 20, sampling_prob = 0.2",
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_sampler_can_be_swept_and_has_the_sizes_that_it_knows(tmp_path, name):
    sampler = f'{{ name = "{name}", {NEEDED[name]} }}' if name in NEEDED else f'"{name}"'
    several = '["shuffle", { name = "poisson", overflow = "accumulate" }]'
    text = GRID.replace(several, sampler) + "batch_size = 64\n"
    runs = planned(read(tmp_path, f'title = "t"\nrepetitions = 1\n{text}'), tmp_path)
    assert len(runs) == (1 if name in NEEDED else 2) * 3  # epochs, privacy
    assert len({run.out.name for run in runs}) == len(runs)
    assert all(run.out.name.startswith(name) and "/" not in run.out.name for run in runs)
    if name not in NEEDED:
        assert {run.spec.sampler.batch_size for run in runs} == {64}


HEAD = 'title = "t"\nrepetitions = 2\n'
REFUSED = {
    "no TOML": ("title = ", "is not TOML"),
    "no grid": (HEAD, "grid is missing"),
    "no title": ("repetitions = 1\n" + GRID, "title is missing"),
    "unknown key": (
        HEAD + "repititions = 3\n" + GRID,
        "repititions is unknown: did you mean repetitions?",
    ),
    "unknown axis": (
        HEAD + GRID + "moment = 0.9\n",
        "grid 1: 'moment' is unknown: did you mean momentum?",
    ),
    "unknown tune": (
        HEAD + GRID + 'tune = "learnin_rate"\n',
        "grid 1, tune: 'learnin_rate' is none of 'noise_multiplier'",
    ),
    "one pair of brackets": (
        HEAD + GRID.replace("[[grid]]", "[grid]"),
        "grid: each begins with",
    ),
    "second grid": (HEAD + GRID + GRID + "moment = 0.9\n", "grid 2: 'moment' is unknown"),
    "a choice not made": (HEAD + GRID + "momentum = 0.9\n", "run: momentum goes with"),
    "no number": (
        HEAD + GRID + 'learning_rate = ["fast"]\n',
        "run: learning_rate must be a finite number > 0, got fast",
    ),
    "a truth": (
        HEAD + GRID + "learning_rate = true\n",
        "run: learning_rate must be a finite number > 0, got True",
    ),
    "not positive": (HEAD + GRID + "learning_rate = [0.1, -1]\n", "learning_rate[1] must be"),
    "no integer": (HEAD + GRID + "batch_size = 10.5\n", "grid 1, batch_size"),
    "twice": (HEAD + GRID + "batch_size = [8, 8]\n", "batch_size holds a value twice"),
    "empty axis": (HEAD + GRID + "batch_size = []\n", "batch_size needs"),
    "x without values": (
        HEAD + GRID.replace('x = "noise', 'x = "target_epsilon" #'),
        "target_epsi",
    ),
    "unknown x": (
        HEAD + GRID.replace('x = "noise_multiplier"', 'x = "sigma"'),
        "grid 1, x: 'sigma' is none of 'noise_multiplier', 'target_epsilon'",
    ),
    "tuned and seen": (HEAD + GRID + 'tune = "noise_multiplier"\n', "x and tune"),
    "tuned and seen, of two": (
        HEAD + GRID + 'tune = ["epochs", "noise_multiplier"]\n',
        "x and tune",
    ),
    "removed axis": (
        HEAD + GRID + "target_advantage = 0.1\n",
        "grid 1: 'target_advantage' is unknown: removed in 0.3.0",
    ),
    "both noises": (HEAD + GRID + "target_epsilon = 1\n", "not both"),
    "unknown sampler": (HEAD + GRID.replace('"shuffle"', '"random"'), "sampler[0]"),
    "unknown setting": (
        HEAD + GRID.replace("overflow", "overflw"),
        "sampler[1]: overflw is unknown: did you mean overflow?",
    ),
    "axis in a sampler": (HEAD + GRID.replace("overflow", "epochs"), "epochs is an axis"),
    "no seeds": ('title = "t"\n' + GRID, "repetitions or insecure_seeds"),
    "both seeds": (HEAD + "insecure_seeds = [1]\n" + GRID, "repetitions or insecure_seeds"),
    "seed twice": ('title = "t"\ninsecure_seeds = [1, 1]\n' + GRID, "insecure_seeds"),
    "axis for all": (HEAD + "[run]\nepochs = 3\n" + GRID, "epochs belongs into a [[grid]]"),
    "private place": (HEAD + '[run]\nout = "x"\n' + GRID, "run: 'out' is unknown"),
    "wrong type": (HEAD + '[run]\naudit = "no"\n' + GRID, "run: audit"),
    "of the task": (HEAD + "[run]\nhidden = [4]\n" + GRID, "run: 'hidden' is unknown"),
    "no task": (HEAD + "[task]\nhidden = [4]\n" + GRID, "task: name is missing"),
    "data": (HEAD + '[task]\nname = "clicks"\ndata = "x"\n' + GRID, "the command names the data"),
    "no side": (HEAD + 'better = "larger"\n' + GRID, "better must be higher or lower, got larger"),
    "no number at all": (HEAD + GRID + f"learning_rate = {10**400}\n", "must be finite"),
    "too deep": ("x = " + "[" * 100_000, "nested too deeply"),
    "no name": (HEAD + GRID.replace('"poisson"', '["poisson"]'), "sampler[1]: unknown sampler"),
    "rate of Adam": (
        HEAD + '[run]\noptimizer = "sgd"\n' + GRID,
        "grid 1: learning_rate is missing",
    ),
    "bands for all": (HEAD + "[run]\nbands = 3\n" + GRID, "bands belongs into a [[grid]]"),
    "no bands": (HEAD + GRID + "bands = 0\n", "bands[0] must be finite and > 0"),
    "out of range": (HEAD + "[run]\ntarget_delta = 2.0\n" + GRID, "target_delta"),
}


@pytest.mark.parametrize(("text", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_run_is_refused_by_file_and_key(tmp_path, text, words):
    with pytest.raises(ValueError, match=r"sweep\.toml") as refused:
        planned(read(tmp_path, text), tmp_path)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ('task = "click"', "did you mean clicks?"),
        ('task = "clicks"', "needs data"),
        ('[task]\nname = "clicks"\nembedding_dim = 0', "embedding_dim: each size lies in"),
        ('[task]\nname = "clicks"\nhidden = [4, -1]', "hidden: each size lies in"),
        ('[task]\nname = "clicks"\nhidden = [9223372036854775807]', "hidden: each size lies in"),
        ('[task]\nname = "clicks"\nmax_buckets = 12', "max_buckets must be a power"),
        ('[task]\nname = "clicks"\nhidden = "64"', "task: hidden must be a list"),
        ('[task]\nname = "clicks"\nhiden = [4]', "did you mean hidden?"),
        ('[task]\nname = "tiny_task:Line"\nhidden = [4]', "task: hidden is unknown"),
        ('[task]\nname = "tiny_task:line"\nrows = 4', "leave out rows"),
        ('task = "tiny_task:nothing"', "has no 'nothing'"),
    ],
)
def test_a_task_that_cannot_be_made_is_refused_in_one_line(tmp_path, task, problem):
    sweep = read(tmp_path, f"{HEAD}{task}\n{GRID}")
    data = None if problem == "needs data" or "tiny" in task else tmp_path
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        task_of(sweep, data, "sweep.toml")
    assert problem in str(refused.value)


def test_a_task_has_the_settings_of_its_file(tmp_path):
    sweep = read(tmp_path, HEAD + '[task]\nname = "tiny_task:Line"\nwidth = 5\n' + GRID)
    assert task_of(sweep, None, "sweep.toml").width == 5


def test_a_file_that_is_not_there_is_answered_with_those_that_are_shipped(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"does not exist; shipped are .*equal-privacy"):
        Sweep.read(tmp_path / "missing.toml")
    with pytest.raises(FileNotFoundError, match=r"is a folder; shipped are .*equal-privacy"):
        Sweep.read(tmp_path)


def test_a_shipped_file_of_the_other_kind_says_whether_it_takes_the_option():
    with pytest.raises(ValueError, match="private-selection is a private selection: add --private"):
        file_of(Path("private-selection"))
    with pytest.raises(ValueError, match="equal-privacy shows every run: leave out --private"):
        file_of(Path("equal-privacy"), SELECTIONS)


def test_a_shipped_sweep_whose_folder_has_its_name_goes_on_by_the_same_command(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("equal-privacy").mkdir()
    assert Sweep.read(Path("equal-privacy")) == Sweep.read(SHIPPED / "equal-privacy.toml")


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_sweep_can_be_asked_for_by_name(path, tmp_path):
    sweep = Sweep.read(type(path)(path.stem))
    assert (sweep.repetitions or 0) >= 3  # an error bar, from entropy
    assert planned(sweep, tmp_path)


@pytest.mark.parametrize("name", [path.stem for path in SHIPPED.glob("criteo-*.toml")])
def test_each_row_of_figure_1_has_its_three_panels(name):
    samplers = ["deterministic", "shuffle", "poisson", "balls-and-bins"]
    left, *others = Sweep.read(SHIPPED / f"{name}.toml").grid
    assert left.x == "batch_size"
    assert all(cell.get("non_private") for cell in left.cells().values())
    for grid, batch_size in zip(others, (1024, 8192), strict=True):
        cells = list(grid.cells().values())
        assert [*dict.fromkeys(cell["sampler"].name for cell in cells)] == samplers
        assert {cell["sampler"].batch_size for cell in cells} == {batch_size}
        assert {cell["sampler"].epochs for cell in cells} == {1}
        assert grid.x == "noise_multiplier"
        assert len({cell["noise_multiplier"] for cell in cells}) >= 3
        assert grid.tune == ("learning_rate", "l2_clip_norm")


def test_the_file_that_the_help_shows_is_a_sweep():
    help_text = SweepConfig.__doc__
    lines = [line for line in help_text.splitlines() if line.startswith(" " * 8)]
    sweep = Sweep.parse(textwrap.dedent("\n".join(lines)).encode(), "the help")
    assert len(sweep.grid[0].cells()) == 2 * (3 + 1)
    for axis in AXES:
        assert axis in help_text
