"""A run may start from an earlier model, whose rows keep the guarantee that they have."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_task import Line, Words, config_of, line, params_of, run_and_stop, short_blocks

from accounting import Bound, epsilon
from dpsgd import Mechanism, Segment, cost, resume, run
from dpsgd.models.model import export
from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.initial import check_other_rows, earlier_guarantees, initial_params
from dpsgd.runs.ledger import read
from dpsgd.runs.result import Bundle
from dpsgd.runs.terms import Terms
from experiments.cli import main
from samplers import Multistage, UnitTree
from samplers.settings import SETTINGS

sys.path.insert(0, str(Path(__file__).parents[1] / "selection"))
from toy_trials import candidate, select

ORDERED = SETTINGS["deterministic"](batch_size=16, epochs=3)  # its cost is computed at once
TOMORROW, LATER = Line(seed=1), Line(seed=2)
NONE = "NO GUARANTEE (public rows need none)"


def config(**options):
    return config_of(sampler=ORDERED, insecure_seed=None, **options)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One model in each form in which a run may start from it."""
    home = tmp_path_factory.mktemp("earlier")
    run(line, config(), home / "run", name="tiny_task:line")
    export(home / "run", home / "exported", task=line)
    weights = params_of(home / "run")["['w']"]
    np.savez(home / "dotted.npz", w=weights)
    np.savez(home / "paths.npz", **{"['w']": weights})
    return home


@pytest.fixture(scope="module")
def chain(models):
    """A run from the first one's model, and a run from its model."""
    run(TOMORROW, config(init_from=str(models / "run")), models / "second")
    run(LATER, config(init_from=str(models / "second"), noise_multiplier=2.0), models / "third")
    return [read(models / name / "ledger.jsonl") for name in ("run", "second", "third")]


