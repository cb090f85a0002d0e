"""A task of the tests' own, a line through points, which trains in a second; and runs of it."""

import functools
import json
import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpsgd import RunSpec, run, with_rows
from dpsgd.core.queries import FullSums
from dpsgd.engine import calibration
from dpsgd.engine.calibration import Temperature
from dpsgd.engine.queries import Refinement
from dpsgd.runs import job
from dpsgd.runs.directory import DIAGNOSTICS
from dpsgd.runs.history import read
from dpsgd.runs.processes import Processes
from dpsgd.runs.stop import Stopped
from samplers.settings import SETTINGS


@dataclass(frozen=True)
class Line:
    """Points near the plane y = x1 + x2 + ..., and the weights that say so."""

    rows: int = 160
    width: int = 3
    seed: int = 0

    def columns(self):
        return self._points(self.seed, self.rows)

    def init(self, seed):
        return {"w": np.random.default_rng(seed).normal(size=self.width).astype(np.float32)}

    @staticmethod  # so that all lines of a size share their programs
    def loss(params, example):
        return jnp.square(example["x"] @ params["w"] - example["y"])

    def metrics(self, params):
        public = self._points(7, 50)
        error = np.square(public["x"] @ np.asarray(params["w"]) - public["y"]).mean()
        return {"test_error": float(error), "test_num_examples": 50}

    def generated(self, count):
        return self._points(8, count)

    def describe(self):
        return {"headline": "test_error", "better": "lower", "width": self.width}

    def _points(self, seed, count):
        x = np.random.default_rng(seed).normal(size=(count, self.width)).astype(np.float32)
        return {"x": x, "y": x.sum(axis=1)}


@dataclass(frozen=True)
class Held(Line):
    """The same, of which a process holds its own shards' rows: of all others it has NaN."""

    def columns(self):
        held = Processes.current()
        own = np.arange(self.rows) * held.count // self.rows == held.index
        points = super().columns()
        points["x"][~own], points["y"][~own] = np.nan, np.nan
        return points

    def digest(self):
        return "which all have, one with another"


@dataclass(frozen=True)
class Scaled(Line):
    """Another loss of the same rows, described alike."""

    scale: float = 1.0

    def loss(self, params, example):
        return self.scale * super().loss(params, example)


@dataclass(frozen=True)
class Slope(Refinement):
    """Scales the weights to the least squares on the rows."""

    divisor: float

    def reads(self, params, example):
        return {"at": example["x"] @ params["w"], "y": example["y"]}

    def start(self):
        return jnp.ones(())

    def statistic(self, state, row):
        at, y = row["at"], row["y"]
        return jnp.stack([at * (y - state * at), at**2]) / self.divisor

    def fold(self, state, mean):
        return state + mean[0] / jnp.maximum(mean[1], 1e-2)

    def apply(self, params, state):
        return {"w": params["w"] * state}

    def summary(self, state):
        return {"slope": state}


@dataclass(frozen=True)
class Calibrated(Line):
    """The same, which private runs calibrate."""

    divisor: float = 20.0

    def calibration(self):
        return _slope(self.divisor)


_slope = functools.cache(Slope)  # one object, and so one program


def _mean_loss(task, params):
    """Metrics of a task: the mean loss of public rows."""
    public = task._points(7, 50)
    errors = [task.loss(params, {k: v[i] for k, v in public.items()}) for i in range(50)]
    return {"test_error": float(np.mean(errors)), "test_num_examples": 50}


@dataclass(frozen=True)
class Kinds(Line):
    """Points of one of several classes, by their largest coordinate; calibrated."""

    def init(self, seed):
        return super().init(seed) | {"b": np.zeros(self.width, np.float32)}

    def logits(self, params, example):
        return example["x"] * params["w"] + params["b"]

    def loss(self, params, example):
        found = jax.nn.log_softmax(self.logits(params, example))
        return -found[example["y"]]

    def calibration(self):
        return Temperature(self.logits, _class, _rescaled)

    metrics = _mean_loss

    def _points(self, seed, count):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(count, self.width)).astype(np.float32)
        kinds = (2 * x + rng.gumbel(size=x.shape)).argmax(axis=1).astype(np.int32)
        return {"x": x, "y": kinds}


def _class(example):
    return example["y"]


def _rescaled(params, a):
    return jax.tree.map(lambda x: a * x, params)


@dataclass(frozen=True)
class Words(Line):
    """Sums of the vectors of two words, most of which are in no row."""

    words: int = 400

    def init(self, seed):
        table = np.random.default_rng(seed).normal(size=(self.words, self.width))
        return {"table": table.astype(np.float32), "w": np.ones(self.width, np.float32)}

    loss = with_rows(
        lambda example: {"table": example["words"]},
        lambda params, rows, example: jnp.square(
            rows["table"].sum(axis=0) @ params["w"] - example["y"]
        ),
    )

    metrics = _mean_loss

    def _points(self, seed, count):
        rng = np.random.default_rng(seed)
        words = np.minimum(rng.zipf(1.3, size=(count, 2)) - 1, self.words - 1).astype(np.int32)
        return {"words": words, "y": rng.normal(size=count).astype(np.float32)}


line = Line()
words = Words()
held = Held()
calibrated = Calibrated()
kinds = Kinds()
NAMES = {id(globals()[name]): f"tiny_task:{name}" for name in ("line", "words", "calibrated")}
SUMS = FullSums(3, 4.0)


@contextmanager
def few_rows_are_calibrated():
    """Has runs of so few rows be calibrated by `SUMS`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "calibration_sums", lambda kind, num_examples, **about: SUMS)
        yield


BLOCK = 8


def watched(do):
    """Blocks of training, before each of which `do(number, block)` is called."""
    blocks = job.train_blocks

    def watching(*args, **options):
        for number, block in enumerate(blocks(*args, **options)):
            do(number, block)
            yield block

    return watching


class Killed(BaseException):
    """What ends a run at once."""


@contextmanager
def ended(how="stopped", number=1, match=None):
    """Has a run be stopped by SIGTERM, or killed, when its block of a number was taken."""

    def end(taken, block):
        if taken == number and how == "killed":  # its noise was drawn, and no checkpoint tells
            raise Killed
        if taken == number:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "train_blocks", watched(end))
        with pytest.raises(Killed if how == "killed" else Stopped, match=match):
            yield


def config_of(**settings):
    # Batches that are never cut are priced in a third of the time.
    sampler = SETTINGS["balls-and-bins"](batch_size=16, epochs=3, max_batch_size=160)
    given = {"noise_multiplier": 1.0, "l2_clip_norm": 4.0, "learning_rate": 3e-3, "audit": False}
    return RunSpec.of(**{"sampler": sampler, **given, **settings})


def run_and_stop(task, config, out):
    """Trains until SIGTERM after the second block, 16 of 30 steps."""
    with ended(match="stopped at step 16 of 30; all is saved"):
        run(task, config, out, name=NAMES.get(id(task)))  # resumed by its own program
    return out


@contextmanager
def short_blocks():
    """Has runs take blocks of few steps: a short run has several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "BLOCK_STEPS", BLOCK)
        yield


def assert_same(one, other):
    """What two runs wrote for others is the same, to the bit."""
    for name in ("params.npz", "ledger.jsonl", "guarantee.json", DIAGNOSTICS):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def params_of(out):
    with np.load(out / "params.npz") as found:
        return dict(found)


def weights(out):
    return params_of(out)["['w']"]


def contents(out, name):
    return json.loads((out / name).read_text())


def declared(out):
    """The steps of each attempt."""
    return [attempt.steps for attempt in read(out / "ledger.jsonl").attempts]
