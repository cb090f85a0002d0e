"""Parts of another module are asked for as the built-in ones are, in commands, specs and files."""

import dataclasses
import importlib
import json
import sys

import pytest

from accounting import PoissonProfile, UserPoissonProfile, epsilon
from dpsgd.runs.spec import OWN, Lazy, RunSpec
from dpsgd.runs.support import conflict_of
from experiments.sweeps import engine
from experiments.sweeps.config import Sweep, import_parts, plan
from samplers.settings import SETTINGS

PROGRAM = """
from dataclasses import dataclass, field

import numpy as np
import optax

from dpsgd import BandedToeplitz, Independent, Noise, Optimizer
from dpsgd.gradients.rules import FlatClipping
from samplers import Poisson, UserPoisson


@dataclass(frozen=True)
class Batches(Poisson):
    '''Poisson batches by another name.'''


@dataclass(frozen=True)
class Users(UserPoisson):
    '''Poisson batches of users' rows by another name.'''


@dataclass(frozen=True)
class Fresh(Independent):
    '''Independent noise by another name.

    Attributes:
      label_of_run: Unused.
    '''

    label_of_run: str = ""


@dataclass(frozen=True)
class Whole(FlatClipping):
    '''Flat clipping by another name.

    Attributes:
      share: Share of the clipping norm.
    '''

    share: float = 1.0

    def factors(self, group_norms, l2_clip_norm, counts):
        from dpsgd.gradients import norms

        return [norms.clip_factor(group_norms[0], l2_clip_norm, counts, share=self.share)]


@dataclass(frozen=True)
class Steps(Optimizer):
    '''Adam by another name.

    Attributes:
      b1: Decay of the first moment.
    '''

    b1: float = 0.9

    def transformation(self, step_size):
        return optax.adam(step_size, b1=self.b1)


@dataclass(frozen=True)
class Cheap(Independent):
    def privacy(self, sampler, noise_multiplier):
        return super().privacy(sampler, 2 * noise_multiplier)


@dataclass(frozen=True)
class CheapAttempts(Independent):
    def privacy_of(self, sampler, noise_multiplier, attempts, **how):
        return super().privacy_of(sampler, 2 * noise_multiplier, attempts, **how)


@dataclass(frozen=True)
class CheapBatches(Poisson):
    def privacy(self, noise_multiplier):
        return super().privacy(9 * noise_multiplier)

    def privacy_of(self, noise_multiplier, attempts, **how):
        return super().privacy_of(9 * noise_multiplier, attempts, **how)


@dataclass(frozen=True)
class Unpriced(Noise):
    pass


@dataclass(frozen=True)
class Raising(Independent):
    def whiten(self, noises):
        return noises @ noises.nowhere


@dataclass(frozen=True)
class RaisingBatches(Poisson):
    def participations(self, seed, epoch, chunk):
        return np.asarray(len(epoch))


class Bare:
    def groups(self, params): ...
    def factors(self, group_norms, l2_clip_norm, counts): ...


@dataclass(frozen=True)
class Hidden(Steps):
    power: float = field(default=1.0, compare=False)


NOTHING = 0
"""
KINDS = {
    "sampler": ("Batches", "poisson", {"overflow": "accumulate"}),
    "noise": ("Fresh", "independent", {"label_of_run": "a"}),
    "clipping": ("Whole", "flat", {"share": 0.5}),
    "optimizer": ("Steps", "adam", {"b1": 0.5}),
}
"""Options -> own part, the built-in part that does the same, and settings of the own part."""
SIZES = "--num-examples 400 --batch-size 40"
COMMANDS = {
    "epsilon": f"epsilon sampler:poisson {SIZES} --noise-multiplier 2",
    "calibrate": f"calibrate sampler:poisson {SIZES} --target-epsilon 2",
    "compare": f"compare {SIZES} --noise-multiplier 2 --sampler poisson",
    "compare at equal privacy": f"compare {SIZES} --target-epsilon 2 --sampler poisson",
    "audit": f"audit sampler:poisson {SIZES} --noise-multiplier 2",
    "train": f"train store sampler:poisson {SIZES[19:]} --noise-multiplier 2 --learning-rate 0.01 "
    "--epochs 1 --out run",
}
PAIRS = [(name, kind) for name in COMMANDS if name != "train" for kind in ("sampler", "noise")]
FILE = """
title = "own"
repetitions = 1
[[grid]]
x = "noise_multiplier"
sampler = ["poisson"]
noise_multiplier = [1.0]
"""
SWEEPS = ['"{}"', '{{ name = "{}", {} }}']


