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


EVIDENCE = (ROOT / "docs/explanation/results/evidence.md").read_text()


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


def test_the_table_of_evidence_is_what_was_recorded():
    from experiments.figures.evidence import points

    file = ROOT / "experiments/records/evidence.json"
    found = points(read(file))
    rows = table_rows("test rows | no privacy |")
    assert sorted(label for label, _ in rows) == sorted(f for f in found if "ours" in found[f])
    peers = table_rows("rows, program | printed |")
    every = [what for curves in found.values() for what in curves]
    assert len(peers) == 2 * sum(what.startswith("same work: ") for what in every)
    cases = read(file)["cases"]
    every_row = {row["name"]: Row(**row) for case in cases for row in case["rows"]}
    for label, cells in peers:
        data, program = label.split(", ", 1)
        place = f", {data}, epsilon {float(cells['printed']):.0f}, same work: {program}"
        of = {k.removesuffix(place): row for k, row in every_row.items() if k.endswith(place)}
        bounds = [f"{row.value:.2f}" for name, row in of.items() if " batches, at " in name]
        kind = [name.split()[3] for name in of if " batches, at " in name][:1]
        lines = every_row[f"lines of its program, {data}, {re.split(',| [(]', program)[0]}"]
        assert cells == {
            "printed": f"{of['epsilon, printed'].value:.2f}",
            "its batches earn": ": ".join([*kind, " to ".join(bounds)]) or "not priced here",
            "AUC": shown(of["AUC, test rows"]),
            "CPU s": f"{of['CPU time of a run'].value:.1f}",
            "GB": f"{of['peak memory'].value:.2f}",
            "lines": f"{lines.value:.0f}",
        }, label
    for data, cells in rows:
        ours = {point.epsilon: shown(point) for point in found[data]["ours"]}
        for column, cell in cells.items():
            epsilon = None if column == "no privacy" else float(column.split()[1])
            assert cell == ours.get(epsilon, ""), (data, column)


def test_the_table_of_published_figures_is_what_was_recorded():
    from experiments.figures.evidence import points

    record = read(ROOT / "experiments/records/evidence.json")
    found = points(record)
    bounds = [
        (re.sub(r" \(.*", "", row["name"]), row["value"])
        for case in record["cases"]
        for row in case["rows"]
        if " batches, at " in row["name"] and ", their setting: " in row["name"]
    ]
    rows = table_rows("published figure | epsilon |")
    reported = [(data, what, point) for data, of in found.items() for what in of
                if what.startswith("published: ") for point in of[what]]  # fmt: skip
    assert len(rows) == len(reported)
    for label, cells in rows:
        data, what = label.split(", ", 1)
        epsilon = float(cells["epsilon"])
        of = {
            curve: {shown(p) for p in each if p.epsilon == epsilon}
            for curve, each in found[data].items()
        }
        place = f", {data}, epsilon {epsilon:g}, their setting: {what}"
        earned = [(name, value) for name, value in bounds if name.endswith(place)]
        kind = [name.split()[3] for name, _ in earned][:1]
        assert {cells["reported"]} == of[f"published: {what}"]
        assert {cells["their setting, here"]} == (of.get(f"their setting: {what}") or {""})
        assert cells["such batches earn"] == ": ".join(
            [*kind, " to ".join(f"{value:.2f}" for _, value in earned)]
        ).strip(": ")
        assert {cells["ours"]} == (of["ours"] or {""})


def test_the_table_of_defaults_is_what_was_recorded():
    from experiments.benchmarks.evidence_data import DATA, METRICS

    cases = read(ROOT / "experiments/records/evidence.json")["cases"]
    every = {row["name"]: Row(**row) for case in cases for row in case["rows"]}
    rows = list(re.finditer(r"^\| (.+, not .+?) \| (\d) \|(.*)\|$", EVIDENCE, re.M))
    assert len({row[1] for row in rows}) > 4
    for row in rows:
        choice, _, metric = row[1].partition(", log")
        cells = dict(zip(("criteo", "adult", "bank", "mnist", "sst2", "movielens"),
                         map(str.strip, row[3].split("|")), strict=True))  # fmt: skip
        for data, cell in cells.items():
            kind = DATA[data].metric if data in DATA else "accuracy"  # sst2 is of version 0.2
            figure = METRICS["log_loss" if metric else kind]
            name = f"better by, {figure}, test rows, {data}, epsilon {row[2]}, {choice}"
            assert cell == (shown(every[name]) if name in every else ""), name


def test_the_bars_of_evidence_hold_or_a_page_says_by_how_much_they_do_not():
    cases = read(ROOT / "experiments/records/evidence.json")["cases"]
    for one in (row for case in cases for row in case["rows"] if row["bar"]):
        assert one["holds"] or f"{one['value']:.4f}" in PROSE, one["name"]  # a page says so
