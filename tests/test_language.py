"""Words that the project has given up for those of the field stay away: names and phrases alone.

English words stay English words: what is listed here said something in the project's own way.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("accounting", "samplers", "dpsgd", "experiments")
NAMES = {
    "lane": "data shard",
    "stretches": "segments",
    "gone_on": "resumes",
    "as_decided": "resolved",
    "generation": "attempt",
    "dealt_out": "sharded",
    "unflushed": "raw_params",
    "drowned": "noise_dominated",
    "reveals": "return_gradient",
    "late_law": "deferred noise",
    "lent": "table snapshot",
}
"""Identifiers, or parts of them, in the singular, and what is said in their place."""
PHRASES = (
    r"noise that (is due|comes late)|late (law|noise)|noise comes late",
    r"dealt out|drowned|(takes?|take) no lot|unflushed|as decided|kept apart from",
    r"rows? that (is|are) nobody's|nobody's|lent (rows?|tables?)",
    r"(a|the) (run|training|sweep|selection|attempt) (goes|went|has gone|had gone) on",
)
"""Of documents, docstrings, messages and comments."""


def names_of(tree):
    for node in ast.walk(tree):
        for field in ("name", "id", "arg", "attr"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


@pytest.mark.parametrize("package", PACKAGES)
def test_no_identifier_is_one_that_was_given_up(package):
    for file in (ROOT / package).rglob("*.py"):
        for name in names_of(ast.parse(file.read_text())):
            words = "_" + re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() + "_"
            for old, new in NAMES.items():
                assert not re.search(rf"_{old}s?_", words), f"{file}: {name}: say {new}"


@pytest.mark.parametrize("package", [*PACKAGES, "docs", "scripts", "README.md"])
def test_no_text_has_a_phrase_that_was_given_up(package):
    place = ROOT / package
    for file in [place] if place.is_file() else place.rglob("*"):
        built = {"_build", "__pycache__"} & set(file.parts)
        if file.is_file() and file.suffix in (".py", ".md", ".toml", ".jinja", "") and not built:
            text = " ".join(file.read_text().split())
            for phrase in PHRASES:
                found = re.search(rf"\b({phrase})\b", text, re.IGNORECASE)
                assert not found, f"{file}: {found}"
