"""Kills training runs, goes on with them, and holds what is left against an undisturbed run.

    python crash_driver.py TASK FOLDER SAMPLER SEED [NAME ...]

With a SEED, which is insecure, the bits must be those of the undisturbed run; with "secret", what
was drawn must have been declared before, and no process may share noise or draw a step twice by
one seed.

TASK is what `config.json` says of a task: {"name": "module:object"}, and "settings" of a class.

Every run is a forked process that is ended by SIGKILL, at the crash points of those names or at
all. The imports are done once, before JAX starts any thread. A crash point is a file operation (its
name and the file's, and which time it comes): between two, nothing that is left changes. The
process dies just before it, or half way through it where it is the write of a ledger's line.
SIGKILL leaves the system's caches alone, so what is tested is the order of the operations; that
each is waited for by fsync is tested where it is done. Neither the clock nor what was drawn decides
which operations a run makes, so that each comes again in the run that it ends.

Prints one line a crash, and ends with status 1 at the first difference.
"""

import functools
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from dpsgd.core.queries import FullSums
from dpsgd.engine import calibration as calibrations
from dpsgd.runs import job, journal, run
from dpsgd.runs.attempts import STOP
from dpsgd.runs.directory import CALIBRATION, DIAGNOSTICS, RunDirectory
from dpsgd.runs.result import code_digest
from dpsgd.runs.spec import RunSpec
from dpsgd.runs.task import load
from samplers.settings import SETTINGS

SIZES = {"batch_size": 32, "epochs": 2}
PLAIN = ("deterministic", "shuffle", "poisson", "balls-and-bins")
SAMPLERS = {name: SETTINGS[name](**SIZES) for name in PLAIN} | {  # and in several passes
    f"{name}-accumulate": SETTINGS[name](80, epochs=2, max_batch_size=50, overflow="accumulate")
    for name in ("poisson", "balls-and-bins")
}
SAMPLERS["balls-and-bins-bands"] = SETTINGS["balls-and-bins"](**SIZES)  # and of correlated noise
SAMPLERS["balls-and-bins-lazy"] = SETTINGS["balls-and-bins"](**SIZES)  # and of lazy tables
OPERATIONS = ("write", "fsync", "replace", "rename", "unlink", "rmdir", "ftruncate")


def go_on(task, out, sampler, seed):
    """What a user does: resume if there is a run, else train."""
    told = out.with_suffix(".drawn")
    job.train_blocks = telling(job.train_blocks, lambda line: append_line(told, line))
    # Whoever begins compiles apart from whoever goes on, as a user's processes do: the same bits
    # must come of another compilation. Within either, the first process compiles for all.
    programs = out.parent / ("programs-of-resumed" if out.exists() else "programs-of-begun")
    jax.config.update("jax_compilation_cache_dir", str(programs))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if out.exists():
        run.resume(out)
        return
    config = RunSpec.of(
        SAMPLERS[sampler],
        noise_multiplier=1.0,
        optimizer="sgd" if sampler.endswith("bands") else "adam",
        bands=3 if sampler.endswith("bands") else None,
        tables="lazy" if sampler.endswith("lazy") else "dense",
        flush_every=6 if sampler.endswith("lazy") else None,
        checkpoint_seconds=0.0,
        insecure_seed=None if seed == "secret" else int(seed),
        audit=False,
    )
    record = json.loads(task)
    trained = load({"settings": {}, **record}, "TASK")
    run.run(trained, config, out, name=record["name"])


def append_line(path, line):
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


