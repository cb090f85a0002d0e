"""A sweep's file is read as it is meant, or refused in one line that names file and key."""

import textwrap
from pathlib import Path

import pytest

from dpsgd import Settings
from experiments.cli.questions.results import Sweep as SweepQuestion
from experiments.results.table import AXES
from experiments.sweeps.config import SHIPPED, Sweep, plan, with_insecure_seed
from experiments.sweeps.engine import task_of
from samplers.settings import SETTINGS

BOTH = '["shuffle", { name = "poisson", overflow = "accumulate" }]'
GRID = f"""
[[grid]]
x = "noise_multiplier"
sampler = {BOTH}
noise_multiplier = [0.5, 1]
non_private = true
epochs = [1, 2]
"""
HEAD = 'title = "t"\nrepetitions = 2\n'


def planned(text, head=HEAD):
    """Returns the runs of a sweep of this text."""
    sweep = Sweep.parse((head + text).encode(), "sweep.toml")
    return plan(sweep, Path("runs"), "sweep.toml")


def names(runs):
    assert len({run.out.name for run in runs}) == len(runs)
    assert {run.out.parent for run in runs} == {Path("runs")}
    return {run.out.name for run in runs}


def test_every_combination_is_a_run_once_a_repetition():
    runs = planned(GRID + GRID.replace("[1, 2]", "1"))  # a run in two grids is one
    assert len(names(runs)) == 2 * 3 * 2 * 2  # samplers, privacy, epochs, repetitions
    assert {r.spec.sampler.overflow for r in runs if r.spec.sampler.name == "poisson"} == {
        "accumulate"
    }
    assert sum(not run.spec.private for run in runs) == 2 * 2 * 2
    # Independent randomness from the system, and beginnings that all cells share.
    assert {run.spec.insecure_seed for run in runs} == {None}
    assert {run.spec.init_seed for run in runs} == {0, 1}
    assert runs[0].out.name == "shuffle-sigma0.5-b1024-e1-lr0.003-c4-r0"
    assert "poisson-overflow-accumulate-nonprivate-b1024-e2-lr0.003-r1" in names(runs)


def test_explicit_seeds_make_every_run_insecure():
    runs = planned(GRID, 'title = "t"\ninsecure_seeds = [5, 6]\n')
    assert {run.spec.insecure_seed for run in runs} == {5, 6}
    assert all(name.rpartition("-seed")[2] in ("5", "6") for name in names(runs))


SEEDED = ["repetitions = 2", "  repetitions=2  # of each", "insecure_seeds = [\n  5,\n  9,\n]"]


@pytest.mark.parametrize("line", SEEDED)
def test_an_insecure_seed_takes_the_place_of_repetitions(line):
    content = f'title = "repetitions = 3"\n{line}\n{GRID}'.encode()
    seeded = Sweep.parse(with_insecure_seed(content, 70, "sweep.toml"), "sweep.toml")
    assert seeded.insecure_seeds == (70, 71)
    former = Sweep.parse(content, "sweep.toml")
    assert (seeded.title, seeded.grid) == (former.title, former.grid)


def test_an_insecure_seed_that_overflows_is_refused():
    with pytest.raises(ValueError, match="with --insecure-seed: insecure_seeds"):
        with_insecure_seed((HEAD + GRID).encode(), 2**32 - 1, "sweep.toml")


@pytest.mark.parametrize("one", ['"shuffle"', '{ name = "shuffle", order = "fixed" }'])
def test_one_sampler_needs_no_list(one):
    assert planned(GRID.replace(BOTH, one)) == planned(GRID.replace(BOTH, f"[{one}]"))


def test_settings_of_all_runs_reach_each_of_them():
    shared = "[run]\nmicrobatch_size = 8\ntarget_delta = 1e-6\ninit_seed = 7\n"
    for run in planned(shared + GRID, 'title = "t"\nrepetitions = 1\n'):
        assert (run.spec.microbatch_size, run.spec.delta, run.spec.init_seed) == (8, 1e-6, 7)


@pytest.mark.parametrize("norms", ["[1, 4]", "[1, 4, 8]", "2"])
def test_a_run_without_clipping_ignores_the_norms_of_its_grid(norms):
    runs = planned(f"{GRID}l2_clip_norm = {norms}\n")
    plain = [run.spec for run in runs if not run.spec.private]
    assert len(plain) == 2 * 2 * 2
    assert {config.l2_clip_norm for config in plain} == {Settings.l2_clip_norm}


def test_bands_are_an_axis_of_the_runs_that_have_noise():
    runs = planned(f"{GRID}bands = [1, 4]\n".replace('"shuffle"', '"poisson"'))
    assert {run.spec.options().get("bands") for run in runs if run.spec.private} == {None, 4}
    assert {run.spec.options().get("bands") for run in runs if not run.spec.private} == {None}
    name = "poisson-sigma1-b1024-e1-lr0.003-c4"
    assert {f"{name}-r0", f"{name}-bands4-r0"} < names(runs)


