"""What every test stands on: checked types, hypothesis profiles, the real rows if any."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import pytest
from jaxtyping import install_import_hook

# Annotations are promises; under the tests they are checked at every call.
# (An int passes for a float, as the numeric tower of PEP 484 has it. Of a container the first item
# is looked at, not a random one: a test that fails does so every time.)
install_import_hook(
    ["accounting", "samplers", "dpsgd", "experiments"],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True, is_random=False))",
)

hypothesis.settings.register_profile("short", max_examples=50, deadline=None, derandomize=True)
hypothesis.settings.register_profile("long", max_examples=2_000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def real_criteo_rows() -> Path:
    """110,000 real rows of the Criteo Display Ads data, where the checkout has them beside it."""
    path = SHARED_DATA / "criteo_display_110k.tsv.gz"
    if not path.exists():
        pytest.skip("the real Criteo rows are not at ../shared/data/criteo_display_110k.tsv.gz")
    return path


@pytest.fixture(scope="session")
def real_search_rows() -> Path:
    """Four real rows of the Criteo Sponsored Search log, where the checkout has them beside it."""
    path = SHARED_DATA / "criteo_search_4rows.tsv"
    if not path.exists():
        pytest.skip("the real search rows are not at ../shared/data/criteo_search_4rows.tsv")
    return path
