"""What every test stands on: checked types, hypothesis profiles, the real rows if any."""

import gc
import os
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # for products so small, threads only wait
sys.path.insert(0, str(Path(__file__).parent))

import checked_types
import hypothesis
import pytest
from long_tier import (  # noqa: F401 - they are pytest's
    pytest_addoption,
    pytest_configure,
    pytest_pycollect_makeitem,
)

# What one of the tests' many processes compiles, the others need not: neither files, also where the
# environment forbids to keep them, nor JAX programs. What measures compiling opts out.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _programs = tempfile.TemporaryDirectory(prefix="dpsgd-tests-programs-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _programs.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Nearly all programs of the tests take longer to compile than to run. The short tier has them
# compiled as fast as can be, but where `optimised` says that bits, speed or memory are the claim;
# `scripts/test --long` compiles every one as users do.
if os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") == "1":
    os.environ["XLA_FLAGS"] = " ".join(
        [
            os.environ.get("XLA_FLAGS", ""),
            "--xla_cpu_use_fusion_emitters=false",
            "--xla_cpu_parallel_codegen_split_count=1",  # what is so small is not worth dividing
        ]
    ).strip()

gc.disable()  # until all is imported and collected

checked_types.install(["accounting", "samplers", "dpsgd", "experiments"])

hypothesis.settings.register_profile("short", max_examples=50, deadline=None, derandomize=True)
hypothesis.settings.register_profile("long", max_examples=2_000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))

ROOT = Path(__file__).resolve().parents[1]


def pytest_collection_finish():
    """What was imported and collected stays: it is not traversed for garbage again and again."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    gc.enable()


SHARED_DATA = ROOT.parent / "shared" / "data"


def _processor_seconds() -> float:
    """Of this process, and of those that it has waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.began = _processor_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        report.user_properties.append(("processor", _processor_seconds() - item.began))
    return report


def pytest_terminal_summary(terminalreporter):
    """Says what a large run has cost, and which tests did: a clock would tell of other work."""
    cost = {
        report.nodeid: seconds
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, seconds in getattr(report, "user_properties", ())
        if name == "processor"
    }
    if len(cost) < 1_000:
        return
    seconds = f"{_processor_seconds():.0f} s of processors, {sum(cost.values()):.0f} s in tests"
    terminalreporter.section(f"{seconds}; the dearest of {len(cost):,}")
    for test in sorted(cost, key=cost.__getitem__, reverse=True)[:10]:
        terminalreporter.write_line(f"{cost[test]:6.1f} s {test}")


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_in_the_temporary_directory(tmp_path_factory):
    """Whatever any test, or a process of it, leaves there is an error when all have ended."""
    temporary = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        patch.setattr(tempfile, "tempdir", None)
        yield
    assert not [path.name for path in temporary.iterdir()]


@pytest.fixture(scope="session", autouse=True)
def entry_points_of_this_checkout(tmp_path_factory):
    """The entry points that the project declares are found, in whatever state it was installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = tmp_path_factory.mktemp("installed") / "dpsgd-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dpsgd\nVersion: 0\n")
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(metadata.parent)
        yield


@pytest.fixture(scope="module")
def unoptimised():
    """Programs are compiled as fast as they can be, also in the long tier.

    For what is compared with a tolerance: not for bits, speed or memory.
    """
    yield from _compiled(optimised=False)


@pytest.fixture(scope="module")
def optimised():
    """Programs are compiled as users' are, also in the short tier: bits, speed or memory matter."""
    yield from _compiled(optimised=True)


def _compiled(*, optimised):
    import jax

    from dpsgd.engine import programs

    option = "jax_disable_most_optimizations"
    before = jax.config.values[option]

    def switch(disabled):
        if jax.config.values[option] != disabled:
            jax.config.update(option, disabled)
            programs._executable.cache_clear()  # what was compiled the other way is not met again
            jax.clear_caches()

    switch(not optimised)
    yield
    switch(before)


@pytest.fixture(scope="session")
def real() -> Callable[[str], Path]:
    """Name of a file of real rows -> where it lies beside the checkout, or else a skip."""

    def find(name: str) -> Path:
        if not (SHARED_DATA / name).exists():
            pytest.skip(f"the real rows are not at ../shared/data/{name}")
        return SHARED_DATA / name

    return find


@pytest.fixture(scope="session")
def real_criteo_rows(real) -> Path:
    """110,000 real rows of the Criteo Display Ads data, where the checkout has them beside it."""
    return real("criteo_display_110k.tsv.gz")


@pytest.fixture(scope="session")
def real_search_rows(real) -> Path:
    """Four real rows of the Criteo Sponsored Search log, where the checkout has them beside it."""
    return real("criteo_search_4rows.tsv")
