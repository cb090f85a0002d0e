"""A run may start from a trained model: its sentence then has a price for that model's rows too."""

import dataclasses
import json
import shutil
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from tiny_task import Line, Words, config_of, line, params_of, run_and_stop

from accounting import Bound, TrialCount, epsilon
from dpsgd import Mechanism, Segment, cost, resume, run
from dpsgd.core.segments import Initial, Trials
from dpsgd.models.model import export
from dpsgd.runs.attempts import STOP
from dpsgd.runs.history import read
from dpsgd.runs.initial import EarlierModel
from dpsgd.runs.result import Bundle, FinishedRun
from dpsgd.runs.terms import Terms, segment_records
from experiments.cli import main
from samplers import BallsAndBins, Deterministic, Multistage, Poisson, UnitTree, UserPoisson
from samplers.settings import SETTINGS

sys.path.insert(0, str(Path(__file__).parents[1] / "selection"))

ORDERED = SETTINGS["deterministic"](batch_size=16, epochs=3)  # its cost is computed at once
TOMORROW, LATER = Line(seed=1), Line(seed=2)
UNKNOWN = "for rows that did, its cost adds to this"
BEGUN = "for rows that did not train the initial model; for rows that did, "


def config(**options):
    return config_of(sampler=ORDERED, insecure_seed=None, **options)


def history(path):
    return read(path / "ledger.jsonl")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One model in each form in which a run may start from it."""
    home = tmp_path_factory.mktemp("earlier")
    run(line, config(), home / "run", name="tiny_task:line")
    export(home / "run", home / "exported", task=line)
    weights = params_of(home / "run")["['w']"]
    np.savez(home / "dotted.npz", w=weights)
    np.savez(home / "paths.npz", **{"['w']": weights.astype(np.float64)})
    return home


@pytest.fixture(scope="module")
def chain(models):
    """A run from the first one's model, and a run from its model."""
    run(TOMORROW, config(init_from=str(models / "run")), models / "second")
    run(LATER, config(init_from=str(models / "second"), noise_multiplier=2.0), models / "third")
    return [history(models / name) for name in ("run", "second", "third")]


KNOWN, ARRAYS = ["run", "exported"], ["dotted.npz", "paths.npz", "run/params.npz"]


@pytest.mark.parametrize("form", KNOWN + ARRAYS)
def test_a_run_starts_from_the_parameters_of_every_form(models, form):
    found = EarlierModel.read(str(models / form)).params(TOMORROW.init(0), TOMORROW)
    assert (found["w"] == params_of(models / "run")["['w']"]).all()
    assert found["w"].dtype == np.float32


@pytest.mark.parametrize("form", KNOWN)
def test_known_start_is_priced_together_with_the_run(models, form, tmp_path, capsys, monkeypatch):
    """Also on the very rows that trained the initial model: they cost both trainings."""
    out, reads = tmp_path / "out", []
    for kind in (Bundle, FinishedRun):
        sound = kind.read
        monkeypatch.setattr(kind, "read", lambda path, read=sound: reads.append(path) or read(path))
    record = run(line, config(init_from=str(models / form), noise_multiplier=2.0), out)
    assert [path for path in reads if path != out] == [models / form]
    earlier = history(models / "run")
    mechanisms = [earlier.attempts[0].terms.mechanism, history(out).attempts[0].terms.mechanism]
    # The oracle: two Gaussian mechanisms are one of the summed precisions.
    precision = sum(3 / mechanism.noise_multiplier**2 for mechanism in mechanisms)
    alone = Mechanism(mechanisms[0].sampler, (3 / precision) ** 0.5, 1.0)
    exact = epsilon(alone.privacy(), record["delta"]).lower
    assert exact <= record["epsilon_upper_together"] > record["epsilon_upper"]
    main(["ledger", str(out), "--with", str(models / "run")])
    shown = capsys.readouterr().out
    together = Bound(0, record["epsilon_upper_together"]).format_upper()
    assert f"in all 2 runs: epsilon <= {together}, for at most 2 attempts of 6 ep" in shown
    said = f"{BEGUN}epsilon <= {together} (this run and {form} together), for at most "
    export(out, tmp_path / "exported", task=line)
    exported = json.loads((tmp_path / "exported" / "guarantee.json").read_text())
    for place in (
        record["guarantee"],
        history(out).guarantee().sentence(),
        exported["guarantee"],
        (out / "report.md").read_text().replace("\n", " "),
    ):
        assert said in place


