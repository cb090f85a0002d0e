"""Each setting of a run meets each other one: every pair in a run, or refused at once in one line.

A row of a covering array is trained, stopped, resumed, evaluated, scored, exported and started
from, by the command. A new setting gets all of this by a value of `OPTIONS`.
"""

import itertools
import json
import os
import re
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from pairs import covering, pairs_of

from dpsgd.gradients.frozen import leaf_names
from dpsgd.models.model import read_model
from dpsgd.runs import job
from dpsgd.runs.history import read
from dpsgd.runs.spec import PARTS
from dpsgd.runs.stop import STOPPED
from experiments import cli
from experiments.tasks import TASKS, task_of
from experiments.tasks.ratings import ratings
from samplers.settings import SETTINGS

sys.path.insert(0, str(Path(__file__).parents[1] / "dpsgd" / "runs"))
from tiny_task import few_rows_are_calibrated, watched

NETWORK = "--model wide-and-deep --embedding-dim 2 --max-buckets 64 --hidden 3 --bins 2"
KINDS = {
    "binary": ("clicks", NETWORK, "--label y"),
    "classes": ("clicks", NETWORK, "--label kind --classes a,b,c"),
    "number": ("clicks", f"{NETWORK} --huber 2", "--label income --label-bounds 0:10"),
    "users": ("ratings", "--max-ratings 5", ""),
    "ratings": ("ratings", "--max-ratings 5 --rows ratings", ""),
    "images": ("images", "--channels 2", None),
}
"""What is trained: a task, its settings, and how its table is prepared; None if it brings one."""

TRAINED = {"clicks": "logit", "ratings": "factor", "images": "logit"}
TABLES = {"clicks": "embedding", "ratings": "bias", "images": "conv"}
CALIBRATED = {"binary": "platt", "classes": "temperature", "number": "affine"}
SIZES = "--batch-size 16 --epochs 2"
OPTIONS = {
    "task": tuple(KINDS),
    "sampler": (
        f"balls-and-bins {SIZES}",
        f"deterministic {SIZES}",
        f"shuffle {SIZES}",
        f"shuffle {SIZES} --order fixed",
        f"shuffle {SIZES} --num-shards 2",
        f"poisson {SIZES}",
        f"poisson {SIZES} --overflow accumulate",
        "multistage --draws 20 2 --steps 9 --clipped-level 1 --protected-level 1",
        "units-then-poisson --draws 20 --sampling-prob 0.5 --steps 9",
        f"user-poisson {SIZES}",
    ),
    "privacy": (
        "--noise-multiplier 1",
        "--target-epsilon 4",
        "--non-private",
    ),
    "noise": ("", "--bands 2", "--bands auto"),
    "tables": ("", "--tables lazy", "--tables auto"),
    "optimizer": ("", "--optimizer adamw", "--optimizer sgd", "--optimizer sgd --momentum 0.9"),
    "average": ("", "--average-tail 0.5", "--average-decay 0.9"),
    "schedule": ("", "--schedule constant", "--schedule cosine"),
    "clipping": tuple(f"--clipping {x}" for x in ("flat", "per-layer", "automatic")),
    "train": ("", "part", "table"),
    "start": ("", "run", "export", "file"),
    "compute": ("", "--compute bfloat16"),
    "calibration": ("", "--calibration none", "--calibration KIND"),
    "data_on": ("", "--data-on host"),
    "microbatch": ("", "--microbatch-size 3"),
}


def starting(*names):
    """The values of all options that begin so."""
    return {x for values in OPTIONS.values() for x in values if x.startswith(names)}