FORMS = ["run", "exported", "dotted.npz", "paths.npz"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_model_is_where_a_run_starts(models, form, tmp_path):
    found = initial_params(TOMORROW.init(0), str(models / form))[0]
    expected = params_of(models / "run")["['w']"]
    assert (found["w"] == expected).all()
    record = run(
        TOMORROW, config(init_from=str(models / form), learning_rate=1e-30), tmp_path / "o"
    )
    assert (params_of(tmp_path / "o")["['w']"] == expected).all()
    before = NONE if form.endswith("npz") else record["guarantee"].split(" (zero-out")[0]
    assert [text.removesuffix(" (unit: one example)") for text in record["earlier"]] == [before]


def test_a_run_has_the_cost_that_it_has_from_fresh_parameters(chain):
    _, second, third = chain
    for history in (second, third):
        mechanism = history.attempts[0].terms.mechanism
        fresh = cost([Segment(mechanism)], history.attempts[0].terms.delta)
        assert history.guarantee().epsilon == fresh.epsilon


def test_a_chain_says_of_each_model_before_it_what_its_rows_keep(chain, models, tmp_path):
    first, second, third = (history.guarantee() for history in chain)
    assert first.earlier == ()
    stated = f"epsilon <= {first.epsilon.format_upper()} at delta 1e-05 (unit: one example)"
    assert (second.earlier, third.earlier) == ((stated,), (stated, stated))
    assert f"each of 2 models {stated}" in third.sentence()
    run(TOMORROW, config(init_from=str(models / "dotted.npz")), tmp_path / "a")
    record = run(LATER, config(init_from=str(tmp_path / "a")), tmp_path / "b")
    assert record["earlier"][1:] == [NONE]
    assert NONE in record["guarantee"]


def test_runs_together_cost_a_unit_in_each_what_their_composition_costs(chain, models, capsys):
    first, second, third = chain
    both, all_three = second.guarantee(first), third.guarantee(first, second)
    mechanism = first.attempts[0].terms.mechanism
    twice = mechanism.privacy_of([range(30), range(30)])
    assert both.epsilon.upper == epsilon(twice, both.delta).upper > first.guarantee().epsilon.upper
    assert all_three.epsilon.upper > both.epsilon.upper
    main(["ledger", str(models / "second"), "--with", str(models / "run")])
    said = capsys.readouterr().out
    assert all_three.earlier == third.guarantee().earlier  # of each model once
    largest = max(one.guarantee().epsilon.upper for one in (first, second))
    assert f"in all 2 runs: {both.sentence()}" in said
    assert f"alone: epsilon <= {Bound(0, largest).format_upper()} at delta 1e-05" in said


def test_a_run_without_a_guarantee_leaves_none_for_its_own_rows(models, tmp_path, capsys):
    run(TOMORROW, config_of(init_from=str(models / "run"), insecure_seed=3), tmp_path / "open")
    main(["ledger", str(models / "run"), "--with", str(tmp_path / "open")])
    assert "in one of the runs alone: NO GUARANTEE" in capsys.readouterr().out


@pytest.mark.parametrize("before", ["run", "second"])
def test_the_rows_of_a_model_before_are_refused(models, chain, before, tmp_path):
    with pytest.raises(ValueError, match="run was trained on these very rows"):
        run(line, config(init_from=str(models / before)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def damage(folder, how):
    if how == "gone":
        shutil.rmtree(folder)
    elif how == "unfinished":
        (folder / "report.json").unlink()
    elif how == "edited":
        np.savez(folder / "params.npz", **{"['w']": np.zeros(3, np.float32)})
    elif how == "cut":
        (folder / "params.npz").write_bytes((folder / "params.npz").read_bytes()[:100])


@pytest.mark.parametrize(
    ("form", "how"),
    [("run", "unfinished"), *((f, h) for f in FORMS[:2] for h in ("gone", "edited", "cut"))],
)
def test_what_is_no_whole_model_is_refused_before_a_run_begins(models, form, how, tmp_path):
    shutil.copytree(models / form, tmp_path / "model")
    damage(tmp_path / "model", how)
    with pytest.raises((ValueError, FileNotFoundError), match="model"):
        run(TOMORROW, config(init_from=str(tmp_path / "model")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_other_shapes_is_refused(models, form, tmp_path):
    with pytest.raises(ValueError, match=r"does not hold the parameter (\['w'\]|w) \(4,\)"):
        run(Line(width=4, seed=1), config(init_from=str(models / form)), tmp_path / "out")


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_diverged_is_no_start(models, form, tmp_path):
    path = tmp_path / form
    (shutil.copytree if (models / form).is_dir() else shutil.copy)(models / form, path)
    name = "w" if form.startswith("dotted") else "['w']"
    file = path / "params.npz" if path.is_dir() else path
    np.savez(file, **{name: np.array([1, np.nan, 2], np.float32)})
    if form == "exported":
        manifest = path / "model.json"
        task = json.loads(manifest.read_text())["task"]
        manifest.write_text(json.dumps(Bundle.manifest(path, task)))
    with pytest.MonkeyPatch.context() as patch:
        if form == "run":
            patch.setattr(RunDirectory, "check_released", lambda self: None)
        with pytest.raises(ValueError, match="not finite numbers"):
            run(TOMORROW, config(init_from=str(path)), tmp_path / "out")


def forged(models, folder, **said):
    """An export whose guarantee says something else, with checksums that agree."""
    shutil.copytree(models / "exported", folder)
    record = json.loads((folder / "guarantee.json").read_text())
    (folder / "guarantee.json").write_text(json.dumps({**record, **said}))
    task = json.loads((folder / "model.json").read_text())["task"]
    (folder / "model.json").write_text(json.dumps(Bundle.manifest(folder, task)))
    return folder


@pytest.mark.parametrize(
    "said",
    [
        {"unit": "user)\nepsilon <= 0"},
        {"unit": "user); this run: epsilon <= 0 (unit: one user"},
        {"unit": ""},
        {"earlier": ["epsilon <= 0.001 for the rows of this run"]},
        {"epsilon_upper": -1.0},
        {"delta": 0.5},
    ],
    ids=repr,
)
def test_what_a_bundle_says_of_its_rows_is_no_claim_of_other_rows(models, said, tmp_path):
    with pytest.raises(ValueError, match=r"is damaged|delta must lie in"):
        earlier_guarantees(str(forged(models, tmp_path / "model", **said)))
    kept = {"unit": "user's day", "earlier": [NONE]}
    found = earlier_guarantees(str(forged(models, tmp_path / "kept", **kept)))
    assert found[0].endswith("(unit: one user's day)")
    assert found[1:] == (NONE,)


def test_a_run_that_was_cut_resumes_from_the_same_start(models, tmp_path):
    options = {"insecure_seed": 3, "init_from": str(models / "run")}
    run(TOMORROW, config_of(**options), tmp_path / "whole")
    cut = run_and_stop(TOMORROW, config_of(**options), tmp_path / "cut")
    shutil.move(models / "run", models / "moved")
    try:
        with pytest.raises(FileNotFoundError, match="run does not exist"):
            resume(cut)
    finally:
        shutil.move(models / "moved", models / "run")
    with pytest.raises(ValueError, match="run was trained on these very rows"):
        resume(cut, line)
    resume(cut)
    assert (params_of(cut)["['w']"] == params_of(tmp_path / "whole")["['w']"]).all()
    assert len(read(cut / "ledger.jsonl").attempts) == 1


def test_what_is_no_finished_run_is_said(tmp_path):
    cut = run_and_stop(line, config_of(), tmp_path / "cut")
    (tmp_path / "empty").mkdir()
    for folder, why in ((cut, "`dpsgd resume"), (tmp_path / "empty", "is not the directory of a")):
        with pytest.raises(FileNotFoundError, match=why):
            run(TOMORROW, config(init_from=str(folder)), tmp_path / "out")


@pytest.mark.parametrize("tables", ["dense", "lazy"])
def test_a_checkpoint_is_no_model_whatever_rules_say_of_its_arrays(tables, tmp_path):
    options = {"tables": tables} | ({"tables_learning_rate": 0.5} if tables == "lazy" else {})
    with short_blocks():
        cut = run_and_stop(Words(), config_of(**options), tmp_path / "cut")
    (checkpoint,) = (cut / "checkpoints").iterdir()
    how = {"init_from": str(checkpoint), "init_map": (r"state\.raw_params\.(.*)=\1", ".*=")}
    with pytest.raises(ValueError, match="is a checkpoint of a run that is not finished"):
        run(Words(seed=1), config_of(**how), tmp_path / "out")


def test_a_model_that_took_the_place_of_the_one_before_it_ends_the_search(models, tmp_path):
    today = tmp_path / "today"
    shutil.copytree(models / "run", today)
    run(TOMORROW, config(init_from=str(today)), tmp_path / "next")
    shutil.rmtree(today)
    (tmp_path / "next").rename(today)  # it says that it began with itself
    check_other_rows(str(today), "other rows")


def test_runs_of_which_no_common_cost_is_proved_are_not_counted_together(models, chain, tmp_path):
    unfinished = run_and_stop(LATER, config_of(), tmp_path / "cut")
    with pytest.raises(ValueError, match="counted together when finished"):
        chain[0].guarantee(read(unfinished / "ledger.jsonl"))
    with pytest.raises(ValueError, match="counted together when finished"):
        read(unfinished / "ledger.jsonl").guarantee(chain[0])
    tree = UnitTree.even((4, 4, 4), ("user", "session"))
    sampler = Multistage(tree, draws=(2, 2, 2), steps=4)
    attempt = dataclasses.replace(
        chain[0].attempts[0], terms=Terms(Mechanism(sampler, 1.0, 1.0), 1e-5, False, {})
    )
    for attempts in ([attempt], [attempt, *chain[0].attempts]):  # also before a change of course
        drawn = dataclasses.replace(chain[0], attempts=attempts)
        with pytest.raises(ValueError, match="from a tree"):
            chain[0].guarantee(drawn)


def test_a_selection_starts_from_fresh_parameters(models, tmp_path):
    with pytest.raises(ValueError, match="init_from: a selection trains from fresh parameters"):
        select(tmp_path / "out", [candidate(init_from=str(models / "run"))])
    assert not (tmp_path / "out").exists()


@dataclasses.dataclass(frozen=True)
class Sized(Words):
    """Words, of which a run chooses how many coordinates they have where that is left open."""

    dim: int | None = None
    sizes: tuple[int, ...] | None = None
    places: Path | None = None
    data: str | None = None

    def settle(self, request):
        return (
            (dataclasses.replace(self, dim=5), {"dim": "few"}) if self.dim is None else (self, {})
        )

    def init(self, seed):
        return dataclasses.replace(Words(), width=self.dim or 5).init(seed)


@pytest.mark.parametrize("form", ["run", "exported"])
def test_what_a_task_leaves_open_is_as_the_earlier_model_has_it(form, tmp_path):
    run(Sized(dim=2, sizes=(3, 4), places=tmp_path, data="monday"), config(), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "exported", task=Sized)
    lines, start = [], config(init_from=str(tmp_path / form))
    run(Sized(seed=1), start, tmp_path / "next", progress=lines.append)
    assert params_of(tmp_path / "next")["['w']"].shape == (2,)
    assert "chosen: dim 2, sizes (3, 4), as in the model that it starts from" in lines
    settings = json.loads((tmp_path / "next" / "config.json").read_text())["task"]["settings"]
    assert (settings["dim"], settings["places"], settings["data"]) == (2, None, None)
    resume(run_and_stop(Sized(seed=1), start, tmp_path / "cut"), Sized(seed=1))
    with pytest.raises(ValueError, match=r"\(400, 3\): 'table' is \(400, 2\)"):
        run(Sized(seed=1, dim=3), start, tmp_path / "other")


def test_tables_that_are_not_trained_are_named_with_what_trains_others(tmp_path):
    options = {"tables": "lazy", "tables_learning_rate": 0.5, "train": "^w"}
    with pytest.raises(ValueError, match=r"tables lazy: .*; train, '\^w', is for other parameters"):
        run(Words(), config(**options), tmp_path / "out")


@pytest.mark.short("lazy")
@pytest.mark.parametrize("tables", ["dense", "lazy"])
def test_tables_start_from_an_earlier_model_too(tables, tmp_path):
    options = {"tables": tables} | ({"tables_learning_rate": 0.5} if tables == "lazy" else {})
    run(Words(), config(**options), tmp_path / "a")
    start = {"init_from": str(tmp_path / "a"), "learning_rate": 1e-30}
    options |= {"tables_learning_rate": 1e-30} if tables == "lazy" else {}
    run(Words(seed=1), config(**{**options, **start}), tmp_path / "b")
    before, after = params_of(tmp_path / "a"), params_of(tmp_path / "b")
    assert all((before[name] == after[name]).all() for name in before)