def test_optimistic_noise_applies_to_private_runs_only():
    runs = planned(f"{GRID}optimistic = true\n".replace("noise_multiplier", "target_epsilon"))
    assert {run.spec.options().get("optimistic") for run in runs if run.spec.private} == {True}
    assert not all(run.spec.private for run in runs)


WITH_NOISE = {
    'clipping = "automatic"\nclip_gamma = 0.1': {"clipping": "automatic", "clip_gamma": 0.1},
    'calibration = "platt"': {"calibration": "platt"},
}


@pytest.mark.parametrize(("asked", "found"), WITH_NOISE.items())
@pytest.mark.parametrize("place", ["run", "grid"])
def test_options_of_noise_are_those_of_runs_with_noise(place, asked, found):
    grid = GRID.replace('"shuffle", ', "")
    text = f"[run]\n{asked}\n{grid}" if place == "run" else f"{grid}{asked}\n"
    runs = planned(text)
    plain = [run.spec for run in planned(grid) if not run.spec.private]
    assert [run.spec for run in runs if not run.spec.private] == plain
    noised = [run.spec.options() for run in runs if run.spec.private]
    assert noised
    assert all(options.items() >= found.items() for options in noised)


def test_any_value_is_a_part_of_a_folders_name_of_its_own():
    values = """["a/b", "a+b", "^a|b$", "../c"]\nclip_groups = [["a", "b"], ["a+b"]]"""
    runs = planned(f'{GRID}clipping = "per-layer"\ntrain = {values}\n')
    assert len(names(runs)) == 2 * 2 * (2 * 4 * 2 + 4) * 2


