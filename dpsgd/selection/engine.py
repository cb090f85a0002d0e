"""Private selection: a random number of trials, one released model.

Prepare, declare, draw the number of trials, try, release the best, destroy the rest. The same call
resumes a killed selection. Steps, and reasons for secrecy:
docs/explanation/secrecy-of-a-selection.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jax

from accounting import TrialCount
from dpsgd.files import destroy, make_folder, write_atomically
from dpsgd.runs.attempts import STOP
from dpsgd.runs.directory import SECRETS, RunDirectory
from dpsgd.runs.history import NO_HEAD, History, line_of, price_of
from dpsgd.runs.plan import check_data
from dpsgd.runs.result import FinishedRun
from dpsgd.runs.run import resume, run
from dpsgd.runs.spec import RunSpec
from dpsgd.runs.stop import Stopped, stop_requests
from dpsgd.runs.task import Task
from dpsgd.runs.terms import Selection, Terms, is_trial_of
from dpsgd.selection.candidates import Candidates, spec_of_trial
from dpsgd.selection.release import NOTHING, ended, release, release_nothing
from dpsgd.selection.vault import TRIALS, Vault, VaultSecret

DEFAULT_COUNT = TrialCount(mean=10.0, shape=0.0)
"""Default law of the number of trials: logarithmic with mean 10."""

SECRET_FILE = "selection.key"

_STATUS = ("RESOURCE_EXHAUSTED", "INTERNAL", "INVALID_ARGUMENT", "UNIMPLEMENTED")
"""Status codes of XLA that an error may name: they reveal nothing about rows."""


def select(
    task: Task,
    candidates: Sequence[RunSpec],
    out: str | os.PathLike[str],
    *,
    score: str,
    better: Literal["higher", "lower"],
    count: TrialCount = DEFAULT_COUNT,
    name: str | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Trains a random number of candidates and releases the best.

    The guarantee covers the whole selection. With `target_epsilon`, equal in all candidates, the
    noise is chosen for the whole selection to meet it; with `noise_multiplier` each candidate has
    its own noise. The same call resumes a stopped selection.

    Args:
      task: Task to train.
      candidates: Possible runs of a trial, each equally likely.
      out: Folder to create, or of a selection to resume. In the end it is a run directory of the
        best model.
      score: Metric of the task that chooses the best trial; its rows are not protected.
      better: Direction of the better score.
      count: Law of the number of trials.
      name: Name of the task, as for `dpsgd.run`.
      progress: Function of one line of text. The lines never tell the number of trials, the current
        one, or their scores.

    Returns:
      Content of `report.json`, as from `dpsgd.run`; durations are None.

    Raises:
      FileExistsError: If `out` holds something else; it stays unchanged.
      ValueError: For candidates that a selection cannot use, or that differ from those begun in
        `out`; after a program error in a trial, such as a lack of device memory (the same call then
        resumes with a mended task); or if every trial failed, so that nothing is released.
      OSError: If the disk is full; the same call then resumes.
      Stopped: If SIGTERM or SIGINT asked for it; the same call then resumes.
    """
    out = Path(out)
    folder = RunDirectory(out)
    exists = folder.ledger_path.is_file() and folder.history().selection is not None
    if not exists:
        RunDirectory.refuse_existing(out)
    progress("checking the data")
    request = Candidates(task, name, tuple(candidates), score, better, count)
    check_data(request.task)
    if not exists:
        _begin(request, folder, progress)
    if ended(folder):
        _declared(request, folder, None)
    else:
        if not (out / SECRETS).is_dir():
            raise ValueError(
                f"{out} holds a selection whose secrets are missing, so that it cannot resume; "
                "its privacy cost remains: choose another folder"
            )
        secret = VaultSecret.load(out / SECRETS / SECRET_FILE, folder.history().name)
        selection = _declared(request, folder, secret)
        if exists:
            request.rehearse(selection, progress)
        with stop_requests() as stop, _nameless_errors(folder):
            _carry_out(request, selection, folder, secret, stop, progress)
    destroy(out / SECRETS)
    if (out / NOTHING).exists():
        raise ValueError(
            f"{out}: every trial failed or diverged, and nothing is released; the privacy cost "
            "remains. Start a new selection with other candidates"
        )
    return FinishedRun.read(out).record


