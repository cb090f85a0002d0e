"""Inside accounting imports go one way as well: the algebra knows no law, and laws no estimate."""

import ast
from pathlib import Path

import pytest

import accounting

FLOOR = Path(accounting.__file__).parent
ROOMS = ["profile", "algebra", "profiles", "releases", "estimates"]


def imported(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield f"{node.module}.{node.names[0].name}"
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("room", ROOMS[:-1])
def test_a_room_imports_nothing_from_those_above_it(room):
    files = [*FLOOR.glob(f"{room}.py"), *(FLOOR / room).rglob("*.py")]
    above = tuple(f"accounting.{name}." for name in ROOMS[ROOMS.index(room) + 1 :])
    assert files
    for file in files:
        assert not [name for name in imported(file) if f"{name}.".startswith(above)], file


@pytest.mark.parametrize("room", ["", *ROOMS[1:]])
def test_a_room_holds_at_most_a_dozen_files(room):
    assert len([f for f in (FLOOR / room).glob("*.py") if f.name != "__init__.py"]) <= 12
