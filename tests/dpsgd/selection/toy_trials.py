"""Selections of a tiny task whose trials come to scores that a test decides.

A trial is a copy of one run that was really trained, with the configuration and the score of its
candidate: so it has all the files that a trial has, and takes no time.
"""

import json
import os
import shutil
import sys
from contextlib import contextmanager

import pytest
from tiny_task import config_of, line

import dpsgd
from accounting import TrialCount
from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.history import read
from dpsgd.runs.stop import Stopped
from dpsgd.selection import candidates, engine
from samplers.settings import SETTINGS

SCORE = "test_error"
COUNT = TrialCount(3.0, 0.0)
RATES = (0.01, 0.02, 0.03)


def grid(**settings):
    """Returns three candidates, which differ in their learning rates."""
    return [candidate(learning_rate=rate, **settings) for rate in RATES]


def candidate(**settings):
    """Returns a candidate, of the sampler whose privacy cost is computed fastest."""
    sampler = SETTINGS["deterministic"](batch_size=16, epochs=3)
    return config_of(**{"sampler": sampler, "noise_multiplier": 4.0, **settings})


def select(out, configs=None, *, task=line, count=COUNT, lines=None, **asked):
    progress = (lambda line: None) if lines is None else lines.append
    asked = {"score": SCORE, "better": "lower", "count": count, "progress": progress, **asked}
    return dpsgd.select(task, grid() if configs is None else configs, out, **asked)


class Trials:
    """Stands for `run` and `resume` in selections; remembers what it was asked for.

    Attributes:
      scores: By learning rate: a number, None for a run that diverged, or an error to raise.
      begun: Learning rates of the trials, in their order.
      texts: What each trial left that must not stay: of its files, and of its name.
    """

    def __init__(self, trained, scores):
        self.trained, self.scores, self.begun, self.texts = trained, scores, [], []

    def run(self, task, config, path, name=None):
        self.begun.append(config.optimizer.learning_rate)
        print(f"trial {len(self.begun)}")
        print(f"trial {len(self.begun)}", file=sys.__stderr__)
        print(f"trial {len(self.begun)}", file=sys.__stdout__)  # stays in a buffer
        os.write(2, b"as compiled code writes it")
        score = self.scores[config.optimizer.learning_rate]
        source = self.trained[config.optimizer.learning_rate]
        with RunDirectory.create(path) as folder:
            for file in source.iterdir():
                shutil.copy(file, folder.path)
            record = folder.read_json("report.json")
            record["metrics"][SCORE] = None if isinstance(score, Exception) else score
            folder.write_json("report.json", record)
        self.texts.append(read(path / "ledger.jsonl").head.encode())
        if isinstance(score, Exception):
            raise score
        return record

    def resume(self, path, task):
        return RunDirectory(path).read_json("report.json")


@contextmanager
def scripted(trained, scores=None):
    """Has the trials of selections be scripted ones."""
    trials = Trials(trained, scores or dict(zip(RATES, (0.3, 0.2, 0.4), strict=True)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "run", trials.run)
        patch.setattr(engine, "resume", trials.resume)
        patch.setattr(candidates.Candidates, "check_programs", lambda *_: None)
        patch.setattr(candidates.Candidates, "rehearse", lambda *_: None)
        yield trials


@contextmanager
def stopped():
    """Has a selection be stopped where its first trial would begin."""

    def stop(*_):
        raise Stopped("at step 3 of trial 1")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_score", stop)
        with pytest.raises(
            Stopped, match=r"^stopped, and all is saved: repeat the command to resume$"
        ):
            yield


@contextmanager
def so_many(trials):
    """Has the number of trials be this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrialCount, "draw", lambda self, generator=None: trials)
        yield


def content(folder):
    """Returns the bytes of all files below a folder, by their names."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def guarantees(folder):
    """Returns every epsilon that a released folder states."""
    found = [json.loads((folder / name).read_text()) for name in ("guarantee.json", "report.json")]
    return [record["epsilon_upper"] for record in found]
