"""Evidence is of the rows that are said, beside peers on the same rows, or says why it is not."""

import dataclasses
import gzip
import itertools
import json
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from accounting import PoissonProfile, ShuffleProfile
from experiments.benchmarks import (
    evidence,
    evidence_data,
    evidence_defaults,
    evidence_papers,
    evidence_peers,
    evidence_rules,
)
from experiments.benchmarks.__main__ import chosen
from experiments.benchmarks.case import cases
from experiments.benchmarks.evidence_papers import PUBLISHED
from experiments.benchmarks.evidence_rules import (
    GRID,
    UNITS,
    Choice,
    Facts,
    Law,
    best,
    loses_least,
    score,
)
from experiments.benchmarks.record import Record, read
from experiments.figures.evidence import points, unearned
from experiments.tasks.images.task import Images


@pytest.fixture
def folder(tmp_path):
    """A folder with a table of the columns of Adult, in which age is the number of the row."""
    table = evidence_data.ADULT
    rng = np.random.default_rng(0)
    lines = [",".join([*table.bounds, *table.categories, table.label])]
    for number in range(60):
        cells = [str(17 + number), *("1" for _ in list(table.bounds)[1:])]
        cells += [f"v{rng.integers(3)}" for _ in table.categories]
        lines.append(",".join([*cells, (table.positive, table.negative)[rng.integers(2)]]))
    with gzip.open(tmp_path / "adult.csv.gz", "wt") as file:
        file.write("\n".join(lines) + "\n")
    return tmp_path


def test_peers_learn_and_are_tested_on_the_rows_that_our_models_are(folder):
    found = evidence_peers.encoded(folder / "adult.csv.gz", evidence_data.ADULT)
    train = len(found["y"])
    with evidence_data.DATA["adult"].opened(folder) as task:
        np.testing.assert_array_equal(task.columns()["label"], found["y"])
        assert 0 < len(found["test_y"]) < train
    ages = found["numbers"][:, 0].astype(int)
    assert [*ages[:train]] == sorted(ages[:train])
    assert len({*ages}) == len(ages) == len(found["x"]) + len(found["test_x"])
    low, high = found["bounds"][0]
    np.testing.assert_allclose(found["x"][:, 0], (ages[:train] - low) / (high - low), rtol=1e-6)
    flags = found["x"][:, len(found["bounds"]) :]
    np.testing.assert_array_equal(flags.sum(1), len(evidence_data.ADULT.categories))


@pytest.mark.parametrize("header", [True, False])
def test_a_table_as_its_source_publishes_it_has_the_same_rows(header, folder, tmp_path):
    table, file = evidence_data.ADULT, folder / "adult.csv.gz"
    expected = table.rows(file)
    published = tmp_path / "elsewhere"
    published.mkdir()
    with (published / "adult.data").open("w") as out:
        if header:
            out.write(";".join(f'"{name}"' for name in table.names) + "\n")
        for row in expected:
            out.write((";" if header else ", ").join(row[name] for name in table.names) + "\n")
        out.write("\n")
    assert table.rows(published / "adult.data") == expected
    data = evidence_data.DATA["adult"]
    with data.opened(folder) as task, data.opened(published) as same:
        jax.tree.map(np.testing.assert_array_equal, same.columns(), task.columns())


def test_the_small_tier_has_all_data_sets_of_files_and_all_peers():
    names = {case.name for case in chosen(evidence.CASES, None, True)}
    files = [name for name, found in evidence_data.DATA.items() if found.files]
    every = [f"peers, data {x}, peer {y}" for x in ("adult", "bank") for y in evidence_peers.PEERS]
    every += [f"evidence, data {name}" for name in files]
    assert names == {"published", *(name.replace("_", " ") for name in every)}


@pytest.mark.parametrize("measure", [evidence.evidence, evidence_peers.peers])
def test_a_file_that_is_not_there_leaves_its_case_out_and_says_so(measure, tmp_path):
    file = tmp_path / "record.json"
    told = Record(file, "evidence")
    given = {"files": str(tmp_path)}
    over = {"data": ["bank"]}
    if measure is evidence_peers.peers:
        given, over = given | {"environments": str(tmp_path)}, over | {"peer": ["ours"]}
    for case in cases(measure, over=over, needs=("--files",)):
        told.run(case, "command", given)
    (entry,) = read(file)["cases"]
    assert (entry["status"], entry["rows"]) == ("left out", [])
    assert "bank.csv.gz or bank-full.csv is not in the folder" in entry["why"]
    assert told.status() == 2


