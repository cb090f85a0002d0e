"""The tutorials run from their first cell to their last, to the outputs that they are stored with.

`python tests/docs/test_tutorials.py [NAME ...]` stores the outputs anew.
"""

import ast
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
FLOORS = {"accounting", "samplers", "dpsgd"}
FROM = tuple(f"from {floor} import" for floor in FLOORS)
NUMBER = re.compile(r"(?<![\w.])-?[\d,]*\d(?:\.\d+)?(?:e[-+]?\d+)?")
SECRET = re.compile(r"^seconds.*|\b[0-9a-f]{64}\b", re.MULTILINE)
"""What differs in each run: times, and digests of what was trained."""


def code(path):
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def python(path):
    return [text for text in code(path) if not text.startswith("%%")]


def executed(path, folder):
    """The notebook with the outputs of a run in a folder; what goes to stderr is progress."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    bins = [str(Path(sys.executable).parent), os.environ["PATH"]]
    with tempfile.TemporaryDirectory() as scratch:  # in which notebooks make folders of their own
        ours = {"PYTHONPATH": os.pathsep.join(paths), "PATH": os.pathsep.join(bins)}
        kernel = client.create_kernel_manager()
        kernel.connection_file = str(Path(scratch) / "kernel.json")  # also of one that is cut short
        client.execute(env=os.environ | ours | {"COLUMNS": "80", "TMPDIR": scratch})
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    return notebook


def printed(notebook):
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    return SECRET.sub("", "".join(out["text"] for out in outputs if "text" in out))


def pictures(notebook):
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    return sum("image/png" in out.get("data", {}) for out in outputs)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_is_stored_with_its_outputs_and_pictures(path):
    notebook = nbformat.read(path, as_version=4)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert printed(notebook)
    assert pictures(notebook) >= 1
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_takes_names_from_the_top_of_each_package(path):
    for node in ast.walk(ast.parse("\n".join(python(path)))):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in FLOORS:
            assert node.module in FLOORS
        assert not (isinstance(node, ast.Attribute) and node.attr.startswith("_"))


def test_what_makes_a_model_private_is_at_most_twenty_lines():
    [path] = [path for path in TUTORIALS if path.stem == "your-own-loss"]
    text = python(path)
    [private] = [cell for cell in text if "dpsgd(" in cell]
    imports = [line for line in text[0].splitlines() if line.startswith(FROM)]
    assert len(private.splitlines()) + len(imports) <= 20


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_prints_what_it_is_stored_with(path, tmp_path):
    """Texts are equal but for numbers, which randomness moves by a fifth of themselves or less.

    The spaces that pad a number count as one: 0.998 takes a place less than 0.9983.
    """
    stored, found = nbformat.read(path, as_version=4), executed(path, tmp_path)
    texts = [printed(notebook) for notebook in (stored, found)]
    was, now = (re.sub(" +", " ", NUMBER.sub("#", text)) for text in texts)
    assert was == now
    numbers = [[float(x.replace(",", "")) for x in NUMBER.findall(text)] for text in texts]
    for was, now in zip(*numbers, strict=True):
        assert now == pytest.approx(was, rel=0.2, abs=0.05), (was, now)
    assert pictures(stored) == pictures(found)
    assert not list(tmp_path.iterdir())


if __name__ == "__main__":
    for each in TUTORIALS:
        if each.stem in sys.argv[1:] or not sys.argv[1:]:
            with tempfile.TemporaryDirectory() as home:
                nbformat.write(executed(each, home), each)
