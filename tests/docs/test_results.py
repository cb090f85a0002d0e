"""Tables and figures of the pages are what was recorded."""

import json
import re
from pathlib import Path

from accounting import Bound
from experiments.benchmarks.case import Row
from experiments.benchmarks.record import read

ROOT = Path(__file__).resolve().parents[2]
FILES = [file for folder in ("docs", "experiments") for file in (ROOT / folder).rglob("*.md")]
WRITTEN = [file for file in FILES if "_build" not in file.parts]
PAGES = [file.read_text() for file in (ROOT / "README.md", *WRITTEN)]
PROSE = " ".join(
    " ".join(line for page in PAGES for line in page.splitlines() if line[:1] != "|").split()
)


def recorded(area, missed=(), **setting):
    """The rows of an area's record by name, the first case first; all bars but some hold."""
    entries = read(ROOT / f"experiments/records/{area}.json")["cases"]
    asked = [entry for entry in entries if setting.items() <= entry["setting"].items()]
    rows = [Row(**row) for entry in asked for row in entry["rows"]]
    assert all(row.holds is not False or row.name in missed for row in rows)
    return {row.name: row for row in reversed(rows)}


def shown(row):
    """A mean, or the figure of one run, as tables have it."""
    return f"{row.value:.4f}" + ("" if row.error is None else f" ± {row.error:.4f}")


def results_of(sweep, **where):
    """The recorded grid points of a sweep that have these values."""
    record = json.loads((ROOT / "experiments/records/sweeps.json").read_text())
    [found] = [s["results"] for s in record["sweeps"] if s["command"].split()[2] == sweep]
    return [point for point in found if all(point.get(k) == v for k, v in where.items())]


def auc_of(point):
    mean, sd = point["test_auc"]
    return f"{mean:.4f} ± {sd:.4f}"


def table_rows(first_cell):
    """(label, {column: cell}) of each row of the table that begins with `first_cell`."""
    [page] = [text for text in PAGES if f"\n| {first_cell}" in text]
    lines = page[page.index(f"\n| {first_cell}") + 1 :].split("\n\n")[0].splitlines()
    header, _, *rows = ([cell.strip("* ") for cell in line.split("|")[1:-1]] for line in lines)
    return [(label, dict(zip(header[1:], cells, strict=True))) for label, *cells in rows]


def test_the_table_of_figure_1_is_what_was_recorded():
    rows = table_rows("figure 1, small: test AUC |")
    assert len(rows) == 2 * (4 + 6)
    for label, cells in rows:
        data, batch, noise = label.split(", ")
        where = {
            "batch_size": int(batch.split()[-1].replace(",", "")),
            "noise_multiplier": 0.0 if noise == "no noise" else float(noise.split()[1]),
        }
        points = results_of(f"criteo-{data.lower()}-small", **where)
        found = {point["sampler"].split()[0]: auc_of(point) for point in points}
        assert {column.lower(): cell for column, cell in cells.items()} == found


def equal_privacy(target):
    """The points of the sweep at equal privacy, by what the page calls their samplers."""
    points = results_of("equal-privacy", target_epsilon=target)
    return {p["sampler"] + ", optimistic" * p.get("optimistic", False): p for p in points}


def test_the_table_of_equal_privacy_is_what_was_recorded():
    rows = table_rows("equal privacy: test AUC |")
    assert len(rows) == 9
    for label, cells in rows:
        found = equal_privacy(float(re.search(r"epsilon (\d)", label)[1]))
        for column, cell in cells.items():
            point = found[column.lower()]
            recorded = {
                "noise": f"{point['noise_multiplier']:.3f}",
                "certified": str(Bound(point["epsilon_lower"], point["epsilon_upper"])),
            }
            assert cell == recorded.get(label.split()[0], auc_of(point)), (label, column)


def test_what_is_said_of_shuffling_is_what_is_certified():
    found = equal_privacy(1.0)
    noises = re.search(r"noise that epsilon 1 takes lies between ([\d.]+) and ([\d.]+)", PROSE)
    for noise, name in zip(noises.groups(), ("shuffle, optimistic", "shuffle"), strict=True):
        assert noise == f"{found[name]['noise_multiplier']:.2f}"
    best = found["balls-and-bins"]["test_auc"][0]
    lost = [
        f"{best - found[name]['test_auc'][0]:.3f}" for name in ("shuffle, optimistic", "shuffle")
    ]
    assert f"lose between {lost[0]} and {lost[1]} of AUC to balls-and-bins" in PROSE