def telling(train_blocks, tell):
    """Blocks of training whose draws are told: by which noise key and seeds, and which steps."""

    def told(algorithm, mechanism, state, data, *, keys, declare, **how):
        sampler, seeds = mechanism.sampler, keys.sampling

        def declared(steps):
            assert not (declare.__self__._folder.path / STOP).exists(), "a seed is on the disk"
            declare(steps)
            drawn = [sampler.drawn_epoch(step // sampler.steps_per_epoch) for step in steps]
            by = [f"{seeds(epoch) if callable(seeds) else seeds:x}" for epoch in drawn]
            history = declare.__self__.ledger.history
            line = {"attempt": len(history.attempts) - 1, "noise": keys.noise.tolist()}
            line["process"] = os.getpid()
            tell({**line, "steps": [steps.start, steps.stop], "seeds": by})

        return train_blocks(algorithm, mechanism, state, data, keys=keys, declare=declared, **how)

    return told


def fork(work):
    """Runs `work` in a forked process; returns its status, or minus the signal that ended it."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:  # a forked process must not return into the parent's code
            print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def watch_operations(run, before):
    """Has `before(name, call, arguments)` called ahead of each file operation of the run `run`."""
    times = Counter()

    def watched(operation, call):
        def watching(*arguments, **options):
            target = arguments[0]
            if isinstance(target, int):
                target = os.readlink(f"/proc/self/fd/{target}")
            target = "run" if Path(target) == run else Path(target).name
            name = f"{operation} {target}"
            if "unfinished-" in name:  # the folder of a new run, whose name is random
                name = f"{operation} new run"
            times[name] += 1
            before(f"{name} {times[name]}", call, arguments)
            return call(*arguments, **options)

        return watching

    for operation in OPERATIONS:
        setattr(os, operation, watched(operation, getattr(os, operation)))


def crash_points(task, out, sampler, seed):
    """Trains undisturbed; returns the names of all file operations, in order."""
    names = out.with_suffix(".operations")

    def work():
        with open(names, "w") as file:
            watch_operations(out, lambda name, *call: print(name, file=file, flush=True))
            go_on(task, out, sampler, seed)

    assert fork(work) == 0
    return names.read_text().splitlines()


def die_at(run, point):
    def before(name, call, arguments):
        if name == point:
            if name.startswith("write ledger"):
                call(arguments[0], arguments[1][: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    watch_operations(run, before)


def assert_same(out, reference, what):
    """Model, ledger and diagnostics are those of the undisturbed run, to the bit."""
    for name in ("params.npz", "ledger.jsonl", "guarantee.json", CALIBRATION, DIAGNOSTICS):
        calibrated = (reference / CALIBRATION).exists() or name != CALIBRATION
        if calibrated and (out / name).read_bytes() != (reference / name).read_bytes():
            sys.exit(f"{what}: {name} is not that of the undisturbed run")
    left = {path.name for path in out.iterdir()}
    expected = {path.name for path in reference.iterdir()}
    stray = {path for path in out.parent.glob(f".{out.name}*") if "unfinished" not in path.name}
    if left != expected or stray:
        sys.exit(f"{what}: {left ^ expected | stray} should not be there, or should")


def assert_sound(out, reference, what):
    """What two processes drew was declared, by keys and seeds that they do not share."""
    history = RunDirectory.open(out).history()
    lines = [json.loads(line) for line in out.with_suffix(".drawn").read_text().splitlines()]
    counted = {(attempt.index, step) for attempt in history.attempts for step in attempt.steps}
    taken = [(line["attempt"], step) for line in lines for step in range(*line["steps"])]
    seeds = [
        pair for line in lines for pair in zip(line["seeds"], range(*line["steps"]), strict=True)
    ]
    if not {*taken} <= counted:
        sys.exit(f"{what}: steps were taken that are not declared")
    if len({*taken}) < len(taken) or len({*seeds}) < len(seeds):
        sys.exit(f"{what}: steps were drawn twice")
    last = history.attempts[-1]
    mechanism = last.terms.mechanism
    ends = last.steps.stop, max(taken)[1] + 1  # full sums are declared after the last drawn step
    if len(history.attempts) > 2 or ends != (mechanism.num_steps, mechanism.sampler.num_steps):
        sys.exit(f"{what}: {history.attempts}")
    if {path.name for path in out.iterdir()} != {path.name for path in reference.iterdir()}:
        sys.exit(f"{what}: other files are left than of an undisturbed run")
    noise = {(tuple(line["noise"]), line["process"]) for line in lines}
    if len({key for key, _ in noise}) < len({process for _, process in noise}):
        sys.exit(f"{what}: two processes have one noise")


def at_points(task, folder, sampler, seed, chosen):
    reference = folder / "reference"
    points = crash_points(task, reference, sampler, seed)
    check = assert_sound if seed == "secret" else assert_same
    for number, point in enumerate(chosen or points):
        if point not in points:
            sys.exit(f"no operation is called {point!r}; there are {points}")
        out = folder / f"crash-{number}"

        def work(out=out, point=point):
            die_at(out, point)
            go_on(task, out, sampler, seed)

        status = fork(work)
        if status != -signal.SIGKILL:
            sys.exit(f"{point}: not killed but {status}")
        status = fork(lambda out=out: go_on(task, out, sampler, seed))
        if status:
            sys.exit(f"{point}: going on failed with {status}")
        check(out, reference, point)
        print(f"{point}: held", flush=True)


if __name__ == "__main__":  # whoever collects tests imports this too, and is to keep what it has
    # Blocks so short that the run has several, and a checkpoint after each. Of several passes they
    # are steps: a longer block ends where the drawn passes fill it.
    task, folder, (sampler, seed, *points) = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    job.BLOCK_STEPS = {"lazy": 2, "accumulate": 1}.get(sampler.rpartition("-")[2], 4)
    # No rows of the log while it trains: they are written as time passes.
    journal.TrainingLog = functools.partial(journal.TrainingLog, clock=lambda: 0.0)
    # A task that offers a calibration has one, on however few rows.
    calibrations.calibration_sums = lambda kind, num_examples, **about: FullSums(3, 4.0)
    folder.mkdir(parents=True, exist_ok=True)
    code_digest()  # of what is imported now: whoever edits a file meanwhile changes no run
    at_points(task, folder, sampler, seed, points)