OF_TREES = starting("multistage", "units-then", "user-poisson")
FIXED = starting("deterministic") | {f"shuffle {SIZES} --order fixed"}
SEPARATED = FIXED | starting("balls-and-bins", "poisson")
CORRELATED = {"--bands 2", "--bands auto"}
SAMPLERS = set(OPTIONS["sampler"])
LAZY = {"--tables lazy"}
REFUSED = [
    (LAZY, CORRELATED, "tables lazy and b"),
    (LAZY, starting("--average"), "tables lazy and average"),
    (LAZY, {f"poisson {SIZES} --overflow accumulate"}, "tables lazy and overflow"),
    ({"--non-private"}, CORRELATED, "non-private and "),
    ({"--non-private"}, {"--calibration KIND"}, "calibration and non-private"),
    ({"--non-private"}, starting("--clipping") - {"--clipping flat"}, "non-private and clipping"),
    ({"--bands 2"}, SAMPLERS - SEPARATED, "bands"),
    ({"--calibration KIND"}, set(KINDS) - set(CALIBRATED), "calibration"),
    (LAZY, {"images"}, "tables lazy: the loss declares no look-ups"),
    (LAZY, {"part"}, "tables lazy: no derivative of the loss reaches a declared table"),
    ({"--calibration KIND"}, {"part", "table"}, "calibration=platt is not possible: it would"),
    (
        {"--noise-multiplier 1"},
        {"--bands auto"},
        SEPARATED - FIXED,
        starting("--optimizer sgd"),
        "bands=auto needs target-epsilon",
    ),
    (OF_TREES, set(KINDS) - {"ratings"}, "the sampler"),
    (OF_TREES, {"--calibration KIND"}, "calibration"),
]
"""Which values do not go together, and words of the line that says so."""


def refused(row):
    """Whether the values of a part of a row do not go together."""
    values = set(row.values())
    return any(not any(map(values.isdisjoint, sets)) for *sets, _ in REFUSED)


ROWS = covering(OPTIONS, refused)


def test_every_task_and_every_part_of_a_run_has_a_value():
    assert {task for task, *_ in KINDS.values()} == TASKS.keys()
    assert {value.split()[0] for value in OPTIONS["sampler"]} == SETTINGS.keys()
    words = {word for values in OPTIONS.values() for value in values for word in value.split()}
    choices = {choice.replace("_", "-") for kinds in PARTS.values() for choice in kinds}
    assert choices - {"", "dense", "adam"} <= {word.removeprefix("--") for word in words}


def test_every_pair_of_settings_is_in_a_row_or_refused():
    covered = set().union(*map(pairs_of, ROWS))
    for one in OPTIONS:
        for other in OPTIONS:
            for x in OPTIONS[one] if one < other else ():
                for y in OPTIONS[other]:
                    pair = {one: x, other: y}
                    assert (frozenset(pair.items()) in covered) != refused(pair), pair


def table(path, seed):
    """A table with a label of each kind."""
    rng = np.random.default_rng(seed)
    age, city = rng.uniform(16, 90, 150), rng.integers(0, 40, 150)
    y = rng.random(150) < 1 / (1 + np.exp(3 - age / 20))
    lines = [
        f"{a:.1f},c{c},{int(b)},{'abc'[(c + b) % 3]},{a / 10:.3f},{1 + b}"
        for a, c, b in zip(age, city, y, strict=True)
    ]
    path.write_text("\n".join(["age,city,y,kind,income,w", *lines]) + "\n")


def ratings_of(path, seed):
    found = ratings.synthetic(seed, num_users=240, num_items=40)
    rows = zip(found.user, found.item + 1, found.rating.astype(int), found.time, strict=True)
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))


WRITE = {"clicks": table, "ratings": ratings_of}


