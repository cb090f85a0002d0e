"""Shell command that repeats a run."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from dpsgd.runs.records import to_json
from dpsgd.runs.spec import OWN, RunSpec, known_options
from dpsgd.runs.task import find
from experiments.cli.questions.about_runs import FOR_PROGRAMS
from experiments.cli.tasks import DEFAULT
from experiments.tasks import TASKS
from samplers.settings import SamplerSettings


def train_command(task: Mapping[str, Any], spec: RunSpec, out: Path) -> str:
    """Returns the `dpsgd train` command that repeats a run.

    Options at their defaults are left out.

    Args:
      task: "name" and "settings" of the task. A task from another module is not imported: all its
        settings are written, or none for a task object (a name in lower case).
      spec: Configuration of the run.
      out: Run directory.

    >>> from samplers.settings import SETTINGS
    >>> spec = RunSpec.of(SETTINGS["poisson"](epochs=3), noise_multiplier=0.5)
    >>> train_command({"name": "clicks", "settings": {"data": "my store"}}, spec, Path("run"))
    "dpsgd train 'my store' sampler:poisson --epochs 3 --noise-multiplier 0.5 --out run"
    """
    name, settings, sampler = task["name"], dict(task["settings"]), spec.sampler
    if name is None or not isinstance(sampler, SamplerSettings):
        return f"# {out}: no command repeats this run; a program built its task or sampler"
    options = {n: value for n, value in spec.options().items() if n != "sampler"}
    options = _changed(options, {n: option.default for n, option in known_options().items()})
    if program_settings := sorted(FOR_PROGRAMS.keys() & options.keys()):
        names = ", ".join(program_settings)
        return f"# {out}: no command repeats this run; only Python and sweep files set {names}"
    for option, registry in OWN.items():
        if not isinstance(value := options.get(option, ""), str):  # with settings of its own
            record = _changed(registry.record(value), _defaults(value))
            options |= {option: record.pop("name"), **record}
    if name in TASKS:
        settings = _changed(settings, _defaults(find(TASKS[name])))
    elif not name.rpartition(":")[2][:1].isupper():
        settings = {}
    words = ["dpsgd", "train", *(["--task", name] if name != DEFAULT else [])]
    words += [settings.pop("data")] if settings.get("data") else []
    words.append(f"sampler:{sampler.name}")
    options = {**_changed(vars(sampler), _defaults(sampler)), **options, **settings}
    words += [word for n, value in options.items() for word in _option(n, value)]
    return shlex.join([*words, "--out", str(out)])


def _defaults(record: Any) -> dict[str, Any]:
    return {f.name: f.default for f in dataclasses.fields(record) if f.default is not MISSING}


def _changed(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that are neither defaults nor defaults as JSON has them."""
    return {
        name: value
        for name, value in values.items()
        if name not in defaults or value not in (defaults[name], to_json(defaults[name]))
    }


def _option(field: str, value: Any) -> list[str]:
    name = field.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, tuple | list):
        return [f"--{name}", *map(str, value)]
    return [] if value is None else [f"--{name}", str(value)]