NEEDED = {
    "multistage": "draws = [8, 4], steps = 20",
    "units-then-poisson": "draws = [8], steps = 20, sampling_prob = 0.2",
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_sampler_can_be_swept_with_its_sizes(name):
    sampler = f'{{ name = "{name}", {NEEDED[name]} }}' if name in NEEDED else f'"{name}"'
    runs = planned(GRID.replace(BOTH, sampler) + "batch_size = 64\n")
    assert len(runs) == (1 if name in NEEDED else 2) * 3 * 2  # epochs, privacy, repetitions
    assert all(each.startswith(name) and "/" not in each for each in names(runs))
    if name not in NEEDED:
        assert {run.spec.sampler.batch_size for run in runs} == {64}


BACK = {
    "no TOML": ("title = ", "is not TOML"),
    "too deep": ("x = " + "[" * 100_000, "nested too deeply"),
    "no title": ("repetitions = 1\n" + GRID, "title is missing"),
    "no seeds": ('title = "t"\n' + GRID, "repetitions or insecure_seeds"),
    "both seeds": (HEAD + "insecure_seeds = [1]\n" + GRID, "repetitions or insecure_seeds"),
    "seed twice": ('title = "t"\ninsecure_seeds = [1, 1]\n' + GRID, "insecure_seeds"),
}
RUN = {
    "momentum = 0.9": "run: momentum goes with",
    "epochs = 3": "epochs belongs into a [[grid]]",
    "bands = 3": "bands belongs into a [[grid]]",
    'out = "x"': "run: 'out' is unknown",
    "hidden = [4]": "run: 'hidden' is unknown",
    'audit = "no"': "run: audit",
    "target_delta = 2.0": "target_delta",
    'optimizer = "sgd"': "grid 1: learning_rate is missing",
}
ADDED = {
    "moment = 0.9": "grid 1: 'moment' is unknown: did you mean momentum?",
    "target_advantage = 0.1": "grid 1: 'target_advantage' is unknown: removed in 0.3.0",
    "target_epsilon = 1": "not both",
    'tune = "learnin_rate"': "grid 1, tune: 'learnin_rate' is none of 'noise_multiplier'",
    'tune = "noise_multiplier"': "x and tune",
    'tune = ["epochs", "noise_multiplier"]': "x and tune",
    'learning_rate = ["fast"]': "run: learning_rate",
    "learning_rate = true": "run: learning_rate",
    "learning_rate = [0.1, -1]": "learning_rate must be a finite number > 0, got -1",
    f"learning_rate = {10**400}": "learning_rate",
    "batch_size = 10.5": "grid 1, sampler[0]: batch_size must be an integer",
    "batch_size = [8, 8]": "batch_size holds a value twice",
    "batch_size = []": "batch_size needs",
    "bands = 0": "bands",
}
REPLACED = {
    ("[[grid]]", "[grid]"): "grid: begin each grid with",
    ('x = "noise', 'x = "target_epsilon" #'): "target_epsi",
    ('x = "noise_multiplier"', 'x = "sigma"'): "x: 'sigma' is none of 'noise_multiplier', 'targ",
    ('"shuffle"', '"random"'): "sampler[0]",
    ('"poisson"', '["poisson"]'): "sampler[1]: unknown sampler",
    ("overflow", "overflw"): "sampler[1]: overflw is unknown: did you mean overflow?",
    ("overflow", "epochs"): "epochs is an axis",
}
TOP = {
    "": "grid is missing",
    "repititions = 3\n" + GRID: "repititions is unknown: did you mean repetitions?",
    'better = "larger"\n' + GRID: "better must be higher or lower, got larger",
    "[task]\nhidden = [4]\n" + GRID: "task: name is missing",
    '[task]\nname = "clicks"\ndata = "x"\n' + GRID: "the command names the data",
    GRID + GRID + "moment = 0.9\n": "grid 2: 'moment' is unknown",
}
REFUSED = [
    *BACK.values(),
    *((f"{HEAD}[run]\n{line}\n{GRID}", words) for line, words in RUN.items()),
    *((f"{HEAD}{GRID}{line}\n", words) for line, words in ADDED.items()),
    *((HEAD + GRID.replace(*pair, 1), words) for pair, words in REPLACED.items()),
    *((HEAD + text, words) for text, words in TOP.items()),
]


@pytest.mark.parametrize(("text", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_what_cannot_be_run_is_refused_by_file_and_key(text, words):
    with pytest.raises(ValueError, match=r"^sweep\.toml[^\n]*$") as refused:
        planned(text, "")
    assert words in str(refused.value)


TASKS = {
    'task = "click"': "did you mean clicks?",
    'task = "clicks"': "needs data",
    '[task]\nname = "clicks"\nembedding_dim = 0': "embedding_dim=0 is for the linear model",
    '[task]\nname = "clicks"\nhidden = [9223372036854775807]': "hidden[0] must be an integer >= 1",
    '[task]\nname = "clicks"\nmax_buckets = 12': "max_buckets must be a power",
    '[task]\nname = "clicks"\nhidden = "64"': "task: hidden must be a list",
    '[task]\nname = "clicks"\nhiden = [4]': "did you mean hidden?",
    '[task]\nname = "tiny_task:Line"\nhidden = [4]': "hidden is unknown",
    '[task]\nname = "tiny_task:line"\nrows = 4': "leave out rows",
    'task = "tiny_task:nothing"': "has no 'nothing'",
}


@pytest.mark.parametrize(("task", "problem"), TASKS.items(), ids=TASKS.values())
def test_a_task_that_cannot_be_made_is_refused_in_one_line(tmp_path, task, problem):
    sweep = Sweep.parse(f"{HEAD}{task}\n{GRID}".encode(), "sweep.toml")
    data = None if problem == "needs data" or "tiny" in task else tmp_path
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        task_of(sweep, data, "sweep.toml")
    assert problem in str(refused.value)


def test_a_task_has_the_settings_of_its_file():
    text = HEAD + '[task]\nname = "tiny_task:Line"\nwidth = 5\n' + GRID
    assert task_of(Sweep.parse(text.encode(), "sweep.toml"), None, "sweep.toml").width == 5


def test_a_missing_file_is_answered_with_the_shipped_ones(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"does not exist; shipped are .*equal-privacy"):
        Sweep.read(tmp_path / "missing.toml")
    with pytest.raises(FileNotFoundError, match=r"is a folder; shipped are .*equal-privacy"):
        Sweep.read(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("equal-privacy").mkdir()  # the folder of the sweep: the same command goes on
    assert Sweep.read(Path("equal-privacy")) == Sweep.read(SHIPPED / "equal-privacy.toml")


SWEEPS = sorted({*SHIPPED.glob("*.toml")} - {SHIPPED / "private-selection.toml"})


@pytest.mark.short("*[!r]")
@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_shipped_sweep_can_be_asked_for_by_name(path):
    sweep = Sweep.read(Path(path.stem))
    assert (sweep.repetitions or 0) >= 3  # an error bar, from entropy
    assert plan(sweep, Path("runs"), path.stem)
    if path.stem.startswith("criteo"):  # a row of the papers' figure 1
        assert sweep.error == "standard_deviation"
        first, *others = sweep.grid
        assert (first.x, first.non_private) == ("batch_size", True)
        for grid in others:
            assert grid.tune == ("learning_rate", "l2_clip_norm")
            sigmas = {cell.get("noise_multiplier") for cell in grid.cells().values()}
            assert len(sigmas) >= 3


def test_the_file_that_the_help_shows_is_a_sweep():
    help_text = SweepQuestion.__doc__.partition("Attributes:")[0]
    lines = [line for line in help_text.splitlines() if line.startswith(" " * 8)]
    sweep = Sweep.parse(textwrap.dedent("\n".join(lines)).encode(), "the help")
    assert len(sweep.grid[0].cells()) == 2 * (3 + 1)
    page = Path(__file__).parents[3] / "docs" / "how-to" / "sweeps.md"
    assert all(f"`{axis}`" in page.read_text() for axis in AXES)