class Days:
    """Rows of each kind of three days, and models of the first day's, each made once."""

    def __init__(self, folder):
        self.folder = folder

    def words(self, kind, day):
        """The task, its rows of a day, and its settings, as the command has them."""
        task, settings, prepared = KINDS[kind]
        place = self.folder / f"{kind}{day}"
        if prepared is not None and not place.exists():
            raw = self.folder / f"{kind}{day}.csv" if prepared else place
            WRITE[task](raw, day)
            if prepared:
                split = "--split 0.6 0.2 0.2 --numbers age --bounds age=16:90 --categories city"
                words = f"prepare csv {raw} {place} {prepared} {split} --buckets 64"
                assert cli.main(words.split()) == 0
        data = [] if prepared is None else [str(place)]
        return ["train", "--task", task, *data, *settings.split()]

    def start(self, kind, form):
        """What a run starts from: a run of the first day, its export, or a file of its arrays."""
        place = self.folder / f"{kind}-run"
        if not place.exists():
            sampler = f"sampler:deterministic {SIZES} --noise-multiplier 1 --no-audit --out {place}"
            assert cli.main([*self.words(kind, 0), *sampler.split()]) == 0
            assert cli.main(["export", str(place), str(self.folder / f"{kind}-export")]) == 0
            params = read_model(place, kinds=TASKS).params
            named = zip(leaf_names(params), jax.tree.leaves(params), strict=True)
            arrays = {name: np.asarray(x) for name, x in named}
            np.savez(self.folder / f"{kind}-file.npz", **arrays)
        return self.folder / f"{kind}-{form}"


@pytest.fixture(scope="session")
def days(tmp_path_factory):
    return Days(tmp_path_factory.mktemp("days"))


@pytest.fixture(autouse=True)
def short():
    with pytest.MonkeyPatch.context() as patch, few_rows_are_calibrated():
        patch.setattr(job, "BLOCK_STEPS", 4)
        yield


def words_of(row, days):
    """A row as the command has it, but for where its run is to be."""
    kind, part, start = row["task"], row.get("train"), row.get("start")
    task = KINDS[kind][0]
    words = days.words(kind, 1) + f"sampler:{row['sampler']}".split()
    asked = (value for value in row.values() if value.startswith("--"))
    words += [word for value in asked for word in value.split()]
    if part:
        words += ["--train", {"part": TRAINED, "table": TABLES}[part][task]]
    if start:
        form = "file.npz" if start == "file" else start
        words += ["--init-from", str(days.start(kind, form))]
    words = [CALIBRATED.get(kind, "platt") if w == "KIND" else w for w in words]
    return words


DEFAULTS = {name: values[0] for name, values in OPTIONS.items()}
PAIRS = [
    pytest.param(
        {name: x for x in values for name in OPTIONS if x in OPTIONS[name]},
        line,
        id=" and ".join(values),
        marks=[pytest.mark.long] * ("images" in values),  # a model is trained first
    )
    for *sets, line in REFUSED
    for values in itertools.product(*map(sorted, sets))
]


@pytest.mark.parametrize(("pair", "line"), PAIRS)
def test_what_does_not_go_together_is_refused_at_once(pair, line, days, tmp_path, command):
    trees = {"task": "ratings"} if pair.get("sampler") in OF_TREES else {}
    words = words_of(DEFAULTS | trees | pair, days)
    assert line in command.refuses(*words, "--out", tmp_path / "run").replace("--", "")
    assert not (tmp_path / "run").exists()


def params_of(folder):
    params = read_model(folder, kinds=TASKS).params
    return dict(zip(leaf_names(params), jax.tree.leaves(params), strict=True))


