"""Reports for people: Markdown of one run, and the table that compares several."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from accounting import Bound, format_delta

SPLITS = ("validation", "test")
"""Rows on which a run is evaluated."""

UNDEFINED = "undefined"
"""What stands in place of a metric that is none."""


def metric(value: float | None, form: str) -> str:
    """Returns a metric in the format `form`, or that it is undefined."""
    return UNDEFINED if value is None else f"{value:{form}}"


def divergence(record: dict[str, Any]) -> str | None:
    """Returns, in one line, that a run diverged and what that means; None if it did not."""
    undefined = [split for split in SPLITS if record[f"{split}_auc"] is None]
    if not undefined:
        return None
    return (
        f"the training diverged: not all scores of the {' and '.join(undefined)} rows are finite, "
        "so their metrics are undefined; what was released counts all the same. Begin another "
        "run, with a smaller --learning-rate"
    )


def interval(record: dict[str, Any]) -> str:
    """Returns the epsilon interval of a run's `record`, or "none" where nothing is guaranteed."""
    if record["epsilon_upper"] is None:
        return "none"
    return f"{Bound(record['epsilon_lower'], record['epsilon_upper']):.4g}"


def markdown(record: dict[str, Any], config: dict[str, Any]) -> str:
    """Returns the readable report of one run.

    Args:
      record: What `report.json` holds.
      config: The run's configuration, as JSON values.
    """
    terms = {
        "sampler": record["sampler"],
        "noise multiplier": _number(record["noise_multiplier"]),
        "clipping norm": _number(record["l2_clip_norm"]),
        "sums and noise": "exact, cryptographic" if record["secure_noise"] else "32-bit floats",
        "epsilon [lower, upper]": interval(record),
        "delta": format_delta(record["delta"]),
        "adjacency": record["adjacency"],
        "unit": record["unit"],
        "steps": f"{record['num_steps']:,}",
        "training examples": f"{record['num_examples']:,}",
    }
    quality = [
        [
            split,
            metric(record[f"{split}_auc"], ".4f"),
            metric(record[f"{split}_log_loss"], ".4f"),
            metric(record[f"{split}_calibration"], ".3f"),
            metric(record[f"{split}_expected_calibration_error"], ".4f"),
            f"{record[f'{split}_num_examples']:,}",
        ]
        for split in SPLITS
    ]
    quality_header = ["rows", "AUC", "log loss", "calibration", "calibration error", "examples"]
    return f"""# Run with the {record["sampler"]} sampler

## Guarantee

**{record["guarantee"]}**

{_meaning(record)}

Audit before training: {record["audit"]}.

{table(["", ""], [[name, value] for name, value in terms.items()])}

{bullets(record["notes"])}

Not covered by the guarantee:

{bullets(record["not_covered"])}

## Quality

{_outcome(record)}{table(quality_header, quality)}

Calibration is the sum of the predictions over the sum of the labels; calibration error is the
expected gap between the two over 15 bins of equal width.

## Speed

{record["training_seconds"]:.1f} s of training, {record["examples_per_second"]:,.0f} examples/s,
{record["num_params"]:,} parameters.

## Configuration

```json
{json.dumps(config, indent=2)}
```
"""


def _meaning(record: dict[str, Any]) -> str:
    """Returns what the guarantee says, or that there is none, in words."""
    if record["epsilon_upper"] is None:
        return (
            f"Nothing bounds what the trained parameters tell about one {record['unit']} of the\n"
            "training data."
        )
    return (
        "The interval contains the mechanism's true epsilon, and its upper end is the guarantee:\n"
        f"to replace one {record['unit']} of the training data by one whose gradient is zero\n"
        "changes the law of the trained parameters by no more than this epsilon and delta."
    )


def _outcome(record: dict[str, Any]) -> str:
    """Returns a paragraph on a training that diverged, or nothing."""
    diverged = divergence(record)
    return f"**{diverged[0].upper()}{diverged[1:]}.**\n\n" if diverged else ""


def comparison(records: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Returns (header, rows) of the table that compares finished runs."""
    header = ["sampler", "sigma", "epsilon [lo, up]", "delta"]
    header += ["AUC", "log loss", "calib.", "seconds"]
    rows = [
        [
            record["sampler"],
            f"{record['noise_multiplier']:.4g}",
            interval(record),
            format_delta(record["delta"]),
            metric(record["test_auc"], ".4f"),
            metric(record["test_log_loss"], ".4f"),
            metric(record["test_calibration"], ".3f"),
            f"{record['training_seconds']:.1f}",
        ]
        for record in records
    ]
    return header, rows


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def bullets(items: list[str]) -> str:
    """Returns a Markdown list."""
    return "\n".join(f"- {item}" for item in items)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table of plain text; columns of numbers are flush right."""
    columns = zip(*rows, strict=True) if rows else ([] for _ in header)
    rule = ["---:" if _is_numeric(column) else "---" for column in columns]
    lines = [*([plain(cell) for cell in line] for line in [header, *rows])]
    lines.insert(1, rule)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain(text: str) -> str:
    """Returns text as Markdown that shows it as it is, on one line.

    >>> print(plain("a|b ![x](y) [1, 2]"))
    a\\|b ![x]\\(y) [1, 2]
    """
    escaped = re.sub(r"([\\`*_<|])", r"\\\1", " ".join(text.split()))
    return escaped.replace("](", "]\\(")


def _is_numeric(cells: Iterable[str]) -> bool:
    given = [cell for cell in cells if cell not in ("", "none", UNDEFINED)]
    return bool(given) and all(re.match(r"[-+\[<]?\d", cell) for cell in given)
