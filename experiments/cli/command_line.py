"""The command that carries out a configuration again."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from dpsgd.runs.records import to_json
from dpsgd.runs.spec import RunSpec, known_options
from dpsgd.runs.task import find
from experiments.cli.questions.about_runs import FOR_PROGRAMS
from experiments.cli.tasks import DEFAULT
from experiments.tasks import TASKS
from samplers.settings import SamplerSettings


def train_command(task: Mapping[str, Any], spec: RunSpec, out: Path) -> str:
    """Returns `dpsgd train ...` as a shell takes it: what differs from the defaults, and no more.

    Args:
      task: The "name" and the "settings" of what is trained. No module is imported by its name: of
        a task that is not built in, all settings are given; of one that is made already, as its
        name in lower case tells, none.
      spec: How it is trained.
      out: The run directory.

    >>> from samplers.settings import SETTINGS
    >>> spec = RunSpec.of(SETTINGS["poisson"](epochs=3), noise_multiplier=0.5)
    >>> train_command({"name": "clicks", "settings": {"data": "my store"}}, spec, Path("run"))
    "dpsgd train 'my store' sampler:poisson --epochs 3 --noise-multiplier 0.5 --out run"
    """
    name, settings = task["name"], dict(task["settings"])
    sampler = spec.sampler
    if name is None or not isinstance(sampler, SamplerSettings):
        return f"# of {out}: by a program alone, which made its task or its sampler"
    known = known_options()
    options = {k: v for k, v in spec.options().items() if k != "sampler"}
    given = {name: value for name, value in options.items() if value != known[name].default}
    if others := sorted(FOR_PROGRAMS.keys() & given.keys()):
        return f"# of {out}: by a program or a sweep alone, which set {', '.join(others)}"
    words = ["dpsgd", "train", *(["--task", name] if name != DEFAULT else [])]
    if not name.rpartition(":")[2][:1].isupper() and name not in TASKS:
        settings = {}
    elif name in TASKS:
        defaults = {
            f.name: to_json(f.default)
            for f in dataclasses.fields(find(TASKS[name]))
            if _has_default(f)
        }
        settings = {k: v for k, v in settings.items() if v != defaults.get(k, MISSING)}
    words += [settings.pop("data")] if settings.get("data") else []
    words.append(f"sampler:{sampler.name}")
    for field in dataclasses.fields(sampler):
        if (value := getattr(sampler, field.name)) != field.default:
            words += _option(field.name, value)
    for option, value in [*given.items(), *settings.items()]:
        words += _option(option, value)
    return shlex.join([*words, "--out", str(out)])


def _has_default(field: dataclasses.Field) -> bool:
    return field.default is not MISSING


def _option(field: str, value: Any) -> list[str]:
    name = field.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, tuple | list):
        return [f"--{name}", *map(str, value)]
    return [] if value is None else [f"--{name}", str(value)]