def stop(number, block):
    if number == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def check(row, days, home, command):
    """Holds the claims of every run against those of a row."""
    kind, run, words = row["task"], home / "run", words_of(row, days)
    said = command(*words, "--out", run).splitlines()
    report = json.loads((run / "report.json").read_text())
    assert report["guarantee"] in said
    assert f"audit: {report['audit']}" in said
    of_users = kind == "users" or row["sampler"].startswith(("multistage", "user-poisson"))
    assert report["unit"] == ("user" if of_users else "example")
    assert command("ledger", run).splitlines()[-1] == report["guarantee"]
    page = (run / "report.md").read_text()
    for name in ("clipping", "compute", "average"):
        assert all(f" | {word} |" in page for word in row[name].split()[1:] if word != "flat")
    private, target = row["privacy"] != "--non-private", row["privacy"].split()
    assert ("NO GUARANTEE: no noise" in report["guarantee"]) == (not private)
    if target[0] == "--target-epsilon":
        assert 0.9 * float(target[1]) < report["epsilon_upper"] <= float(target[1])

    (attempt,) = read(run / "ledger.jsonl").attempts
    stated, mechanism = attempt.terms, attempt.terms.mechanism
    assert attempt.steps == range(mechanism.num_steps)
    calibrated = row["calibration"] == "--calibration KIND"
    assert not calibrated or mechanism.full_sums is not None
    assert len(report["initial_names"]) == bool(row["start"])
    assert report["epsilon_upper_together"] is None or row["start"] in ("run", "export")
    lazy = row["tables"] == "--tables lazy"
    assert not lazy or (stated.plan.lazy_tables and report["lazy_tables"])

    after, task = params_of(run), task_of(run)
    fresh = dict(zip(leaf_names(task.init(0)), jax.tree.leaves(task.init(0)), strict=True))
    before = fresh | (params_of(days.start(kind, "run")) if row["start"] else {})
    pattern = {"part": TRAINED, "table": TABLES}.get(row["train"], {}).get(KINDS[kind][0], "")
    trained = {name for name in after if re.search(pattern, name)}
    moved = {name for name in after if after[name].tobytes() != before[name].tobytes()}
    assert trained == set(stated.trained or after)
    # A row of one rating has no gradient in the factors.
    inert = kind == "ratings" and row["train"] == "part" and not private
    assert bool(moved) != inert
    assert moved <= trained

    command("export", run, home / "model")
    kept = json.loads((home / "model" / "guarantee.json").read_text())
    assert {name: report[name] for name in kept.keys() & report}.items() <= kept.items()
    assert set(kept.get("trained", after)) == trained
    if KINDS[kind][2] is not None:
        data, scores = words[3], []
        for one in (run, home / "model"):
            scores.append(home / f"{one.name}.csv")
            command("score", one, data, "--out", scores[-1])
            found = command("evaluate", one, data, "--split", "test")
            for name, value in report["metrics"].items():
                split, _, bare = name.partition("_")
                assert split != "test" or f"{bare}: {value:.6g}" in found
        assert scores[0].read_bytes() == scores[1].read_bytes()

    again = [*days.words(kind, 2), "sampler:deterministic", "--batch-size", "16", "--epochs", "1"]
    again += ["--noise-multiplier", "2", "--learning-rate", "1e-30", "--calibration", "none"]
    next_from = home / "model" if kind == "images" else run
    command(*again, "--no-audit", "--init-from", next_from, "--out", home / "next")
    assert all(
        np.abs(x - after[name]).max() < 1e-20 for name, x in params_of(home / "next").items()
    )
    following = json.loads((home / "next" / "report.json").read_text())
    assert following["initial_names"] == [next_from.name]
    assert following["epsilon_upper_together"] is None or (private and not row["start"])

    seeded = [*words, "--insecure-seed", "3", "--no-audit", "--out"]
    command(*seeded, home / "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "train_blocks", watched(stop))
        command(*seeded, home / "resumed", status=STOPPED)
    command("resume", home / "resumed")
    # A clean stop flushes lazy tables, so that the rest of the run draws other noise.
    bits = () if report["lazy_tables"] else ("params.npz", "diagnostics_not_private.jsonl")
    for name in ("guarantee.json", *bits):
        whole, resumed = ((home / at / name).read_bytes() for at in ("whole", "resumed"))
        assert whole == resumed, name


def named(row):
    return " ".join(filter(None, row.values()))


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=named)
def test_every_row_trains_resumes_evaluates_exports_and_restarts(row, days, tmp_path, command):
    check(row, days, tmp_path, command)
