"""Formats runs for people: a Markdown report, and a comparison table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from accounting import Bound
from accounting.profile import format_delta
from dpsgd.core.guarantee import IF_INDEPENDENT
from dpsgd.core.noise import INDEPENDENT
from dpsgd.noise.registry import noise_label
from dpsgd.runs.log import WORDS
from dpsgd.runs.recommendation import sentence, weak_signal

UNDEFINED = "undefined"
"""Text for a metric that is undefined."""


def metric(value: float | None) -> str:
    """Returns a metric as text of four digits.

    >>> metric(0.74321), metric(11_000), metric(None)
    ('0.7432', '11,000', 'undefined')

    Counts are written in full, and None is "undefined".
    """
    if value is None:
        return UNDEFINED
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}" if 0.01 <= abs(value) < 100 or value == 0 else f"{value:.4g}"


_NAMES = {
    "auc": "AUC",
    "mae": "MAE",
    "mse": "MSE",
    "rmse": "RMSE",
    "predicted_over_observed": "pred/obs",
    "expected_calibration_error": "calibration error",
}
"""Spelling of metrics in reports, by their names in records."""


def label(name: str) -> str:
    """Returns the name of a metric as people write it.

    >>> label("test_log_loss"), label("validation_auc"), label("predicted_over_observed")
    ('test log loss', 'validation AUC', 'pred/obs')
    """
    for long, short in _NAMES.items():
        if name == long or name.endswith(f"_{long}"):
            name = name.removesuffix(long) + short
    return name.replace("_", " ")


def by_split(metrics: Mapping[str, float | None]) -> tuple[list[str], list[list[str]]]:
    """Returns (header, rows) of a table of metrics by split.

    Metrics are named "<split>_<name>".

    >>> by_split({"test_auc": 0.75, "test_loss": 0.5, "validation_auc": 0.7})
    (['rows', 'AUC', 'loss'], [['test', '0.7500', '0.5000'], ['validation', '0.7000', '']])
    """
    cells: dict[str, dict[str, str]] = {}
    for full, value in metrics.items():
        split, _, name = full.partition("_") if "_" in full else ("", "", full)
        cells.setdefault(split, {})[name] = metric(value)
    names = list(dict.fromkeys(name for row in cells.values() for name in row))
    rows = [[split, *(row.get(name, "") for name in names)] for split, row in cells.items()]
    return ["rows", *map(label, names)], rows


def divergence(record: dict[str, Any]) -> str | None:
    """Returns a warning if a metric is undefined, or None.

    >>> divergence({"metrics": {"test_auc": 0.75}}) is None
    True

    Args:
      record: Content of `report.json`.
    """
    if not (undefined := [name for name, value in record["metrics"].items() if value is None]):
        return None
    return (
        f"the training diverged: {', '.join(undefined)} {'are' if undefined[1:] else 'is'} "
        "undefined; the privacy cost remains. Start a new run with a smaller learning rate"
    )


def interval(record: dict[str, Any], name: str = "epsilon") -> str:
    """Returns an interval of a run's guarantee, or "none".

    >>> interval({"epsilon_upper": None})
    'none'

    Args:
      record: Content of `report.json`.
      name: Prefix of the two entries, such as "attack_advantage".
    """
    if record[f"{name}_upper"] is None:
        return "none"
    return str(Bound(record[f"{name}_lower"], record[f"{name}_upper"]))


def guaranteed(record: dict[str, Any]) -> str:
    """Returns a run's upper epsilon, or "none".

    >>> guaranteed({"epsilon_upper": 2.9994})
    '3.00'
    """
    upper = record["epsilon_upper"]
    return "none" if upper is None else Bound(upper, upper).format_upper()


_SHOWN = {
    ("optimizer", "adam"): "optimizer",
    ("clipping", "flat"): "clipping rule",
    ("train", None): "pattern of trained parameters",
    ("compute", "float32"): "floating-point type of the loss",
    ("average_tail", None): "final share of steps averaged",
    ("average_decay", None): "decay of the moving average",
}
"""Words for settings, by option and the usual value that reports leave out."""


def _text(value: Any) -> str:
    """Returns the text of a setting; a part from another package has a name and settings."""
    if not isinstance(value, Mapping):
        return f"{value}"
    return ", ".join(f"{k}={x}" if k != "name" else x for k, x in value.items() if x is not None)


def markdown(record: dict[str, Any], config: dict[str, Any], origin: str = "") -> str:
    """Returns the Markdown report of a run.

    Args:
      record: Content of `report.json`.
      config: Content of `config.json`.
      origin: Date and command of the training, in words; may be empty.
    """
    terms = {
        "sampler": record["sampler"],
        "noise multiplier": _number(record["noise_multiplier"]),
        "clipping norm": _number(record["l2_clip_norm"]),
        **{
            words: _text(value)
            for (name, usual), words in _SHOWN.items()
            if (value := config.get(name, usual)) not in (usual, None)
        },
        "noise": noise_label(record["noise"]),
        **({"tables": "lazy: deferred noise"} if record["lazy_tables"] else {}),
        "epsilon [lower, upper]": interval(record),
        "delta": format_delta(record["delta"]),
        "attack advantage [lower, upper]": interval(record, "attack_advantage"),
        "adjacency": record["adjacency"],
        "unit": record["unit"],
        "steps": _steps(record),
        "training examples": f"{record['num_examples']:,}",
    }
    return f"""# Run with the {record["sampler"]} sampler
{f"{chr(10)}{origin}{chr(10)}" if origin else ""}
## Guarantee