def test_a_peer_that_cannot_be_installed_is_a_row_that_says_so(folder, monkeypatch):
    nowhere = evidence_peers.Library("with_opacus", (f"file://{folder}/no-such-package.whl",))
    monkeypatch.setitem(evidence_peers.PEERS, "Opacus", nowhere)
    (row,) = evidence_peers.peers(
        "adult", "Opacus", files=str(folder), environments=str(folder / "environments")
    )
    assert row.value is None
    assert "Opacus" in row.name
    assert "not installed" in row.name


def test_a_program_is_measured_on_the_test_rows_and_priced_by_its_own_sampler(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setitem(evidence_peers.SETTINGS, "batch_size", 8)

    def rows():
        found = evidence_peers.peers(
            "adult", "ours", files=str(folder), environments=str(tmp_path), seeds=1,
            peer_epsilons=(3.0,), written=str(tmp_path),
        )  # fmt: skip
        return {row.name.split(",")[0]: row.value for row in found}

    found = rows()
    assert 0 <= found["AUC"] <= 1
    assert found["CPU time of a run"] > 0
    assert found["peak memory"] > 0
    assert found["lines of its program"] > 10
    assert found["epsilon of its balls-and-bins batches"] <= found["epsilon"] + 1e-3 <= 3.001
    (kept,) = (tmp_path / "peers").iterdir()
    assert "scores" not in json.loads(kept.read_text())
    again = rows()
    assert again == found  # to the second: read, not measured


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"sampler": "poisson", "sampling_prob": 0.1, "steps": 20}, PoissonProfile(1.0, 0.1, 20)),
        ({"sampler": "shuffle", "steps_per_epoch": 9, "epochs": 2}, ShuffleProfile(1.0, 9, 2)),
        ({"printed": 3.0}, None),
    ],
)
def test_what_a_program_drew_decides_its_price(told, expected):
    assert evidence_peers.profile({"noise_multiplier": 1.0, **told}) == expected


def test_a_shuffled_loader_costs_more_than_the_poisson_epsilon_that_it_prints():
    told = {"noise_multiplier": 0.8, "printed": 1.0, "steps_per_epoch": 50, "epochs": 5}
    as_poisson = PoissonProfile(0.8, 1 / 50, 250).epsilon(1e-5)
    shown = evidence_peers.earned(
        evidence_peers.at("x"), told | {"sampler": "shuffle", "printed": as_poisson.upper}, 1e-5
    )
    by_name = {row.name: row.value for row in shown}
    assert by_name["epsilon of its shuffle batches, at least, x"] > as_poisson.upper


