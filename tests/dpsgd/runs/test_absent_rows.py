"""Rows that a process cannot read are named before a run begins, by arrays with `lacks`."""

from dataclasses import dataclass

import numpy as np
import pytest
from tiny_task import Calibrated

from dpsgd import RunSpec, run
from dpsgd.core.queries import FullSums
from dpsgd.engine import calibration as calibrations
from dpsgd.engine.feed import Layout
from samplers.settings import SETTINGS


class Partial(np.ndarray):
    """Rows whose second half lies on another host."""

    def lacks(self, rows):
        """Returns the reason why some rows cannot be read here, or ""."""
        return "x.second is missing" if rows.stop > len(self) // 2 else ""


@dataclass(frozen=True)
class OnTwoHosts(Calibrated):
    """A line whose rows lie on two hosts."""

    def columns(self):
        return {name: np.asarray(x).view(Partial) for name, x in super().columns().items()}

    def digest(self):
        return "rows of two hosts"


@pytest.mark.parametrize(
    ("calibration", "says"),
    [("none", "this process trains on rows 0 to "), ("auto", "begin it with --calibration none")],
)
def test_absent_rows_that_are_read_are_named_first(calibration, says, tmp_path, monkeypatch):
    if calibration != "none":  # the rows that train are here
        monkeypatch.setattr(Layout, "process_shards", lambda self, sampler: range(1))
        monkeypatch.setattr(
            calibrations, "calibration_sums", lambda *which, **how: FullSums(3, 4.0)
        )
    sampler = SETTINGS["balls-and-bins"](batch_size=10, epochs=2, num_shards=2)
    how = {"calibration": calibration} if calibration == "none" else {}
    spec = RunSpec.of(sampler, noise_multiplier=1.0, audit=False, **how)
    with pytest.raises(ValueError, match=rf"x\.second is missing, .*{says}"):
        run(OnTwoHosts(), spec, tmp_path / "run")
    assert not (tmp_path / "run").exists()
