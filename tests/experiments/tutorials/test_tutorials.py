"""The tutorials run from their first cell to their last, and use what is public alone."""

import ast
import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TUTORIALS = sorted((ROOT / "experiments" / "tutorials").glob("*.ipynb"))
FLOORS = {"accounting", "samplers", "dpsgd"}
FROM = tuple(f"from {floor} import" for floor in FLOORS)
CLAIMS = {
    "private_in_twenty_lines": [
        "with it: 0.",
        " at delta 1e-05 (zero-out adjacency, unit: one ex",
    ],
    "sampler_noise_epsilon": ["balls-and-bins  at sigma 1: epsilon in [1.382, 1.384]"],
    "users_and_episodes": ["unit: one user)", "one partner  epsilon in ["],
}
"""What each prints, among other things."""


def cells(path):
    return json.loads(path.read_text())["cells"]


def code(path):
    return ["".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "code"]


def test_there_are_three():
    assert {path.stem for path in TUTORIALS} == set(CLAIMS)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_is_kept_without_outputs(path):
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells(path))


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_takes_names_from_the_top_of_each_package(path):
    for node in ast.walk(ast.parse("\n".join(code(path)))):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in FLOORS:
            assert node.module in FLOORS
        assert not (isinstance(node, ast.Attribute) and node.attr.startswith("_"))


def test_what_makes_a_model_private_is_at_most_twenty_lines():
    [path] = [path for path in TUTORIALS if path.stem == "private_in_twenty_lines"]
    text = code(path)
    [private] = [cell for cell in text if "dpsgd(" in cell]
    imports = [line for line in text[0].splitlines() if line.startswith(FROM)]
    assert len(private.splitlines()) + len(imports) <= 20


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_and_draws(path, tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    known = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(known))
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
    assert all(claim in printed for claim in CLAIMS[path.stem])
    assert not [output["text"] for output in outputs if output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not list(tmp_path.iterdir())