def _begin(wanted: Candidates, folder: RunDirectory, progress: Callable[[str], None]) -> None:
    """Declares a selection in a new folder, after all possible refusals."""
    progress("compiling the candidates")
    wanted.check_programs()
    progress("finding the noise for the target epsilon")
    secret = VaultSecret.generate()
    selection = wanted.planned(wanted.request(secret))
    wanted.rehearse(selection, progress)
    with RunDirectory.create(folder.path) as directory:
        body = {"selection": selection.record(), **price_of(selection)}
        content, head = line_of(body, NO_HEAD)
        make_folder(directory.path / SECRETS, 0o700)
        secret.save(directory.path / SECRETS / SECRET_FILE, head)
        write_atomically(directory.ledger_path, lambda file: file.write(content))


def _declared(wanted: Candidates, folder: RunDirectory, secret: VaultSecret | None) -> Selection:
    """Returns the selection begun in a folder, which must equal the request.

    An unfinished selection has its secret.
    """
    history, path = folder.history(), folder.path
    selection = history.selection
    assert selection is not None
    ours, theirs = wanted.request(secret), dict(selection.request)
    if secret is None:  # destroyed, so that blinded digests cannot be compared
        theirs["data"] = folder.data() if folder.finished else wanted.data
    changed = [key for key, value in ours.items() if theirs.get(key) != value]
    changed += ["score"] * ((selection.score, selection.better) != (wanted.score, wanted.better))
    changed += ["law of the number of trials"] * (selection.count != wanted.count)
    if changed:
        raise ValueError(
            f"{path} holds a selection with another {', '.join(changed)}, which stays unchanged: "
            "choose another folder"
        )
    return selection


def _carry_out(
    wanted: Candidates,
    selection: Selection,
    folder: RunDirectory,
    secret: VaultSecret,
    stop: Callable[[], bool],
    progress: Callable[[str], None],
) -> None:
    """Runs all trials, and releases the best."""
    progress("running trials; their number and duration are secret")
    law, better = selection.count, selection.better
    with contextlib.closing(Vault(folder.path / SECRETS, secret, law, better)) as vault:

        def candidate(trial: int) -> int:
            return vault.candidate(trial, len(selection.candidates))

        vault.clear()
        with _silence():  # also between trials: gaps in the output could be counted
            while vault.done < vault.count:
                if stop():
                    raise Stopped
                trial = vault.done + 1
                vault.finish(_score(wanted, selection, candidate(trial), vault.folder(trial)))
        best = vault.best
        assert best is not None, "there is at least one trial"
        progress("releasing the best")
        if best.score is None:
            release_nothing(folder)
        else:
            terms = selection.candidates[candidate(best.number)]
            release(wanted, terms, vault.folder(best.number), folder, secret)


class _ProgramError(Exception):
    """Error of a trial that depends on the program; the text names its kind alone."""


def _score(wanted: Candidates, selection: Selection, number: int, path: Path) -> float | None:
    """Runs a trial of a candidate, and returns its score; None for a failed trial.

    A cleanly stopped trial resumes; a killed trial begins again with fresh randomness.

    A trained model depends on private rows, and so does the success of computing with it: a trial
    fails by an arithmetic error, or by a ValueError after training. All other errors are the
    program's, independent of the rows (docs/explanation/secrecy-of-a-selection.md).
    """
    terms = selection.candidates[number]
    while True:
        try:
            if path.exists() and not _goes_on(path):
                _discard(path)
            if path.exists():
                record = resume(path, wanted.task)
            else:
                record = run(wanted.task, spec_of_trial(selection, number), path, name=wanted.name)
            history = RunDirectory(path).history()
        except (Stopped, OSError, MemoryError):
            raise
        except Exception as error:
            # The error's text may reveal data, and is not passed on.
            trained = isinstance(error, ValueError) and _has_released(path)
            if isinstance(error, ArithmeticError) or trained:
                return None
            status, code = type(error).__name__, str(error).partition(":")[0]
            named = isinstance(error, jax.errors.JaxRuntimeError) and code in _STATUS
            raise _ProgramError(f"{status} ({code})" if named else status) from None
        if _as_declared(history, terms):
            return record["metrics"].get(wanted.score)
        _discard(path)