def test_the_table_of_epochs_is_what_was_recorded():
    rows = table_rows("batch 1,024, learning rate 0.01")
    assert len(rows) == 2
    for label, cells in rows:
        asked = {"target_epsilon": float(label.split()[1]), "batch_size": 1024}
        for column, cell in cells.items():
            epochs = int(column.split()[0])
            points = results_of("fixed-guarantee", **asked, learning_rate=1e-2, epochs=epochs)
            assert cell in [auc_of(point) for point in points], (label, column)


def test_the_table_of_click_models_is_what_was_recorded():
    found = recorded("useful")
    rows = table_rows("| test AUC | log loss | predicted / observed | command |")
    assert [label for label, _ in rows] == ["no privacy", "epsilon 8", "epsilon 3", "epsilon 1"]
    for label, cells in rows:
        for figure, column in (("AUC", "test AUC"), ("log loss", "log loss")):
            assert cells[column] == shown(found[f"{figure}, {label}, test rows"])
        level = found[f"predicted / observed, {label}, test rows"].value
        assert cells["predicted / observed"] == f"{level:.3f}"


def test_the_table_of_models_by_data_set_is_what_was_recorded():
    every = table_rows("| without privacy | epsilon 3 | epsilon 1 |")
    rows = [row for row in every if "`linear`" in row[0] and "generated" not in row[0]]
    assert len(rows) == 3
    for label, cells in rows:
        data = label.split(",")[0].lower()
        area = "useful" if data == "criteo" else "tables_of_any_kind"
        found = recorded(area, store=data, model="linear")
        for column, cell in cells.items():
            at = {"without privacy": "no privacy"}.get(column, column)
            both = (found[f"{figure}, {at}, test rows"].value for figure in ("AUC", "log loss"))
            assert cell == " / ".join(f"{x:.3f}" for x in both)


def test_the_table_of_models_with_lazy_tables_is_what_was_recorded():
    measured = recorded("tables")
    rows = table_rows("10 epochs, batch 1,024 |")
    assert [label for label, _ in rows] == ["lazy tables", "Adam alone"]
    for epsilon in ("epsilon 8", "epsilon 3", "epsilon 1"):
        at = f"{epsilon}, batch 1024, 10 epochs"
        for by, cells in rows:
            assert cells[epsilon] == shown(measured[f"AUC, test rows, {by}, {at}"])
        apart = f"AUC, lazy tables minus Adam alone, test rows, {at}, less 2 standard errors"
        assert measured[apart].holds is True


def test_the_tables_of_logistic_models_and_few_shot_episodes_are_what_was_recorded():
    found, useful = recorded("logistic"), recorded("useful", model="linear")
    rows = table_rows("| Adult: AUC | Adult: log loss |")
    assert len(rows) == 12
    for label, cells in rows:
        method, _, at = label.partition(", ")
        start = {"Newton steps": "noised Newton steps"}.get(method, method)
        for column, cell in cells.items():
            data, figure = column.split(": ")
            of = "26,033 rows, 134 features" if data == "Adult" else "88,000 rows, 118 features"
            end = ", ".join(filter(None, (at, of)))
            names = [n for n in found if n.startswith(f"{figure}, {start}") and n.endswith(end)]
            if method == "click model":
                assert cell in ("", shown(useful[f"{figure}, {at}, test rows"]))
            elif method == "no privacy":
                assert cell == f"{found[names[0]].value:.4f}"
            else:
                assert cell == shown(found[names[0]])
    record = json.loads((ROOT / "experiments/records/episodes.json").read_text())
    [[header, recorded_rows]] = [one.values() for one in record["shown"] if isinstance(one, dict)]
    for (label, cells), row in zip(table_rows("sigma | Thm 3"), recorded_rows, strict=True):
        assert [label, *cells.values()] == row
        assert list(cells) == header[1:]