def test_the_memory_of_a_program_is_its_own_and_not_that_of_what_began_it(tmp_path):
    (tmp_path / "nothing.py").write_text("def fit(work):\n    return [work.y], {}\n")
    np.savez(tmp_path / "rows.npz", y=0.0)
    run = [sys.executable, evidence_peers.PROGRAMS / "run.py", "nothing", "rows.npz", "{}"]
    parent = "import subprocess, sys; held = b'x' * 10**9; subprocess.run(sys.argv[1:], check=True)"
    done = subprocess.run(
        [sys.executable, "-c", parent, *run],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    assert 1e6 < json.loads(done.stdout)["peak_bytes"] < 5e8


def test_a_program_that_may_cost_more_than_it_prints_is_drawn_as_such():
    def rows(of, printed, most):
        place = f"adult, epsilon 3, same work: {of}, of a kind ({of} 1.0)"
        named = {"epsilon, printed": printed, "epsilon of its shuffle batches, at most": most}
        return [{"name": f"{name}, {place}", "value": x} for name, x in named.items()]

    made = [rows("a", 3.0, 3.001), rows("b", 3.0, 22.0), rows("c", 3.0, 3.0)]
    made[2][1] |= {"name": made[2][1]["name"] + " (was inf)", "value": None}
    found = unearned({"cases": [{"rows": of} for of in made]})
    assert found == {("adult", f"same work: {of}, of a kind") for of in "bc"}


@pytest.fixture
def archive(tmp_path):
    """Images of which each is alone in its pixels, so that rows can be told apart."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (600, 8, 8), np.uint8)
    np.savez(tmp_path / "images.npz", x=x, y=np.arange(600) % 3)
    return tmp_path / "images.npz", x


def test_fresh_test_rows_trained_before_and_lie_in_neither_end_of_the_file(archive, monkeypatch):
    monkeypatch.setattr(evidence_data, "TESTED", 50)
    monkeypatch.setattr(evidence_data, "VALIDATED", 20)
    path, x = archive
    fresh, usual = (
        kind(path, channels=(), num_classes=3) for kind in (evidence_data.FreshTest, Images)
    )

    def numbers(task, split):
        rows = task.source.splits[split]["image"][..., 0]
        at = [int(np.flatnonzero((x == one).all((1, 2)))[0]) for one in rows]
        np.testing.assert_array_equal(task.source.splits[split]["label"], np.array(at) % 3)
        return set(at)

    parts = [numbers(fresh, split) for split in ("train", "validation", "test")]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 600
    assert len(parts[2]) == 50
    assert parts[2] <= numbers(usual, "train") & set(range(100, 500))
    assert parts[1] <= numbers(usual, "validation")


def test_the_grid_has_24_settings_and_each_takes_about_its_steps():
    assert len(set(GRID)) == 24
    for choice, (_, units), rows in itertools.product(GRID, UNITS.items(), (26_000, 88_000)):
        spec = choice.spec(rows, units, target_epsilon=1.0, target_delta="1/n")
        steps = rows / spec.sampler.batch_size * choice.epochs
        assert 0.7 <= steps / choice.steps <= 1.45


def facts(rows=20_000, epsilon=3.0, rule=GRID[0]):
    return Facts(rows, epsilon, rule)


FLAT = dict.fromkeys([*GRID, None, evidence_rules.NOW], (0.0, 0.9))


def test_the_numbers_of_a_law_are_those_that_lose_least_on_validation_rows():
    first, second, third = GRID[:3]
    one = FLAT | {first: (0.8, 0.1), third: (0.7, 0.2)}
    other = FLAT | {second: (0.9, 0.1), third: (0.8, 0.2)}
    assert (best(one), best(other)) == (first, second)
    law = Law("", GRID, lambda _, *setting: Choice(*setting))
    assert loses_least(law, [(facts(), one)]) == first
    assert loses_least(law, [(facts(), one), (facts(), other)]) == third


def test_a_setting_between_those_of_the_grid_has_a_score_between_theirs():
    scores = FLAT | {Choice(0.4, 30, 600, 2.0): (0.2, 0.6), Choice(0.4, 30, 600, 4.0): (0.4, 0.8)}
    for distance, expected in ((2.0, 0.2), (2.0 * 2**0.5, 0.3), (4.0, 0.4), (9.0, 0.4)):
        near = Choice(0.38, 30, 780, distance)
        assert score(scores, near, 0) == pytest.approx(expected)
    measured = Choice(0.38, 30, 780, 3.0)
    assert score(scores | {measured: (0.7, 0.8)}, measured, 1) == 0.8


def test_a_power_law_finds_the_power():
    (law,) = (law for law in evidence_rules.LAWS if "rows" in law.words)
    few, many = facts(2**15), facts(2**17)
    base = FLAT | {Choice(0.4, 30, 600, 4.0): (0.9, 0.9)}
    other = FLAT | {Choice(0.4, 30, 600, 2.0): (0.9, 0.9)}
    assert loses_least(law, [(few, base), (many, other)]) == (4.0, -0.5)


def test_regret_is_of_test_rows_and_numbers_have_not_seen_the_data_set(monkeypatch, folder):
    first, second = GRID[:2]
    scores = {
        "adult": FLAT
        | {first: (0.9, 0.8), second: (0.0, 0.5), None: (0.0, 0.4), "now": (0.0, 0.7)},
        "bank": FLAT | {second: (0.9, 0.7), first: (0.0, 0.5), None: (0.0, 0.3), "now": (0.0, 0.6)},
    }
    law = Law("any", GRID, lambda _, *setting: Choice(*setting))
    monkeypatch.setattr(evidence_rules, "LAWS", (law,))
    monkeypatch.setattr(evidence_rules, "measured", lambda data, *_: scores[data])
    data = evidence_data.DATA
    monkeypatch.setitem(evidence_rules.DATA, "bank", data["adult"])
    rows = evidence_rules.regret(files=str(folder), grid_data=("adult", "bank"))
    found = {row.name: row.value for row in rows}
    assert found["mean lost by the rules of the tasks"] == pytest.approx(0.4)
    assert found["mean lost by the rules of the tasks since"] == pytest.approx(0.1)
    assert found["mean lost by the rules of the tasks since / before"] == pytest.approx(0.25)
    assert found["mean lost by any, left out"] == pytest.approx(0.25)
    assert found["mean lost by any / by the rules of the tasks"] == pytest.approx(0.625)


def test_an_unknown_data_set_is_refused(folder):
    with pytest.raises(ValueError, match="--grid-data: iris is none of adult"):
        list(evidence_rules.regret(files=str(folder), grid_data=("iris", "bank")))


def test_a_choice_is_better_by_seed_and_as_a_mean_over_data_sets(folder, monkeypatch):
    data = evidence_data.DATA
    for name, task in (
        ("bank", data["adult"]),
        ("movielens", replace(data["adult"], metric="rmse")),
    ):
        monkeypatch.setitem(evidence_defaults.DATA, name, task)

    def trained(self, name, spec):
        first = spec.options()["optimizer"] == "sgd"
        if name.startswith("bank"):
            raise ValueError("bank has no such runs")
        value = (0.7, 0.6) if first else (0.5, 0.5)
        return [
            {f"{s}_{m}": x for s in ("validation", "test") for m in ("auc", "rmse")} for x in value
        ]

    monkeypatch.setattr(evidence_defaults.Models, "trained", trained)
    rows = evidence_defaults.defaults(
        "SGD, not Adam", files=str(folder), choice_epsilons=(1.0,),
        choice_data=("adult", "movielens", "bank", "criteo"),
    )  # fmt: skip
    found = {row.name: row for row in rows}
    better = found["better by, AUC, test rows, adult, epsilon 1, SGD, not Adam"]
    assert (better.value, better.error) == (pytest.approx(0.15), pytest.approx(0.05))
    worse = found["better by, RMSE, test rows, movielens, epsilon 1, SGD, not Adam"]
    assert worse.value == pytest.approx(-0.15)
    mean = found["mean of 1, better by, AUC, test rows, SGD, not Adam"]
    assert (mean.value, mean.error) == (pytest.approx(0.15), pytest.approx(0.05))
    for name, why in (("bank", "bank has no such runs"), ("criteo", "is not in the folder")):
        (left,) = [row for row in found.values() if row.name.startswith(f"{name}, SGD, not Adam")]
        assert left.value is None
        assert why in left.name


def test_what_papers_report_is_drawn_at_its_epsilon_beside_what_was_measured():
    rows = [vars(row) for row in evidence_papers.published()]
    rows += [{"name": "accuracy, test rows, mnist, no privacy", "value": 0.99, "error": None}]
    rows += [{"name": "AUC, test rows, adult, Opacus: is not installed", "value": None}]
    found = points({"cases": [{"rows": rows}]})
    drawn = [(d, p.epsilon, p.value) for d, curves in found.items() for of in curves.values()
             for p in of if p.epsilon is not None]  # fmt: skip
    assert sorted(drawn) == sorted((p.data, p.epsilon, p.value) for p in PUBLISHED)
    assert [p.epsilon for p in found["mnist"]["ours"]] == [None]
    assert all(one.source and one.delta for one in PUBLISHED)
    printed = {one.epsilon for one in PUBLISHED if one.data == "mnist"}
    assert printed <= {*evidence_data.DATA["mnist"].epsilons}


@pytest.mark.parametrize(("network", "weights"), [("tanh", 26_010), ("relu", 26_010)])
def test_the_networks_of_sources_have_as_many_weights_as_theirs(
    network, weights, tmp_path, monkeypatch
):
    monkeypatch.setattr(evidence_data, "TESTED", 5)
    monkeypatch.setattr(evidence_data, "VALIDATED", 5)
    x = np.random.default_rng(0).integers(0, 256, (100, 28, 28), np.uint8)
    np.savez(tmp_path / "images.npz", x=x, y=np.arange(100) % 10)
    task = evidence_papers.TheirNetwork(tmp_path / "images.npz", network=network, num_classes=10)
    params = jax.eval_shape(lambda: task.init(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == weights
    found = jax.eval_shape(task.predict, params, task.source.splits["test"])
    assert found.shape == (5, 10)


def test_the_network_of_sources_is_two_pooled_convolutions_and_two_layers():
    image = np.random.default_rng(0).integers(0, 256, (28, 28, 1), np.uint8)
    network = evidence_papers.Pooled(jnp.tanh, nnx.Rngs(0))
    x = jnp.asarray(image, jnp.float32) / 255
    for layer, kernel, padding in zip(
        network.convolutions, [(8, 8, 1, 16), (4, 4, 16, 32)], ["SAME", "VALID"], strict=True
    ):
        windows = jax.lax.conv_general_dilated(
            x[None], layer.kernel[...].reshape(kernel), (2, 2), padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        x = nnx.max_pool(jnp.tanh(windows[0] + layer.bias[...]), (2, 2), strides=(1, 1))
    expected = network.logits(jnp.tanh(network.hidden(x.ravel())))
    np.testing.assert_allclose(network(image), expected, rtol=1e-4, atol=1e-5)


def test_a_setting_is_run_as_its_source_says_and_such_batches_are_priced(archive, monkeypatch):
    made = evidence_papers.Setting("relu", "shuffle", 6_000, 2, 1.5, 0.5, 0.25, 0.9)
    settings = made, made._replace(sampler="poisson")
    figures = {
        str(number): PUBLISHED[0]._replace(epsilon=2.0 + number, setting=setting)
        for number, setting in enumerate(settings)
    }
    asked = []

    def trained(models, name, spec):
        asked.append((models.task.network, spec))
        return [{"test_accuracy": 0.9, "cpu_seconds": 1.0}]

    mnist = dataclasses.replace(evidence_data.DATA["mnist"], files=(archive[0].name,))
    monkeypatch.setitem(evidence_papers.DATA, "mnist", mnist)
    monkeypatch.setattr(evidence_papers, "FIGURES", figures)
    monkeypatch.setattr(evidence_papers, "PUBLISHED", figures.values())
    monkeypatch.setattr(evidence_papers.Models, "trained", trained)
    folder = str(archive[0].parent)
    found = [row for figure in figures for row in evidence_papers.settings(figure, files=folder)]
    assert [row.value for row in found if "test rows" in row.name] == [0.9] * 2

    assert [network for network, _ in asked] == ["relu", "relu"]
    first, _ = (spec.options() for _, spec in asked)
    names = "noise_multiplier", "l2_clip_norm", "learning_rate", "momentum"
    named = {name: getattr(made, name) for name in names}
    assert first.items() >= {**named, "optimizer": "sgd", "schedule": "constant"}.items()
    assert [spec.sampler.name for _, spec in asked] == ["shuffle", "poisson"]
    assert [(s.sampler.batch_size, s.sampler.epochs) for _, s in asked] == [(6_000, 2)] * 2
    priced = evidence_papers.priced()
    values = {row.name.partition(", their setting")[0]: row.value for row in priced}
    for kind, epsilon, profile in (
        ("shuffle", "2", ShuffleProfile(1.5, 10, 2)),
        ("poisson", "3", PoissonProfile(1.5, 0.1, 20)),
    ):
        bound, place = profile.epsilon(1e-5), f"mnist, epsilon {epsilon}"
        assert values[f"epsilon of its {kind} batches, at least, {place}"] == bound.lower
        assert values[f"epsilon of its {kind} batches, at most, {place}"] == bound.upper
        assert values[f"epsilon, printed, {place}"] == float(epsilon)