def words_of(command, kind, name):
    """The words of a command that asks for a part by name; the cheapest sampler is beside it."""
    words = COMMANDS[command]
    if kind == "sampler":
        return words.replace("poisson", name)
    return f"{words.replace('poisson', 'deterministic')} --{kind} {name}"


def sweep_of(kind, form, name=None):
    """A sweep file whose grid names a part, as a string or as a table with settings."""
    own, _, settings = KINDS[kind]
    table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
    line = f"{kind} = [{form.format(name or f'own_parts:{own}', table)}]\n"
    return FILE.replace('sampler = ["poisson"]\n', line) if kind == "sampler" else FILE + line


def parsed(text):
    """A sweep whose file is to be run."""
    import_parts(text.encode(), "own.toml")
    return Sweep.parse(text.encode(), "own.toml")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "own_parts.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("own_parts", None)


@pytest.fixture
def module(monkeypatch, folder, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("own_parts")


@pytest.mark.short("epsilon-noise", "calibrate-noise", "compare*-noise", "compare-sampler")
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_a_command_answers_alike_for_an_own_part(name, kind, command, monkeypatch):
    monkeypatch.setattr("experiments.figures.comparison.each", map)
    part, twin, _ = KINDS[kind]
    own = f"own_parts:{part}"
    answers = [
        command(*words_of(name, kind, asked).split()).replace(own, twin).split()
        for asked in (twin, own)
    ]
    common = [[word for word in answer if word not in answers[0]] for answer in answers]
    assert answers[0] == answers[1] or (name == "audit" and "FAIL" not in common[1])


CHEAP = {
    "Cheap": ("noise", "the cost of a noise is proved"),
    "CheapAttempts": ("noise", "the cost of a noise is proved"),
    "CheapBatches": ("sampler", "the sampler's cost grows with the steps"),
}


@pytest.mark.short("epsilon-Cheap*-noise-*", "calibrate-Cheap-*", "compare-*", "*privacy-CheapA*")
@pytest.mark.parametrize(("part", "kind", "check"), [(part, *of) for part, of in CHEAP.items()])
@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("audit", "train")])
def test_no_command_prints_a_price_below_the_cost(name, part, kind, check, command, monkeypatch):
    monkeypatch.setattr("experiments.figures.comparison.each", map)
    line = command.refuses(*words_of(name, kind, f"own_parts:{part}").split())
    assert check in line


RAISING = {
    "Raising": (
        "noise",
        "own_parts.py, line {}, in whiten: AttributeError: 'numpy.ndarray' object",
    ),
    "RaisingBatches": ("sampler", "own_parts.py, line {}, in participations: TypeError: object of"),
}


@pytest.mark.short("RaisingBatches-*")
@pytest.mark.parametrize("lies_in", ["current folder", "PYTHONPATH"])
@pytest.mark.parametrize("part", RAISING)
def test_an_error_of_an_own_part_is_one_line_with_its_place(
    part, lies_in, command, tmp_path, monkeypatch
):
    kind, told = RAISING[part]
    if lies_in == "PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.chdir(tmp_path.parent)
    words = words_of("train", kind, f"own_parts:{part}").replace("store", "--task ratings", 1)
    last = PROGRAM[: PROGRAM.index("\n\n\n", PROGRAM.index(f"class {part}("))].count("\n") + 1
    assert told.format(last) in command.refuses(*words.split(), "--no-audit", "--begin")


@pytest.mark.parametrize("kind", OWN)
def test_help_shows_the_settings_of_an_own_part(kind, command):
    own, _, settings = KINDS[kind]
    shown = command.help("train", f"--{kind}", f"own_parts:{own}")
    for name in settings:
        assert f"--{name.replace('_', '-')} " in shown


@pytest.mark.parametrize("kind", OWN)
def test_a_spec_keeps_an_own_part_on_disk_as_in_code(kind, module):
    own, _, settings = KINDS[kind]
    part = getattr(module, own)(**settings)
    asked = {kind: part, "learning_rate": 0.5, "schedule": "constant", "noise_multiplier": 1.0}
    asked |= {"l2_clip_norm": 1.0, "calibration": "none"}
    spec = RunSpec.of(SETTINGS["poisson"](batch_size=4, epochs=1), **asked)
    by_name = {**asked, kind: {"name": f"own_parts:{own}", **settings}}
    assert RunSpec.of(spec.sampler, **by_name) == spec == spec.but(compute=None)
    record = json.loads(json.dumps(spec.record()))
    assert RunSpec.from_record(record, "config.json").record() == record
    assert type(getattr(spec, kind)) is type(part)
    changed = spec.but(learning_rate=0.25)
    assert changed.optimizer.learning_rate == 0.25
    assert dataclasses.replace(changed, optimizer=spec.optimizer) == spec


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", SWEEPS)
def test_a_sweep_runs_an_own_part(kind, form, tmp_path):
    text = sweep_of(kind, form)
    (run,) = plan(parsed(text), tmp_path, "own.toml")
    record = run.spec.record()[kind]
    settings = KINDS[kind][2] if "{{" in form else {}
    assert {**record, "name": f"own_parts:{KINDS[kind][0]}", **settings} == record
    assert KINDS[kind][0] in run.out.name