def _has_released(path: Path) -> bool:
    """Returns True if a trial's ledger records a model; errors of its files name the trial."""
    try:
        return path.exists() and bool(RunDirectory(path).history().released)
    except ValueError:
        return False


def _discard(path: Path) -> None:
    """Destroys a trial under another name, so that no part of it is resumed."""
    destroy(path.rename(path.with_name(f"{path.name}.gone")))


def _goes_on(path: Path) -> bool:
    """Returns True if a trial in one attempt is finished or cleanly stopped."""
    folder = RunDirectory(path)
    if folder.finished:
        return _is_unbroken(folder.history())
    if not (path / STOP).exists():
        return False
    history = folder.history()
    sampler = history.attempts[0].terms.mechanism.sampler
    return len(history.attempts) == 1 and folder.stop_file.read(sampler) is not None


def _as_declared(history: History, terms: Terms) -> bool:
    """Returns True if a finished trial released exactly what its candidate declares."""
    if not is_trial_of(terms, history.attempts[0].terms):
        declared, trained = terms.record(), history.attempts[0].terms.record()
        names = [name for name in declared if declared[name] != trained.get(name)]
        raise AssertionError(f"a trial was trained otherwise than declared: {', '.join(names)}")
    return _is_unbroken(history)


def _is_unbroken(history: History) -> bool:
    """Returns True if a finished run took each step once."""
    (first, *later_attempts) = history.attempts
    return not later_attempts and first.steps == range(first.terms.mechanism.num_steps)


@contextmanager
def _silence() -> Iterator[None]:
    """Hides everything that trials print, warn of or log, as lines could be counted.

    The output of compiled code and other processes to the descriptors is hidden, too.
    """
    disabled_level, streams = logging.root.manager.disable, (sys.stdout, sys.stderr)
    saved_descriptors: dict[int, int] = {}
    logging.disable(logging.CRITICAL)
    try:
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            _flush(*streams)
            for descriptor in (1, 2):
                with contextlib.suppress(OSError):  # it is closed
                    saved_descriptors[descriptor] = os.dup(descriptor)
                    os.dup2(nowhere.fileno(), descriptor)
            yield
    finally:
        _flush(*streams, sys.__stdout__, sys.__stderr__)  # discards buffered output
        for descriptor, saved in saved_descriptors.items():
            os.dup2(saved, descriptor)
            os.close(saved)
        logging.disable(disabled_level)


def _flush(*streams: Any) -> None:
    for stream in streams:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or closed
            stream.flush()


@contextmanager
def _nameless_errors(folder: RunDirectory) -> Iterator[None]:
    """Removes traces of the current trial from errors and stops."""
    out = folder.path
    try:
        yield
    except Stopped:
        raise Stopped("stopped, and all is saved: repeat the command to resume") from None
    except _ProgramError as error:
        raise ValueError(
            f"{out}: a trial ended in {error}, an error that does not depend on the rows; "
            "nothing is released: fix the task or add memory, then repeat the command to resume. "
            f"The privacy cost remains: {folder.history().guarantee().sentence()}"
        ) from None
    except ValueError as error:
        if str(out / SECRETS / TRIALS) not in str(error):
            raise
        raise ValueError(
            f"{out}: a file of a trial is damaged, and nothing is released: start a new selection "
            f"elsewhere. The privacy cost remains: {folder.history().guarantee().sentence()}"
        ) from None
    except MemoryError:
        raise MemoryError("out of memory: repeat the command to resume") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else "a file could not be written"
        raise OSError(f"{out}: {reason}; nothing is lost: repeat the command to resume") from None