@pytest.mark.parametrize("form", ARRAYS)
def test_cost_of_arrays_adds_to_the_run(models, form, tmp_path):
    record = run(line, config(init_from=str(models / form)), tmp_path / "out")
    assert BEGUN + "its cost adds to this" in record["guarantee"]
    assert record["epsilon_upper_together"] is None


def test_ledger_counts_arrays_of_a_named_run_once(models, tmp_path):
    run(line, config(init_from=str(models / "run/params.npz")), tmp_path / "out")
    first, second = history(models / "run"), history(tmp_path / "out")
    together = second.guarantee(first)
    assert together.epsilon == cost([*first.parts, *second.parts], 1e-5).epsilon
    assert not together.initial_names


def test_ledger_keeps_an_initial_model_that_no_other_run_trained(models, tmp_path, capsys):
    """Also if the run released its parameters unchanged, with the same SHA-256."""
    still = config(init_from=str(models / "dotted.npz"), learning_rate=1e-30)
    run(TOMORROW, still, tmp_path / "still")
    same = tmp_path / "still" / "params.npz"
    for name, delta in (("b", 1e-4), ("c", 1e-5)):
        how = {"learning_rate": 1e-30, "target_delta": delta}
        run(LATER, config(init_from=str(same), **how), tmp_path / name)
        assert (tmp_path / name / "params.npz").read_bytes() == same.read_bytes()
    b, c, first = (history(path) for path in (tmp_path / "b", tmp_path / "c", models / "run"))
    for together in (b.guarantee(c), c.guarantee(b)):
        assert UNKNOWN in together.sentence()
    assert UNKNOWN not in c.guarantee(b, first).sentence()  # trained parameters of these bytes
    main(["ledger", str(tmp_path / "c"), "--with", str(tmp_path / "b")])
    said = "at delta 0.0001, the largest of the runs, for rows that trained no initial"
    assert said in capsys.readouterr().out


def test_ledger_states_both_prices_of_an_interrupted_initial_run(tmp_path, capsys):
    cut = run_and_stop(LATER, config_of(), tmp_path / "cut")
    (cut / STOP).unlink()  # as if it was killed
    alone = resume(cut)["epsilon_upper_otherwise"]
    record = run(line, config(init_from=str(cut), noise_multiplier=9.0), tmp_path / "out")
    main(["ledger", str(tmp_path / "out"), "--with", str(cut)])
    shown = capsys.readouterr().out
    for line_begin, upper in (
        ("in one of the runs alone", alone),
        ("in all 2 runs", record["epsilon_upper_together_otherwise"]),
    ):
        (told,) = (one for one in shown.splitlines() if f"for a unit with rows {line_begin}" in one)
        assert "if interruptions did not depend on what the run" in told
        assert f"otherwise <= {Bound(0, upper).format_upper()}, for " in told


def test_a_run_has_the_cost_that_it_has_from_fresh_parameters(chain):
    for one in chain[1:]:
        terms = one.attempts[0].terms
        fresh = cost([Segment(terms.mechanism)], terms.delta)
        assert one.guarantee().epsilon == fresh.epsilon
        assert one.guarantee().total_variation == fresh.total_variation


def test_cost_of_a_chain_is_known_if_all_its_runs_are_named(chain, models, tmp_path):
    first, second, third = chain
    assert second.guarantee().together is not None
    assert UNKNOWN in third.guarantee().sentence()
    assert UNKNOWN in third.guarantee(second).sentence() or second.guarantee().together
    both, all_three = second.guarantee(first), third.guarantee(first, second)
    mechanism = first.attempts[0].terms.mechanism
    twice = mechanism.privacy_of([range(30), range(30)])
    assert both.epsilon.upper == epsilon(twice, both.delta).upper > first.guarantee().epsilon.upper
    assert both.epsilon == second.guarantee().together.epsilon
    assert all_three.epsilon.upper > both.epsilon.upper
    assert not both.initial_names + all_three.initial_names
    export(models / "second", tmp_path / "exported", task=line)  # of a run from another model
    record = run(LATER, config(init_from=str(tmp_path / "exported")), tmp_path / "out")
    assert UNKNOWN in record["guarantee"]