PROBLEMS = {
    "own_parts:Missing": "has no {} 'Missing'",
    "own_parts:NOTHING": "has no {} 'NOTHING'",
    "no_such_module:Any": "cannot be imported",
    "poison": "{}",
}
UNUSABLE = {
    ("noise", "Unpriced"): "the noise own_parts:Unpriced lacks add",
    ("clipping", "Bare"): "the clipping rule own_parts:Bare must be a frozen dataclass",
    ("optimizer", "Hidden"): "optimizer own_parts:Hidden is compared without its power",
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize(("asked", "kind"), [*PAIRS, *(("train", kind) for kind in OWN)])
def test_a_name_without_a_part_is_refused_in_one_line(name, asked, kind, command):
    line = command.refuses(*words_of(asked, kind, name).split())
    noun = OWN[kind].noun if kind in OWN else kind
    assert name.partition(":")[0] in line
    assert PROBLEMS[name].format(noun if ":" in name else "") in line


@pytest.mark.parametrize(("kind", "name"), UNUSABLE)
def test_a_part_that_breaks_its_claims_is_refused_before_data(kind, name, command, monkeypatch):
    monkeypatch.setattr("dpsgd.runs.plan.rows_of", lambda task: pytest.fail("data were read"))
    words = words_of("train", kind, f"own_parts:{name}").replace("store", "--task ratings", 1)
    assert UNUSABLE[kind, name] in command.refuses(*words.split())


def test_lazy_tables_refuse_an_own_subclass_of_independent_noise(module):
    spec = RunSpec.of(SETTINGS["poisson"](), noise_multiplier=1.0, noise="own_parts:Fresh")
    lazy = Lazy(learning_rate=0.5, momentum=0.0)
    assert "noise" in str(conflict_of(dataclasses.replace(spec, tables=lazy)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_sweep_names_the_place_of_an_unknown_part(name, kind, tmp_path):
    text = sweep_of(kind, SWEEPS[0], name)
    with pytest.raises(ValueError, match=rf"^own.toml, (grid 1, {kind}\[0\]|run): ") as why:
        plan(parsed(text), tmp_path, "own.toml")
    assert PROBLEMS[name].format(OWN[kind].noun if kind in OWN else kind) in str(why.value)


SUMMARIES = ["report FOLDER --out r.html", "results FOLDER --plot a.png"]


@pytest.mark.parametrize("words", SUMMARIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_read_sweep_never_executes_the_code_that_it_names(words, kind, tmp_path, command):
    folder = tmp_path / "sweep"
    (folder / engine.RUNS).mkdir(parents=True)
    (folder / engine.ASKED).write_text(sweep_of(kind, SWEEPS[1]))
    path, imported = list(sys.path), set(sys.modules)
    with pytest.raises(ValueError, match="not imported: if you trust") as why:
        engine.read(folder)
    assert "\n" not in str(why.value)
    assert (sys.path, "own_parts" in sys.modules) == (path, False)
    assert "--trust MODULE" in command.refuses(*words.replace("FOLDER", "sweep").split())
    assert {name for name in sys.modules if name.startswith("own")} <= imported


READERS = ["ledger", "results", "report"]


@pytest.mark.parametrize("reader", READERS)
def test_a_ledger_executes_code_only_where_it_is_trusted(reader, command):
    said = command.refuses(reader, "no-such-run", "--trust", "no_such_module")
    assert "--trust no_such_module cannot be imported" in said
    assert "own_parts" not in sys.modules
    command.refuses(reader, "no-such-run")
    assert "own_parts" not in sys.modules
    command.refuses(reader, "no-such-run", "--trust", "own_parts")
    assert "own_parts" in sys.modules


def test_a_run_of_own_parts_is_resumed_priced_and_read(command, store, tmp_path):
    words = (
        f"train {store} sampler:own_parts:Batches --batch-size 40 --epochs 1 --learning-rate 0.01"
    )
    words += " --noise-multiplier 1 --begin --no-audit --model linear --max-buckets 16 --out run"
    words += " --overflow accumulate"
    for kind in OWN:
        own, _, settings = KINDS[kind]
        words += f" --{kind} own_parts:{own}"
        words += "".join(f" --{k.replace('_', '-')} {x}" for k, x in settings.items())
    command(*words.split())
    sys.modules.pop("own_parts")
    assert "--trust MODULE" in command.refuses("ledger", "run")
    assert "own_parts" not in sys.modules
    command("resume", "run")
    sys.modules.pop("own_parts")
    for words in ("ledger run", "results run --out t.csv", "report run --out r.html"):
        assert "--trust MODULE" in command.refuses(*words.split())
        assert "own_parts" not in sys.modules
    for words in ("ledger run", "results run --out t.csv", "report run --out r.html"):
        command(*words.split(), "--trust", "own_parts")
    assert "own_parts:Steps b1-0.5" in (tmp_path / "t.csv").read_text()
    assert "Whole, share=0.5" in (tmp_path / "run" / "report.md").read_text()


USERS = "--sampler own_parts:Users --max-contributions 2"
MEETINGS = {
    "rows": ("--sampler own_parts:Batches --noise own_parts:Fresh --model linear", "example"),
    "users, dot": (f"{USERS} --noise own_parts:Fresh --interaction dot --optimizer adamw", "user"),
    "users, cross, lazy": (f"{USERS} --interaction cross --tables lazy", "user"),
}


@pytest.mark.long
@pytest.mark.parametrize(("words", "unit"), MEETINGS.values(), ids=MEETINGS)
def test_own_parts_meet_at_the_price_of_their_sampler(words, unit, command, tmp_path):
    rows = [f"{i % 3 // 2},{i},item {i % 7},user {i % 90}" for i in range(600)]
    (tmp_path / "t.csv").write_text("\n".join(["y,row,item,who", *rows]) + "\n")
    columns = "--label y --numbers row --bounds row=0:600 --categories item --user who"
    command("prepare", "csv", "t.csv", "store", *columns.split())
    own = "--clipping own_parts:Whole --batch-size 16 --epochs 1 --noise-multiplier 2 --out run"
    if "--optimizer" not in words:
        own += " --optimizer own_parts:Steps --learning-rate 0.01"
    command("train", "store", *words.split(), *own.split())
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    count, steps = report["num_examples"], report["num_steps"]
    law = UserPoissonProfile(2.0, steps, 16 / count, 2)
    if unit == "example":
        law = PoissonProfile(2.0, 16 / count, steps)
    price = epsilon(law, report["delta"])
    # Truncated batches cost a little of delta.
    assert price.lower <= report["epsilon_upper"] <= 1.02 * price.upper
    assert report["unit"] == unit
    assert report["audit"].startswith("passed: the compiled program and the draws")


@pytest.mark.long
def test_compare_trains_own_parts_beside_the_packages_own(command, store, tmp_path):
    words = f"compare --train {store} --out out --noise-multiplier 2 --repetitions 1"
    words += " --sampler own_parts:Batches poisson --batch-size 40 --learning-rate 0.02"
    for kind in OWN:
        words += f" --{kind} own_parts:{KINDS[kind][0]}"
    command(*words.split())
    runs = [path.parent for path in (tmp_path / "out").glob("runs/*/report.json")]
    reports = [json.loads((run / "report.json").read_text()) for run in runs]
    assert {report["sampler"] for report in reports} == {"own_parts:Batches", "poisson"}
    assert len({report["epsilon_upper"] for report in reports}) == 1
    for run, report in zip(runs, reports, strict=True):
        assert report["audit"].startswith("passed: the compiled program and the draws")
        config = json.loads((run / "config.json").read_text())
        assert config["learning_rate"] == 0.02
        assert [config[kind]["name"] for kind in OWN] == [f"own_parts:{KINDS[k][0]}" for k in OWN]


@pytest.mark.long
def test_an_own_rule_that_changes_is_audited_again_at_resume(command, tmp_path):
    command("prepare", "synthetic", "store", "--num-rows", "800")
    words = words_of("train", "clipping", "own_parts:Whole")
    command(*words.split(), "--model", "linear", "--begin")
    sys.modules.pop("own_parts")
    unbounded = PROGRAM.replace("[0], l2_clip_norm,", "[0], 2 * l2_clip_norm,")
    assert unbounded != PROGRAM
    (tmp_path / "own_parts.py").write_text(unbounded)
    assert "audit" in command.refuses("resume", "run").lower()
    sys.modules.pop("own_parts")
    (tmp_path / "own_parts.py").write_text(PROGRAM)
    assert "audit: passed" in command("resume", "run")


def test_a_ledger_names_a_noise_by_its_class_and_not_its_base(module):
    assert module.Fresh().record()["name"] == "own_parts:Fresh"
