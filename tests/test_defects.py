"""The table of defects in tests/README.md names tests that exist, some of each row quick ones."""

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROWS = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|$", (TESTS / "README.md").read_text(), re.M)


def marks(decorators: list[ast.expr]) -> set[str]:
    """Names of the pytest marks that stand on a function, without those of single parameters."""
    names = {ast.unparse(d).split("(")[0] for d in decorators}
    return {name.removeprefix("pytest.mark.") for name in names if name.startswith("pytest.mark.")}


@functools.cache
def functions_of(file: Path) -> dict[str, set[str]]:
    """Name of each test function of a file -> its marks."""
    return {
        node.name: marks(node.decorator_list)
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_all_defects_are_in_the_table():
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 31))


@pytest.mark.parametrize(("number", "defect", "named"), ROWS, ids=[row[0] for row in ROWS])
def test_every_defect_is_held_off_by_tests_that_exist(number, defect, named):
    nodes = re.findall(r"`([^`]+)`", named)
    assert nodes, defect
    assert "<br>".join(f"`{node}`" for node in nodes) == named.strip()
    quick = 0
    for node in nodes:
        file, name = node.split("::")
        found = functions_of(TESTS / file)
        assert name in found, f"row {number} names {node}, which does not exist"
        quick += "long" not in found[name]
    assert quick, f"row {number}, {defect!r}, is held by long tests alone"
