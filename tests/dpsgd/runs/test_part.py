"""A run trains the parameters that a pattern names, and leaves the others as they begin."""

import json

import numpy as np
import pytest
from tiny_task import (
    Calibrated,
    Words,
    calibrated,
    config_of,
    few_rows_are_calibrated,
    run_and_stop,
    short_blocks,
    words,
)

from dpsgd import resume, run
from dpsgd.models.model import export
from dpsgd.runs.ledger import read

LAZY = {"tables": "lazy", "tables_learning_rate": 0.1, "tables_momentum": 0.5}
PARTS = {
    "a layer, by clipping groups": ("^w", {"clipping": "per-layer"}),
    "a table": ("tab", {}),
    "a lazy table": ("tab", LAZY),
    "a layer, by a private quantile": ("^w", {"clipping": "quantile"}),
    "a table, in bfloat16": ("tab", {"compute": "bfloat16"}),
}


@pytest.mark.short("a table")
@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_trained_resumed_audited_and_recorded_and_the_rest_keeps_its_bits(part, tmp_path):
    pattern, options = PARTS[part]
    name = "w" if pattern == "^w" else "table"
    config = config_of(train=pattern, insecure_seed=3, **options)
    with short_blocks():
        run(words, config.but(audit=True), tmp_path / "whole")
        resume(run_and_stop(words, config, tmp_path / "cut"))
    whole, cut = (np.load(tmp_path / at / "params.npz") for at in ("whole", "cut"))
    for leaf, before in words.init(0).items():
        assert np.array_equal(whole[f"['{leaf}']"], before) == (leaf != name)
        assert whole[f"['{leaf}']"].tobytes() == cut[f"['{leaf}']"].tobytes()
    history = read(tmp_path / "cut" / "ledger.jsonl")
    assert len(history.attempts) == 1
    assert history.attempts[0].terms.fingerprint["trained"] == [name]
    assert "passed" in read(tmp_path / "whole" / "ledger.jsonl").audit
    export(tmp_path / "whole", tmp_path / "model", task=words)
    assert json.loads((tmp_path / "model" / "guarantee.json").read_text())["trained"] == [name]


class Shifted(Calibrated):
    """The same with a leaf that its calibration leaves alone."""

    def init(self, seed):
        return super().init(seed) | {"shift": np.zeros(1, np.float32)}

    def loss(self, params, example):
        return super().loss(params, example) + params["shift"][0]

    def calibration(self):
        slope = super().calibration()
        apply = slope.apply
        object.__setattr__(slope, "apply", lambda params, state: params | apply(params, state))
        return slope


def test_what_cannot_be_trained_in_part_is_refused_and_says_why(tmp_path):
    with pytest.raises(ValueError, match=r"train: '\(' is no pattern"):
        config_of(train="(")
    with pytest.raises(ValueError, match="'logit' is found in no parameter; there are table, w"):
        run(words, config_of(train="logit"), tmp_path / "none")
    with pytest.raises(ValueError, match="no tables"):
        run(words, config_of(train="^w", **LAZY), tmp_path / "lazy")
    with few_rows_are_calibrated():
        config = config_of(calibration="platt", insecure_seed=3)
        run(calibrated, config.but(train="w"), tmp_path / "all")
        with pytest.raises(ValueError, match="rescale w, which train leaves alone; leave it out"):
            run(Shifted(), config.but(train="shift"), tmp_path / "calibrated")
        run(Shifted(), config.but(train="shift", calibration=None), tmp_path / "open")
    frozen = np.load(tmp_path / "open" / "params.npz")["['w']"]
    assert np.array_equal(frozen, Shifted().init(0)["w"])
    assert Words().init(0).keys() == {"table", "w"}


def test_a_learned_clipping_norm_is_kept_through_averages_calibration_and_resume(tmp_path):
    options = {"clipping": "quantile", "calibration": "platt", "average_tail": 0.5}
    config = config_of(insecure_seed=3, **options)
    with few_rows_are_calibrated(), short_blocks():
        run(calibrated, config, tmp_path / "whole")
        resume(run_and_stop(calibrated, config, tmp_path / "cut"))
    whole, cut = (np.load(tmp_path / at / "params.npz") for at in ("whole", "cut"))
    assert whole.files == ["['w']"]
    assert whole["['w']"].tobytes() == cut["['w']"].tobytes()
