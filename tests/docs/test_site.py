"""The site, and reports of runs, open in a browser as they are meant to, without a network."""

import importlib
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, served

from experiments import cli

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (390, 1200)
"""Of a phone, and of a desk."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def site():
    """The folder of the site, built anew; warnings are errors."""
    shutil.rmtree(ROOT / "docs" / "_build", ignore_errors=True)
    done = subprocess.run([ROOT / "scripts" / "docs"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "docs" / "_build" / "html"


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """A folder with the report of two runs, and what a run directory holds."""
    home = tmp_path_factory.mktemp("runs")
    store, clicks, images = home / "store", home / "clicks", home / "images"
    for line in (
        f"prepare synthetic {store} --num-rows 5000",
        f"train {store} sampler:balls-and-bins --target-epsilon 3 --epochs 1 --out {clicks}",
        f"train --task images sampler:shuffle --noise-multiplier 1 --epochs 1 --out {images}",
        f"report {clicks} --out {home / 'one.html'}",
        f"report {clicks} {images} --out {home / 'two.html'}",
    ):
        assert cli.main(line.split()) == 0
    return home


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("folder", ["site", "reports"])
def test_every_page_opens_without_error_network_or_scrolling(folder, width, browser, request):
    folder = request.getfixturevalue(folder)
    pages = sorted(page.relative_to(folder) for page in folder.rglob("*.html"))
    pages = [page for page in pages if page.parts[0] != "_static"]  # templates of the theme
    assert pages
    with served(folder) as address:
        for page in pages:
            found = browser.open(f"{address}/{page}", width)
            assert len(found.pop("text")) > 50, page
            assert not any(found.values()), (page, found)


@pytest.mark.long
@pytest.mark.parametrize("page", ["explanation/papers", "reference/support_matrix"])
def test_a_table_of_verdicts_is_whole_at_a_desk(page, site, browser):
    beyond = "Math.max(...[...document.querySelectorAll('.pst-scrollable-table-container')]"
    beyond += ".map(e => e.scrollWidth - e.clientWidth))"
    with served(site) as address:
        browser.open(f"{address}/{page}.html", WIDTHS[1])
        assert browser.evaluate(beyond) == 0


@pytest.mark.long
@pytest.mark.parametrize("page", ["how-to/criteo", "tutorials/your-own-loss"])
def test_a_box_of_code_holds_80_characters_at_a_desk(page, site, browser):
    beyond = (
        "(box => { box.textContent = '0'.repeat(80); return box.scrollWidth - box.clientWidth })"
    )
    beyond += "(document.querySelector('.highlight pre'))"
    with served(site) as address:
        browser.open(f"{address}/{page}.html", WIDTHS[1])
        assert browser.evaluate(beyond) == 0


@pytest.mark.long
def test_a_panel_of_three_is_as_wide_as_a_phone(site, browser):
    wide = "(picture => picture.clientWidth / picture.parentElement.clientWidth)"
    wide += "(document.querySelector('img.three-columns'))"
    with served(site) as address:
        found = browser.open(f"{address}/explanation/results/samplers.html", WIDTHS[0])
        assert found["pixels beyond the window"] == 0
        assert 2.7 < browser.evaluate(wide) <= 3  # the frame of the picture is a little wider


@pytest.mark.long
@pytest.mark.parametrize("asked", ["balls-and-bins", "calibrate"])
def test_the_search_finds_pages(asked, site, browser):
    with served(site) as address:
        browser.open(f"{address}/search.html?q={asked}", 390)
        for _ in range(100):
            if (
                results := browser.evaluate('document.querySelectorAll("ul.search li").length')
            ) > 3:
                break
            time.sleep(0.1)
    assert results > 3


@pytest.mark.long
@pytest.mark.parametrize("package", ["accounting", "samplers", "dpsgd"])
def test_every_public_name_has_an_entry(package, site):
    page = (site / "reference" / f"{package}.html").read_text()
    for name in importlib.import_module(package).__all__:
        assert re.search(rf'id="{package}[\w.]*\.{name}"', page), name


@pytest.mark.long
def test_every_file_of_a_run_is_in_the_page_of_file_formats(reports):
    formats = (ROOT / "docs" / "reference" / "files.md").read_text()
    for folder in (reports / "clicks", reports / "store", reports / "images"):
        for file in folder.iterdir():
            assert f"`{file.name}`" in formats, file
