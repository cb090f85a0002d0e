"""What a finished run left for anybody to read, held against its ledger."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsgd import Guarantee, Mechanism
from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.history import History
from dpsgd.runs.records import checked
from experiments.cli.config import TrainConfig
from experiments.fingerprint import differing
from experiments.recorded import config_from
from experiments.reports import run as report
from samplers.settings import name_of

_LARGEST = 1e39
"""Float32, in which a model computes, ends below."""

_METRICS: dict[str, dict[str, tuple[Any, float, float]]] = {
    split: {
        f"{split}_auc": (float | None, 0, 1),
        f"{split}_log_loss": (float | None, 0, _LARGEST),
        f"{split}_calibration": (float | None, 0, _LARGEST),
        f"{split}_expected_calibration_error": (float | None, 0, 1),
    }
    for split in report.SPLITS
}
"""What is said of the rows of a split: None, all of it, where the training diverged."""

_FIGURES: dict[str, tuple[Any, float, float]] = {
    **{name: limits for metrics in _METRICS.values() for name, limits in metrics.items()},
    **{f"{split}_num_examples": (int, 1, _LARGEST) for split in _METRICS},
    "num_params": (int, 1, _LARGEST),
    "training_seconds": (float, 0, _LARGEST),
    "examples_per_second": (float, 0, _LARGEST),
}
"""What a report alone says: the type of each figure, its least and its largest value."""

_ENVIRONMENT: dict[str, Any] = {
    "packages": dict[str, str],
    "python": str,
    "platform": str,
    "cpu_count": int | None,
    "backend": str,
    "devices": list[str],
}
"""What a ledger says of where a generation ran, by type."""


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, read back.

    Attributes:
      path: Its directory.
      config: What was asked for.
      record: What `report.json` holds, with the ledger's word for all that the ledger proves.
      history: The ledger.
    """

    path: Path
    config: TrainConfig
    record: dict[str, Any]
    history: History

    @classmethod
    def read(cls, path: Path) -> FinishedRun:
        """Reads the run in a directory.

        Raises:
          FileNotFoundError: if there is no finished run.
          ValueError: if its files are damaged, or do not belong together.
        """
        run = RunDirectory.open(path)
        history = run.history()
        config = config_from(run.config(history), out=path, data=None)
        record = run.read_json("report.json")
        where = f"{path / 'report.json'} is damaged, or of another version"
        checked_fields(record, {"audit": str, **{n: k for n, (k, *_) in _FIGURES.items()}}, where)
        for name, (_, least, most) in _FIGURES.items():
            if record[name] is not None and not least <= record[name] <= most:
                shown = f"{record[name]!s:.20}"
                raise ValueError(f"{where}: {name} must lie in [{least:g}, {most:g}], got {shown}")
        for metrics in _METRICS.values():
            undefined = [name for name in metrics if record[name] is None]
            if 0 < len(undefined) < len(metrics):
                raise ValueError(f"{where}: {undefined[0]} is undefined, and others are not")
        return cls(path, config, {**record, **proved(history)}, history)

    @property
    def mechanism(self) -> Mechanism | None:
        """What its price can be asked of at another delta; None after a change of course."""
        generations = self.history.generations
        return generations[0].terms.mechanism if len(generations) == 1 else None

    @property
    def stores(self) -> list[str | None]:
        """Digests of the stores that it was trained on; None for what was not written down."""
        return RunDirectory(self.path).data()

    @property
    def environments(self) -> list[dict[str, Any]]:
        """Versions and hardware of its generations, each once."""
        found: list[dict[str, Any]] = []
        for generation in self.history.generations:
            stated, where = generation.terms.fingerprint, f"{self.path / 'ledger.jsonl'} is damaged"
            checked_fields(stated, _ENVIRONMENT, where)
            here = {name: stated[name] for name in _ENVIRONMENT}
            found += [here] if here not in found else []
        return found


def unlike(runs: Iterable[FinishedRun]) -> list[str]:
    """Returns what else differs between runs, or within one, than what was asked of them."""
    generations = (generation for run in runs for generation in run.history.generations)
    return differing([g.terms.fingerprint for g in generations], but=("config", "data"))


def guarantee_of(history: History) -> Guarantee:
    """Returns `history.guarantee()`; a process prices once for all runs that declared alike."""
    told = tuple(
        (g.terms.mechanism, g.terms.delta, g.terms.reproducible_noise, g.steps)
        for g in history.generations
    )
    if told not in _guarantees:
        _guarantees[told] = history.guarantee()
    return _guarantees[told]


_guarantees: dict[Hashable, Guarantee] = {}


def proved(history: History) -> dict[str, Any]:
    """Returns that part of a run's report which its ledger gives, the guarantee among it."""
    sampler = history.generations[-1].terms.mechanism.sampler
    return {
        "sampler": name_of(type(sampler)),
        **guarantee_of(history).record(),
        "num_examples": sampler.num_examples,
        "num_steps": sampler.num_steps,
        "generations": len(history.generations),
    }


def checked_fields(record: Mapping[str, Any], kinds: Mapping[str, Any], where: str) -> None:
    """Raises ValueError, which begins with `where`, if a field is missing or of another type."""
    for name, kind in kinds.items():
        if name not in record:
            raise ValueError(f"{where}: {name} is missing")
        checked(record[name], kind, f"{where}: {name}")
