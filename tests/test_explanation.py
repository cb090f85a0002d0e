"""The pages of proofs and the code that rests on them cite one another."""

import ast
import re
from pathlib import Path

import pytest

from experiments.benchmarks.size import tree_of

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "explanation"
CODE = [
    f for d in ("accounting", "samplers", "dpsgd", "experiments") for f in (ROOT / d).rglob("*")
]
CITED = {
    (name, file.relative_to(ROOT))
    for file in CODE
    if file.suffix in (".py", ".md")
    for name in re.findall(r"docs/explanation/([\w-]+\.md)", file.read_text())
}
SHORT = [
    "accounting",
    "samplers",
    "dpsgd/noise",
    "dpsgd/gradients",
    "dpsgd/selection",
    "dpsgd/models",
    "dpsgd/files.py",
    "dpsgd/packing.py",
]
"""Folders and files whose module docstrings have at most ten lines; proofs are on the pages."""
LINES = 10


def test_every_page_is_cited_by_code_and_listed_in_the_index():
    pages = {page.name for page in PAGES.glob("*.md")} - {"README.md"}
    assert pages == {name for name, file in CITED if file.suffix == ".py"}
    assert pages == set(re.findall(r"\]\(([\w-]+\.md)\)", (PAGES / "README.md").read_text()))


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_names_code_that_exists(page):
    text = page.read_text()
    assert text.startswith("# ")
    assert text.count("$") % 2 == 0
    for name in re.findall(r"`((?:accounting|samplers|dpsgd|experiments)(?:\.\w+)+)`", text):
        parts = name.split(".")
        modules = [ROOT.joinpath(*parts[:k]) for k in range(len(parts), len(parts) - 2, -1)]
        found = [m for m in modules if m.is_dir() or m.with_suffix(".py").exists()]
        assert found, f"{page.name} names {name}"
        if found[0] != modules[0]:
            file = found[0].with_suffix(".py")
            source = file if file.exists() else found[0] / "__init__.py"
            assert re.search(rf"\b{parts[-1]}\b", source.read_text()), f"{page.name} names {name}"


@pytest.mark.parametrize("place", SHORT)
def test_a_module_says_what_it_holds_in_ten_lines(place):
    where = ROOT / place
    for file in [where] if where.is_file() else sorted(where.rglob("*.py")):
        words = ast.get_docstring(tree_of(file)) or ""
        assert len(words.splitlines()) <= LINES, file


VERDICTS = ("agrees", "corrected", "refuted", "solved here", "added here", "impossible here")


def test_every_row_of_the_papers_has_a_verdict_and_exists():
    text = (PAGES / "papers.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] not in ("the paper", "---")]
    assert len(rows) > 50
    for row in rows:
        assert len(row) == 5, row[0]
        assert row[4].startswith(VERDICTS), row[0]
        named = re.findall(r"`((?:accounting|samplers|dpsgd|docs|experiments)/[\w/.]+)`", row[3])
        for place in named:
            assert (ROOT / "tests" / place).exists(), f"{row[0]}: {place}"
        assert named or re.search(r"`(dpsgd|scripts/\w+) |\]\(|`\w+\(|as above", row[3]), row[0]
