"""What the README shows is what happens."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES)
def test_every_python_example_runs_and_prints_a_guarantee(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    assert re.search(r"\[\d+\.\d+, \d+\.\d+\]", capsys.readouterr().out)


def test_the_library_example_reaches_a_certified_two_and_learns():
    namespace: dict = {}
    exec(compile(EXAMPLES[0], "README.md", "exec"), namespace)
    guarantee = namespace["Guarantee"].of(namespace["mechanism"], delta=1e-5)
    assert 1.99 < guarantee.epsilon.upper <= 2.0
    kernel = namespace["params"]["kernel"][...]
    assert kernel[0, 0] > 0.2 > -0.2 > kernel[1, 0]


def test_every_mean_and_deviation_stands_in_the_record_of_the_sweeps():
    record = json.loads((ROOT / "experiments/records/sweeps.json").read_text())
    recorded = {
        f"{mean:.4f} ± {sd:.4f}"
        for sweep in record["sweeps"]
        for point in sweep["results"]
        for mean, sd in [point["test_auc"]]
    }
    shown = re.findall(r"0\.\d{4} ± 0\.\d{4}", README)
    assert len(shown) > 30
    assert set(shown) <= recorded