def test_initial_model_without_a_guarantee_leaves_its_rows_none(models, tmp_path, capsys):
    run(TOMORROW, config_of(insecure_seed=3), tmp_path / "open")
    record = run(line, config(init_from=str(tmp_path / "open")), tmp_path / "out")
    assert f"{BEGUN}NO GUARANTEE" in record["guarantee"]
    main(["ledger", str(models / "run"), "--with", str(tmp_path / "open")])
    assert "in one of the runs alone: NO GUARANTEE" in capsys.readouterr().out


@pytest.mark.parametrize("other", ["of a tree", "of users", "of a selection"])
def test_no_joint_cost_is_stated_where_none_is_proved(other):
    own = Mechanism(Poisson(1000, batch_size=10), 2.0, 1.0)
    tree = Multistage(UnitTree.even((4, 4), ("user",)), draws=(2, 2), steps=4)
    segments = {
        "of a tree": (Segment(Mechanism(tree, 2.0, 1.0)),),
        "of users": (Segment(own, unit="user"),),
        "of a selection": (),
    }[other]
    whole = cost([Segment(own, initial=Initial("0", segments, "model"))], 1e-5)
    assert whole.together is None
    assert UNKNOWN in whole.sentence()


def test_users_in_both_runs_pay_for_both():
    days = [Mechanism(UserPoisson(n, 4, max_contributions=2), 4.0, 1.0) for n in (8, 12)]
    earlier, later = (Segment(day, unit="user") for day in days)
    initial = Initial("0", (earlier,), "monday")
    whole = cost([dataclasses.replace(later, initial=initial)], 1e-5)
    joint = cost([earlier, later], 1e-5).epsilon
    assert whole.together.epsilon == joint
    assert joint.upper > max(cost([day], 1e-5).epsilon.upper for day in (earlier, later))
    said = whole.sentence()
    assert BEGUN.replace("rows", "users") in said
    assert "for the other users, " in said


def test_joint_cost_counts_initial_models_once_and_attempts_each():
    own = Mechanism(Deterministic(1000, batch_size=10), 2.0, 1.0)
    other = Mechanism(Deterministic(1000, batch_size=20), 3.0, 1.0)
    earlier = Segment(other, not_covered=("labels",))
    known, unknown = Initial("0", (earlier,), "a"), Initial("1", (), "b")
    attempts = [Segment(own, range(7)), Segment(own, range(5, 100))]
    started = [dataclasses.replace(one, initial=known) for one in attempts]
    whole = cost(started, 1e-5)
    assert whole.together.epsilon == cost([earlier, *attempts], 1e-5).epsilon
    assert whole.by_task == ("labels",)
    assert "NOT COVERED: labels" in whole.sentence()
    started[0] = dataclasses.replace(started[0], initial=Initial("2", (earlier,), "c"))
    assert "(this run and c and a together)" in cost(started, 1e-5).sentence()
    started[0] = dataclasses.replace(started[0], initial=unknown)
    assert UNKNOWN in cost(started, 1e-5).sentence()


@pytest.mark.short("both")
@pytest.mark.parametrize("interrupted", ["initial", "run", "both"])
def test_joint_cost_has_a_second_price_if_a_run_was_interrupted(interrupted):
    sampler = BallsAndBins(400, batch_size=100, epochs=2, max_batch_size=400)
    mechanism = Mechanism(sampler, 2.0, 1.0)
    whole, parts = (
        [Segment(mechanism)],
        [Segment(mechanism, range(3)), Segment(mechanism, range(2, 8))],
    )
    earlier = parts if interrupted != "run" else whole
    own = parts if interrupted != "initial" else whole
    initial = Initial("0", tuple(earlier), "a")
    found = cost([dataclasses.replace(one, initial=initial) for one in own], 1e-5)
    entered = {"initial": 5, "run": 5, "both": 6}[interrupted]  # 1 and 2 epochs, or 2
    most = epsilon(dataclasses.replace(mechanism.sampler, epochs=entered).privacy(2.0), 1e-5)
    assert found.together.otherwise.lower <= most.upper
    assert most.lower <= found.together.otherwise.upper
    assert found.together.otherwise.upper > found.together.epsilon.upper
    otherwise = found.together.otherwise.format_upper()
    assert "(this run and a together) if interruptions did not depend" in found.sentence()
    assert f"the runs had released; otherwise <= {otherwise}, for at most" in found.sentence()
    assert found.record()["epsilon_upper_together_otherwise"] == found.together.otherwise.upper


