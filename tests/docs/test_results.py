"""Tables and figures of the pages are what was recorded."""

import json
import re
from pathlib import Path

from accounting import Bound

ROOT = Path(__file__).resolve().parents[2]
FILES = [file for folder in ("docs", "experiments") for file in (ROOT / folder).rglob("*.md")]
WRITTEN = [file for file in FILES if "_build" not in file.parts]
PAGES = [file.read_text() for file in (ROOT / "README.md", *WRITTEN)]
PROSE = " ".join(
    " ".join(line for page in PAGES for line in page.splitlines() if line[:1] != "|").split()
)


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


def test_the_table_of_few_shot_episodes_is_what_was_recorded():
    record = json.loads((ROOT / "experiments/records/episodes.json").read_text())
    [[header, recorded_rows]] = [one.values() for one in record["shown"] if isinstance(one, dict)]
    for (label, cells), row in zip(table_rows("sigma | Thm 3"), recorded_rows, strict=True):
        assert [label, *cells.values()] == row
        assert list(cells) == header[1:]