**{record["guarantee"]}**

{_meaning(record)}

Audit before training: {record["audit"]}.

{table(["", ""], [[name, value] for name, value in terms.items()])}

{bullets(record["notes"])}

Not covered by the guarantee:

{bullets(record["not_covered"])}

## Quality

{_outcome(record)}{calibration(record)}{table(*by_split(record["metrics"]))}

## Speed

{_speed(record)}
{record["num_params"]:,} parameters.

## Configuration

{_choice(config)}All settings are in `config.json`, beside this file.
"""


def _meaning(record: dict[str, Any]) -> str:
    """Returns the meaning of the guarantee in words."""
    if record["epsilon_upper"] is None:
        return (
            f"The run has no guarantee: the trained parameters may reveal any\n"
            f"{record['unit']} of the training data."
        )
    accuracy = record["attack_accuracy_upper"]
    the = "The"
    if record["initial_names"]:
        units = "rows" if record["unit"] == "example" else f"{record['unit']}s"
        the = f"For {units} that did not train the initial model, the"
    condition = ""
    if _conditional(record):
        condition = (
            f"\nBoth hold {IF_INDEPENDENT};\n"
            "the guarantee also states the epsilon that holds otherwise."
        )
    return (
        f"{the} interval contains the mechanism's true epsilon, and its upper end is the "
        "guarantee:\n"
        f"to replace one {record['unit']} of the training data by one whose gradient is zero\n"
        "changes the law of the trained parameters by no more than this epsilon and delta.\n"
        "Whoever sees them, knows all else and guesses at even odds whether it was there is right\n"
        f"with probability {Bound(accuracy, accuracy).format_upper()} at most."
        f"{condition}"
    )


def _conditional(record: Mapping[str, Any]) -> bool:
    """Returns True if a run's epsilon holds only if interruptions did not depend on releases."""
    return IF_INDEPENDENT in record["guarantee"]


def calibration(record: dict[str, Any]) -> str:
    """Returns a paragraph on a model's calibration, or ""."""
    if not record["calibration"]:
        return ""
    figures = ", ".join(
        f"{k.replace('_', ' ')} {metric(v)}" for k, v in record["calibration"].items()
    )
    return (
        f"The model was calibrated after its last step: {figures}.\n"
        "The result is part of the parameters, and the guarantee covers it.\n\n"
    )


def _steps(record: dict[str, Any]) -> str:
    steps, sums = f"{record['num_steps']:,}", record["full_sums"]
    return f"{steps}, then {sums['count']} sums over all rows" if sums else steps


def seconds(record: dict[str, Any]) -> str:
    """Returns a run's total seconds as text.

    The text is empty if they are secret.

    >>> seconds({"stage_seconds": {"train": 12.5, "audit": 2.25}}), seconds({"stage_seconds": None})
    ('14.8', '')
    """
    stage_seconds = record["stage_seconds"]
    return "" if stage_seconds is None else f"{sum(stage_seconds.values()):.1f}"


def _speed(record: dict[str, Any]) -> str:
    if record["stage_seconds"] is None:
        return "The duration is secret, because it reveals the number of trials.\n"
    rows = [[WORDS[name], f"{spent:.1f}"] for name, spent in record["stage_seconds"].items()]
    stages = table(["stage", "seconds"], [*rows, ["in all", seconds(record)]])
    trained, rate = record["training_seconds"], record["examples_per_second"]
    resumed = ""
    if trained > 1.1 * record["stage_seconds"].get("train", 0.0) + 1:
        resumed = "The run was stopped and resumed; the table shows its last command only.\n"
    return f"{stages}\n\n{resumed}{trained:.1f} s of steps, {rate:,.0f} examples/s,"