def test_runs_price_no_selections_or_external_samplers():
    class Own(BallsAndBins):
        pass

    assert segment_records([Segment(Mechanism(Own(1000, batch_size=10), 1.0, 1.0))]) == []
    trial = Segment(Mechanism(BallsAndBins(1000, batch_size=10), 1.0, 1.0))
    assert len(segment_records([trial])) == 1
    assert segment_records([Trials(TrialCount(4.0), (trial,), "score")]) == []


def test_terms_with_an_initial_model_survive_the_ledger():
    mechanism = Mechanism(Poisson(1000, batch_size=10, max_batch_size=40), 2.0, 1.0)
    facts = {"reproducible_noise": True, "lazy_tables": True, "not_covered": ("labels",)}
    cut = Segment(mechanism, range(7), rows="their ledger", **facts)  # one price with its ledger's
    initial = Initial("0", (Segment(mechanism), cut), "a")
    terms = Terms(Segment(mechanism, initial=initial), 1e-5)
    read_back = Terms.from_record(json.loads(json.dumps(terms.record())))
    assert read_back == terms
    assert read_back.plan.initial.name == "a"


def copied(form, change):
    """Builds a copy of a model that was changed after its manifest was made."""

    def build(models, folder):
        change(Path(shutil.copytree(models / form, folder / "model")))
        return folder / "model"

    return build


def sealed(change):
    """Builds an export that was changed before its manifest was made."""

    def changed(folder):
        change(folder)
        task = json.loads((folder / "model.json").read_text())["task"]
        (folder / "model.json").write_text(json.dumps(Bundle.manifest(folder, task)))

    return copied("exported", changed)


def holding(*w):
    """Changes the parameters of a folder."""
    return lambda folder: np.savez(folder / "params.npz", **{"['w']": np.array(w, np.float32)})


def cut(folder):
    path = folder / "params.npz"
    path.write_bytes(path.read_bytes()[:100])


def of_negative_noise(folder):
    record = json.loads((folder / "guarantee.json").read_text())
    record["segments"][0]["noise_multiplier"] = -1.0
    (folder / "guarantee.json").write_text(json.dumps(record))


def content(written):
    """Builds a file of these bytes."""

    def build(models, folder):
        (folder / "model.npz").write_bytes(written)
        return folder / "model.npz"

    return build


def arrays(**named):
    """Builds a file of arrays."""
    np.savez(file := BytesIO(), **named)
    return content(file.getvalue())


def stopped(name):
    """Builds an unfinished run, and names a path in it."""
    return lambda models, folder: next(
        run_and_stop(line, config_of(), folder / "cut").parent.glob(name)
    )


FORMAT = r"model\.npz is damaged, or not an \.npz file"
UNFIT = {
    **{
        f"{form} {how}": (copied(form, change), "model")
        for form in KNOWN
        for how, change in (("gone", shutil.rmtree), ("edited", holding(0, 0, 0)), ("cut", cut))
    },
    "report gone": (copied("run", lambda at: (at / "report.json").unlink()), "`dpsgd resume"),
    "diverged": (sealed(holding(1, np.nan, 2)), "not finite numbers"),
    "damaged segment": (sealed(of_negative_noise), "guarantee.json is damaged: .*noise_multiplier"),
    "another shape": (
        arrays(w=np.zeros(4, np.float32)),
        r"w is float32\[4\], .* needs float32\[3\]",
    ),
    "another kind": (arrays(w=np.zeros(3, np.int32)), r"w is int32\[3\], .* needs float32\[3\]"),
    "another name": (arrays(v=np.zeros(3)), r"lacks the parameter w of shape \[3\]"),
    "a further array": (arrays(w=np.zeros(3), v=np.zeros(2)), "that the model does not: 'v'"),
    "no number": (arrays(w=np.array([1, np.nan, 2])), "'w' has entries that are not finite"),
    "too large for float32": (arrays(w=np.array([1, 1e300, 2])), "'w' has entries that are not"),
    "no content": (content(b""), FORMAT),
    "half of an archive": (content(b"PK"), FORMAT),
    "another format": (content(b"\x93NUMPY"), FORMAT),
    "no run": (lambda models, folder: folder, "is not a run directory"),
    "an unfinished run": (stopped("cut"), "`dpsgd resume"),
    "a checkpoint": (stopped("cut/checkpoints/*"), "or not an .npz file"),
}


