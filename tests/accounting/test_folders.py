"""Inside accounting imports go one way as well: the algebra knows no law, and laws no release."""

import ast
from pathlib import Path

import pytest

import accounting

ROOT = Path(accounting.__file__).parent
FOLDERS = ["profile", "algebra", "profiles", "releases"]


def imported(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield f"{node.module}.{node.names[0].name}"
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("folder", FOLDERS[:-1])
def test_a_folder_imports_nothing_from_those_above_it(folder):
    files = [*ROOT.glob(f"{folder}.py"), *(ROOT / folder).rglob("*.py")]
    above = tuple(f"accounting.{name}." for name in FOLDERS[FOLDERS.index(folder) + 1 :])
    assert files
    for file in files:
        assert not [name for name in imported(file) if f"{name}.".startswith(above)], file


@pytest.mark.parametrize("folder", ["", "algebra", "profiles"])
def test_a_folder_holds_at_most_a_dozen_files(folder):
    assert len([f for f in (ROOT / folder).glob("*.py") if f.name != "__init__.py"]) <= 12
