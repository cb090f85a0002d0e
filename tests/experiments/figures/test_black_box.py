"""The figure of a black-box audit shows a violation, and no bound above the proved one."""

import numpy as np

from accounting import Bound
from dpsgd.audit.black_box import bound_epsilon
from experiments.figures import black_box
from experiments.figures.drawing import save


def test_a_violation_can_be_drawn(tmp_path):
    rng = np.random.default_rng(0)

    def play(others, trials):
        return {"sum": rng.standard_normal(trials) + 1}, {"sum": rng.standard_normal(trials)}

    report = bound_epsilon(play, Bound(0.0, 0.1), delta=0.01, trials=600)
    assert report.violation
    (line,) = (line for line in report.lines() if line.startswith("epsilon >= "))
    assert float(line.split()[2]) <= report.epsilon_lower < float(line.split()[2]) + 1e-3
    save(black_box.draw(report), tmp_path / "audit.svg")
    assert (tmp_path / "audit.svg").read_text().startswith("<?xml")
