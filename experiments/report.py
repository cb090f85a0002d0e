"""Reports for people: Markdown of one run, and the table that compares several."""

from __future__ import annotations

import json
from typing import Any

from accounting import Bound


def interval(record: dict[str, Any]) -> str:
    """Returns the epsilon interval of a run's `record`, or a dash where nothing is guaranteed."""
    if record["epsilon_upper"] is None:
        return "none"
    return str(Bound(record["epsilon_lower"], record["epsilon_upper"]))


def markdown(record: dict[str, Any], config: dict[str, Any]) -> str:
    """Returns the readable report of one run.

    Args:
      record: What `report.json` holds.
      config: The run's configuration, as JSON values.
    """
    quality = "\n".join(
        f"| {split} | {record[f'{split}_auc']:.4f} | {record[f'{split}_log_loss']:.4f} "
        f"| {record[f'{split}_calibration']:.3f} "
        f"| {record[f'{split}_expected_calibration_error']:.4f} | {record[f'{split}_num_examples']:,} |"
        for split in ("validation", "test")
    )
    notes = "".join(f"- {note}\n" for note in record["notes"])
    not_covered = "\n".join(f"- {item}" for item in record["not_covered"])
    return f"""# Run with the {record["sampler"]} sampler

## Guarantee

**{record["guarantee"]}**

One {record["unit"]} of the training data is protected: replacing it by an example whose gradient is
zero ({record["adjacency"]} adjacency) changes the law of everything that training released about the
parameters by at most this (epsilon, delta). The interval contains the mechanism's true epsilon; its
upper end is the guarantee.

| sampler | noise multiplier | clipping norm | epsilon | delta | steps | training examples |
| --- | --- | --- | --- | --- | --- | --- |
| {record["sampler"]} | {record["noise_multiplier"]:.6g} | {_number(record["l2_clip_norm"])} | {interval(record)} | {record["delta"]:.4g} | {record["num_steps"]:,} | {record["num_examples"]:,} |

{notes}
Not covered by the guarantee:

{not_covered}

## Quality

| rows | AUC | log loss | calibration | expected calibration error | examples |
| --- | --- | --- | --- | --- | --- |
{quality}

Calibration is the sum of predictions over the sum of labels.

## Speed

{record["training_seconds"]:.1f} s of training, {record["examples_per_second"]:,.0f} examples/s,
{record["num_params"]:,} parameters.

## Configuration

```json
{json.dumps(config, indent=2)}
```
"""


def comparison(records: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Returns (header, rows) of the table that compares finished runs."""
    header = ["sampler", "sigma", "epsilon [lower, upper]", "delta"]
    header += ["AUC", "log loss", "calibration", "seconds"]
    rows = [
        [
            record["sampler"],
            f"{record['noise_multiplier']:.4g}",
            interval(record),
            f"{record['delta']:.3g}",
            f"{record['test_auc']:.4f}",
            f"{record['test_log_loss']:.4f}",
            f"{record['test_calibration']:.3f}",
            f"{record['training_seconds']:.1f}",
        ]
        for record in records
    ]
    return header, rows


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"