@pytest.mark.parametrize(("build", "told"), UNFIT.values(), ids=UNFIT)
def test_an_initial_model_of_another_task_is_refused_early(build, told, models, tmp_path):
    path = build(models, tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=told):
        run(TOMORROW, config(init_from=str(path)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_columns_of_an_earlier_model_alone_are_named(models, tmp_path):
    class Described(Line):
        names = ("age",)

        def describe(self):
            return {**super().describe(), "columns": list(self.names)}

    class Wider(Described):
        names = ("age", "spend")

    earlier = tmp_path / "earlier"
    run(Wider(width=4), config(), earlier)
    message = r"other columns \(it has 'spend'\): .*w.* is float32\[4\].* needs float32\[3\]"
    with pytest.raises(ValueError, match=message):
        run(Described(seed=1), config(init_from=str(earlier)), tmp_path / "later")
    assert not (tmp_path / "later").exists()


def test_a_cut_run_resumes_from_the_same_start_alone(models, tmp_path):
    start = shutil.copytree(models / "run", tmp_path / "start")
    options = {"insecure_seed": 3, "init_from": str(start)}
    run(TOMORROW, config_of(**options), tmp_path / "whole")
    cut = run_and_stop(TOMORROW, config_of(**options), tmp_path / "cut")
    shutil.move(start, tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="start does not exist"):
        resume(cut)
    run(LATER, config(), start)
    with pytest.raises(ValueError, match="line 1: the run began with another initial"):
        resume(cut)
    shutil.rmtree(start)
    shutil.move(tmp_path / "moved", start)
    resume(cut)
    assert (params_of(cut)["['w']"] == params_of(tmp_path / "whole")["['w']"]).all()
    assert len(history(cut).attempts) == 1


def test_only_finished_runs_of_one_unit_are_counted_together(models, chain, tmp_path):
    unfinished = history(run_and_stop(LATER, config_of(), tmp_path / "cut"))
    for runs in ((chain[0], unfinished), (unfinished, chain[0])):
        with pytest.raises(ValueError, match="needs finished ones"):
            runs[0].guarantee(runs[1])
    tree = UnitTree.even((4, 4, 4), ("user", "session"))
    sampler = Multistage(tree, draws=(2, 2, 2), steps=4)
    attempt = dataclasses.replace(
        chain[0].attempts[0],
        terms=Terms(Segment(Mechanism(sampler, 1.0, 1.0), unit="example"), 1e-5),
        steps=range(4),
    )
    for attempts in ([attempt], [attempt, *chain[0].attempts]):  # also before a change of course
        drawn = dataclasses.replace(chain[0], attempts=attempts)
        with pytest.raises(ValueError, match="from a tree"):
            chain[0].guarantee(drawn)


@dataclasses.dataclass(frozen=True)
class Sized(Words):
    """Words with a number of coordinates that a run chooses if it is left open."""

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


@pytest.mark.short("exported")
@pytest.mark.parametrize("form", KNOWN)
def test_open_settings_of_a_task_are_those_of_the_initial_model(form, tmp_path):
    run(Sized(dim=2, sizes=(3, 4), places=tmp_path, data="monday"), config(), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "exported", task=Sized)
    lines, start = [], config(init_from=str(tmp_path / form))
    run(Sized(seed=1), start, tmp_path / "next", progress=lines.append)
    assert params_of(tmp_path / "next")["['w']"].shape == (2,)
    assert "chosen: dim 2, sizes (3, 4), as in its initial model" in lines
    settings = json.loads((tmp_path / "next" / "config.json").read_text())["task"]["settings"]
    assert (settings["dim"], settings["places"], settings["data"]) == (2, None, None)
    resume(run_and_stop(Sized(seed=1), start, tmp_path / "cut"), Sized(seed=1))
    with pytest.raises(
        ValueError, match=r"table.* is float32\[400, 2\], and the model needs float32\[400, 3\]"
    ):
        run(Sized(seed=1, dim=3), start, tmp_path / "other")


@pytest.mark.long
@pytest.mark.parametrize("tables", ["dense", "lazy"])
def test_tables_start_from_an_initial_model_too(tables, tmp_path):
    options = {"tables": tables} | ({"tables_learning_rate": 0.5} if tables == "lazy" else {})
    run(Words(), config(**options), tmp_path / "a")
    start = {"init_from": str(tmp_path / "a"), "learning_rate": 1e-30}
    options |= {"tables_learning_rate": 1e-30} if tables == "lazy" else {}
    run(Words(seed=1), config(**{**options, **start}), tmp_path / "b")
    before, after = params_of(tmp_path / "a"), params_of(tmp_path / "b")
    assert all((before[name] == after[name]).all() for name in before)