def _outcome(record: dict[str, Any]) -> str:
    """Returns warnings on a training that diverged or is mostly noise."""
    warnings = divergence(record), weak_signal(record["signal_to_noise"], record["num_examples"])
    return "".join(f"**{line[0].upper()}{line[1:]}.**\n\n" for line in warnings if line)


def _choice(config: Mapping[str, Any]) -> str:
    """Returns a paragraph on the settings that the run chose."""
    if "chosen" not in config:
        return ""
    line = sentence(config["chosen"])
    return f"{line[0].upper()}{line[1:]}. All other settings were given, or are defaults.\n\n"


def comparison(
    records: Sequence[dict[str, Any]], metrics: Sequence[str] | None = None
) -> tuple[list[str], list[list[str]], str]:
    """Returns (header, rows, caption) of a comparison of runs.

    Only the caption states a common delta and a common split of the metrics.

    Args:
      records: Contents of the runs' `report.json`.
      metrics: Names of the metrics to show; by default test metrics, or all without test metrics.
    """
    if metrics is None:
        entries = [item for record in records for item in record["metrics"].items()]
        metric_names = [*dict.fromkeys(name for name, x in entries if not isinstance(x, int))]
        metrics = [name for name in metric_names if name.startswith("test_")] or metric_names
    splits = {name.partition("_")[0] for name in metrics}
    alike = len(splits) == 1 and all("_" in name for name in metrics)
    names = [label(name.partition("_")[2] if alike else name) for name in metrics]
    noises = [noise_label(record["noise"]) for record in records]
    deltas = [format_delta(record["delta"]) for record in records]
    columns = {
        "sampler": [record["sampler"] for record in records],
        "noise": noises,
        "sigma": [f"{record['noise_multiplier']:.4g}" for record in records],
        "epsilon": [interval(record) for record in records],
        "delta": deltas,
        **{
            name: [metric(r["metrics"][full]) if full in r["metrics"] else "" for r in records]
            for name, full in zip(names, metrics, strict=True)
        },
        "seconds": [seconds(record) or "secret" for record in records],
    }
    if set(noises) == {INDEPENDENT}:
        del columns["noise"]
    caption = "epsilon: certified [lower, upper]"
    if len(set(deltas)) == 1:
        del columns["delta"]
        caption += f" at delta {deltas[0]}"
    if any(map(_conditional, records)):
        caption += f"; of a run of several attempts, {IF_INDEPENDENT}"
    if alike:
        caption += f"; {', '.join(names)}: on the {splits.pop()} rows"
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)], caption


def headline(description: Mapping[str, Any], metrics: Mapping[str, float | None]) -> str | None:
    """Returns the name of the metric that tables put first.

    >>> headline({"headline": "test_auc"}, {"test_loss": 0.5, "test_auc": 0.7})
    'test_auc'

    Args:
      description: `describe()` of the task, which may name a "headline".
      metrics: Metrics by name; the first is the default, None if the mapping is empty.
    """
    named = description.get("headline")
    return named if named in metrics else next(iter(metrics), None)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def bullets(items: list[str]) -> str:
    """Returns a Markdown list.

    >>> print(bullets(["first", "second"]))
    - first
    - second
    """
    return "\n".join(f"- {item}" for item in items)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table of plain text.

    Columns of numbers are right-aligned.

    >>> print(table(["name", "rows"], [["train", "8,800"]]))
    | name | rows |
    | --- | ---: |
    | train | 8,800 |

    Args:
      header: Titles of the columns.
      rows: Cells of each row, one per title.
    """
    columns = zip(*rows, strict=True) if rows else ([] for _ in header)
    lines = [[escape(cell) for cell in line] for line in [header, *rows]]
    lines.insert(1, ["---:" if _is_numeric(column) else "---" for column in columns])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escape(text: str) -> str:
    """Returns a text on one line, escaped for Markdown.

    >>> print(escape("a|b ![x](y) [1, 2]"))
    a\\|b ![x]\\(y) [1, 2]
    """
    escaped = re.sub(r"([\\`*_<|])", r"\\\1", " ".join(text.split()))
    return escaped.replace("](", "]\\(")


def _is_numeric(cells: Iterable[str]) -> bool:
    filled = [cell for cell in cells if cell not in ("", "none", UNDEFINED)]
    return bool(filled) and all(re.match(r"[-+\[<]?\d", cell) for cell in filled)
