"""The one GPU command: what it holds a device to, what it writes, and that a CPU rehearses it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.benchmarks import gpu, gpu_program
from experiments.benchmarks.gpu_equality import philox
from experiments.benchmarks.gpu_record import Part, Record
from experiments.benchmarks.rows import Row
from experiments.tasks.clicks.synthetic import rows as synthetic

ROOT = Path(__file__).resolve().parents[3]
NOT_NEEDED = ("tyro", "typeguard", "matplotlib", "pyarrow", "dp_accounting", "tensorflow_datasets")


def test_the_reference_of_the_noise_is_philox():
    # Known answers of the generator's authors (Random123, kat_vectors).
    ones = 2**32 - 1
    zero = philox(np.zeros((4, 1), np.uint32), np.zeros(2, np.uint32)).ravel()
    full = philox(np.full((4, 1), ones, np.uint32), np.full(2, ones, np.uint32)).ravel()
    assert zero.tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert full.tolist() == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.long
def test_what_fails_or_does_not_fit_loses_nothing_of_the_rest(tmp_path):
    file = tmp_path / "folder" / "record.json"
    seen = []

    def good():
        yield Row.at_most("a", 1.0, "s", 2.0)
        seen.append(json.loads(file.read_text()))  # what a stop here would leave
        yield Row("b", float("nan"), "")

    def breaks():
        yield Row("c", 3.0, "")
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhile trying to allocate")

    record = Record(file, minutes=1, tiny=True)
    record.run(Part("breaks", 1, breaks))
    record.run(Part("good", 1, good))
    record.run(Part("long", 61, good))
    (unfinished,) = seen
    assert unfinished["parts"][1]["status"] == "begun"
    assert unfinished["parts"][1]["rows"][0]["value"] == 1.0
    breaks, good, long = json.loads(file.read_text())["parts"]
    assert breaks["status"] == "failed"
    assert breaks["why"].startswith("RuntimeError: RESOURCE_EXHAUSTED")
    assert "\n" not in breaks["why"]
    assert [row["name"] for row in breaks["rows"]] == ["c"]
    assert good["status"] == "done"
    assert good["rows"][1] == {
        "name": "b (was nan)", "value": None, "unit": "", "bar": "", "holds": False
    }  # fmt: skip
    assert long["status"] == "left out"
    assert "takes about 61" in long["why"]
    assert not record.holds


@pytest.mark.long
def test_parts_that_take_longer_than_foreseen_leave_less_room_for_the_next(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def slow():
        now[0] += 30
        yield Row("a", 1.0, "s")

    record = Record(tmp_path / "record.json", minutes=1)
    record.run(Part("three times slower", 10, slow))
    record.run(Part("fits by its estimate alone", 11, slow))
    assert [part["status"] for part in record.parts] == ["done", "left out"]


@pytest.mark.long
def test_the_noise_of_this_device_is_held_to_numpys(tmp_path):
    file = tmp_path / "gpu.json"
    assert gpu.main(["--tiny", "--json", str(file), "--parts", "noise", "copies"]) == 0
    noise, copies = json.loads(file.read_text())["parts"]
    assert [part["status"] for part in (noise, copies)] == ["done", "done"]
    assert sum(row["holds"] is True for row in noise["rows"]) == 4


@pytest.mark.long
def test_rows_in_memory_are_those_of_a_store(tmp_path):
    made = synthetic.write_store(tmp_path / "store", 70_000, seed=3)
    found = synthetic.in_memory(70_000, seed=3)
    for name, column in made.store.load("train").items():
        np.testing.assert_array_equal(found.columns[name][: len(column)], column)
    assert found.bayes_auc == pytest.approx(made.summary.bayes_auc, abs=1e-12)
    later = synthetic.in_memory(4_000, seed=3, first_chunk=1).columns["categories"]
    np.testing.assert_array_equal(later, found.columns["categories"][65_536:69_536])


LOOP = """
%body (p: (s32[], f32[9,2])) -> (s32[], f32[9,2]) {
  %p = (s32[], f32[9,2]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[9,2]{1,0} get-tuple-element(%p), index=1
  %twice = f32[9,2]{1,0} fusion(%x, %i), kind=kLoop, calls=%fused
  ROOT %pair = (s32[], f32[9,2]{1,0}) tuple(%i, %twice)
}

ENTRY %main (a: f32[9,2], i: s32[]) -> (s32[], f32[9,2]) {
  %a = f32[9,2]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %start = (s32[], f32[9,2]{1,0}) tuple(%i.1, %a)
  ROOT %loop = (s32[], f32[9,2]{1,0}) while(%start), condition=%c, body=%body, KNOWN
}
"""
COUNT = 'backend_config={"known_trip_count":{"n":"5"}}'


@pytest.mark.parametrize(("known", "times"), [(COUNT, 5), ("metadata={}", 1)])
def test_kernels_of_a_loop_count_as_often_as_it_is_known_to_go_round(known, times):
    moved = gpu_program.traffic(LOOP.replace("KNOWN", known), largest=18)
    assert moved == (times, times, 8.0 * times)


REHEARSAL = """
import builtins, sys
for name in {names}:
    sys.modules[name] = None
usual = builtins.__import__
def refusing(name, globals=None, *rest, **named):
    importer = ((globals or {{}}).get("__name__") or "").split(".")[0]
    ours = importer in ("accounting", "samplers", "dpsgd", "experiments")
    if ours and name.split(".")[0] == "rich":  # flax itself imports it
        raise ImportError(name)
    return usual(name, globals, *rest, **named)
builtins.__import__ = refusing
from experiments.benchmarks import gpu
sys.exit(gpu.main(["--tiny", "--json", {file!r}]))
"""


@pytest.mark.long
@pytest.mark.timeout(1_200)
def test_the_whole_rehearsal_needs_jax_flax_optax_numpy_and_scipy_alone(tmp_path):
    file = tmp_path / "gpu.json"
    program = REHEARSAL.format(names=NOT_NEEDED, file=str(file))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(file.read_text())["parts"]
    assert [part["name"] for part in parts] == [part.name for part in gpu.tiny_parts()]
    assert {part["status"] for part in parts} == {"done"}
    assert all(row["holds"] is not False for part in parts for row in part["rows"])


def test_the_rehearsal_has_the_parts_of_the_real_thing():
    kinds = [part.name.split()[0] for part in gpu.parts()]
    assert list(dict.fromkeys(kinds)) == [part.name.split()[0] for part in gpu.tiny_parts()]
