"""`dpsgd plan`: what to choose before a run: how its noise is correlated, and its devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from dpsgd.runs.spec import SGD, TargetAdvantage, TargetEpsilon
from dpsgd.sizes import bytes_of
from experiments.cli import devices_plan, outputs
from experiments.cli.config import OfSizes
from experiments.cli.console import Console, sized
from experiments.cli.options import command as command_of
from experiments.cli.options import naming, run_options

if TYPE_CHECKING:
    from dpsgd.noise.planning import Candidate
    from samplers import BatchSampler

TOPICS = ("noise", "devices")
"""What can be planned."""

_NEAR = 1.02
"""Up to so many times the least error, noise that keeps less is named beside the best."""

_NEARLY, _TENTH = 1.1, 0.1
"""Likewise, up to the first, noise that keeps at most so much of what the best does."""


@dataclass(frozen=True, kw_only=True)
class PlanNoise(OfSizes):
    """Print over how many steps b a run's noise should be correlated, and what that gains.

    In a fixed order also buffered noise (BLT), over all steps, which keeps few vectors. Each meets
    the target. The error is what noise leaves in the iterates of the optimizer: the root of its
    mean square, relative to independent noise (b = 1), at the same distance moved. It is no metric
    of a model: less of it can be worth much or little.

    `dpsgd plan devices --help` is about what a run needs of several devices.
    """

    what: tyro.conf.Positional[Literal["noise"]] = tyro.MISSING
    """What is planned: noise, or devices."""
    bands: tuple[int, ...] = ()
    """Which b to try, besides 1; by default powers of two up to what is possible, or 1,024."""
    buffers: tuple[int, ...] | None = None
    """How many buffers to try, in a fixed order; by default up to 5."""
    bands_memory: str | None = None
    """Most memory for kept noise vectors, such as 8GB or 512MiB; needs --num-params."""
    num_params: int | None = None
    """Parameters of the model."""
    plot: Path | None = None
    """Figure of error and noise multiplier over b to write, .png, .pdf or .svg."""
    overwrite: bool = False
    """Replace a figure that is there under that name."""


def command(words: Sequence[str]) -> type:
    """Returns what can be asked about what words name first."""
    if words[:1] == ["devices"]:
        return devices_plan.command(words)
    if not words or (words[0] != "noise" and not words[0].startswith("-")):
        raise ValueError(f"plan: name what is planned first, {' or '.join(TOPICS)}")
    names = "target_epsilon", "target_advantage", "target_delta", "momentum", "schedule"
    return command_of(PlanNoise, words, options=run_options(*names, optimizer=MISSING))


def run(asked: PlanNoise | devices_plan.PlanDevices) -> None:
    """Runs `dpsgd plan`."""
    if isinstance(asked, devices_plan.PlanDevices):
        return devices_plan.run(asked)
    return _plan_noise(asked)


def _plan_noise(config: PlanNoise) -> None:
    if getattr(config.sampler, "cycle_length", 1) != 1:
        raise ValueError("--cycle-length is what is planned: leave it out, or give --bands")
    if config.num_params is not None and config.num_params < 1:
        raise ValueError(f"--num-params must be at least 1, got {config.num_params}")
    if config.bands_memory is not None and config.num_params is None:
        raise ValueError("--bands-memory needs --num-params: a noise vector has so many numbers")
    memory = (
        None if config.bands_memory is None else bytes_of(config.bands_memory, "--bands-memory")
    )
    if config.plot is not None:
        outputs.check(config.plot, outputs.PICTURES, "--plot", overwrite=config.overwrite)
    spec, population = (
        config.spec(bands=None, buffers=None, bands_memory="2GiB"),
        config.population(),
    )
    momentum = spec.optimizer.momentum if isinstance(spec.optimizer, SGD) else None
    from dpsgd.runs.resolve import build_sampler

    with naming(config):
        sampler, delta = build_sampler(spec, population), spec.delta_of(population)
    from accounting import Bound, format_delta
    from dpsgd.core.guarantee import ADJACENCY
    from dpsgd.noise import planning
    from dpsgd.runs.resolve import ADAM

    of_sampler = planning.most_bands(sampler)
    most = planning.most_bands(sampler, memory=memory, num_params=config.num_params)
    limit = (
        _limit(sampler, of_sampler)
        if most == of_sampler
        else f"{config.bands_memory} holds no more"
    )
    for b in config.bands:
        if b < 1:
            raise ValueError(f"--bands must be at least 1, got {b}")
        if b > most:
            raise ValueError(f"--bands must be at most {most} here, got {b}: {limit}")
    if momentum is None and any(b > 1 for b in config.bands):
        raise ValueError("--bands is of no use with --optimizer adam, whose best b is 1: leave out")
    tried = sorted({1, *(config.bands or planning.tried_bands(most))})
    buffers = planning.tried_buffers(sampler, memory=memory, num_params=config.num_params)
    if config.buffers is not None:
        _check_buffers(config, sampler, momentum, max(buffers, default=0))
        buffers = sorted(set(config.buffers))
    if config.plot is not None and (momentum is None or (tried == [1] and not buffers)):
        raise ValueError("--plot draws several b, and here is b = 1 alone: leave it out")
    with Console() as console:
        epsilon, advantage = (getattr(spec.privacy, of, None) for of in ("epsilon", "advantage"))
        goal = planning.Goal(epsilon, delta, advantage, momentum, spec.optimizer.step_sizes)
        found = planning.plan(sampler, goal, tried, buffers=buffers, progress=console.progress)
        unit = sampler.protected_unit(population)
        if isinstance(spec.privacy, TargetAdvantage):
            target = f"attack advantage <= {spec.privacy.advantage}"
        else:
            assert isinstance(spec.privacy, TargetEpsilon), "no other goal can be asked for"
            target = f"epsilon <= {spec.privacy.epsilon} at delta {format_delta(delta)}"
        console.line(f"each with {target} ({ADJACENCY} adjacency, unit: one {unit}):")
        rows = [
            [
                c.name,
                # Rounded up: the printed number suffices as it stands.
                Bound(c.noise_multiplier, c.noise_multiplier).format_upper(".6g"),
                f"{c.error:.4f}",
                f"{c.sampler.num_steps:,}",
                _memory(c.noise.kept, config.num_params),
            ]
            for c in found
        ]
        console.table(["b", "sigma", "error", "steps", "memory"], rows)
        if any(c.buffered for c in found):
            console.line("BLT m: noise of m buffers, correlated over all steps, for a fixed order.")
        best = min(found, key=lambda c: c.error)
        if momentum is None:
            console.line(f"b = 1 is best, independent noise: {ADAM}.")
            return
        console.line(_verdict(found, best, most))
        if most < of_sampler or most == 1:
            console.line(f"b is at most {most:,}: {limit}.")
        if best.bands > 1:
            for line in _usage(best, momentum, spec.optimizer.step_sizes):
                console.line(line)
        if config.plot is not None:
            from experiments.figures.drawing import save
            from experiments.figures.noise import NoiseCurve, draw
            from samplers.settings import name_of

            steps = f"SGD with momentum {momentum:g}" if momentum else "SGD"
            target = target.replace("<=", "≤").replace("epsilon", "ε").replace("at delta", ", δ =")
            title = f"{type(sampler).__name__}, {steps}, {target}"
            runs = [[c for c in found if bool(c.buffered) == kind] for kind in (False, True)]
            curve = NoiseCurve(name_of(type(sampler)), *map(tuple, runs))
            save(draw([curve], title, best), config.plot)
            console.line(f"drawn: {config.plot}")


def _limit(sampler: BatchSampler, most: int) -> str:
    if most > 1 or sampler.steps_per_epoch == 1:
        return f"so many steps an epoch has ({most:,}), and an example may come once in b"
    return (
        f"{type(sampler).__name__} keeps no two steps of an example apart, as correlated noise "
        "asks for; balls-and-bins, poisson and deterministic can"
    )


def _check_buffers(
    config: PlanNoise, sampler: BatchSampler, momentum: float | None, most: int
) -> None:
    """Raises ValueError for --buffers that cannot be, `most` being tried by default."""
    if momentum is None:
        raise ValueError("--buffers is of no use with --optimizer adam, whose best b is 1")
    if sampler.period is None:
        raise ValueError(
            f"--buffers needs a fixed order, in which an example comes back after an epoch: "
            f"{type(sampler).__name__} draws; deterministic and shuffle with --order fixed do not"
        )
    for m in config.buffers or ():
        if m < 1:
            raise ValueError(f"--buffers must be at least 1, got {m}")
        if config.bands_memory is not None and m > most < 5:
            raise ValueError(
                f"--buffers must be at most {most} here, got {m}: {config.bands_memory} holds no "
                "more"
            )


def _memory(kept: int, num_params: int | None) -> str:
    from dpsgd.noise.planning import history_bytes

    if num_params is None:
        return f"{kept:,} x parameters"
    return sized(history_bytes(kept, num_params))


def _named(candidate: Candidate) -> str:
    kept = candidate.noise.kept
    if candidate.buffered:
        return f"BLT of {kept} buffer{'s' if kept > 1 else ''}"
    return f"b = {candidate.name}"


def _verdict(found: list[Candidate], best: Candidate, most: int) -> str:
    if best.bands > 1:
        near = min(
            (
                c
                for c in found
                if c.error <= _NEAR * best.error
                or (c.error <= _NEARLY * best.error and c.noise.kept <= _TENTH * best.noise.kept)
            ),
            key=lambda c: c.noise.kept,
        )
        hint = ""
        if near.noise.kept < best.noise.kept:
            hint = f"; {_named(near)} leaves {near.error:.3g}, and keeps {near.noise.kept:,} vector"
            hint += f"{'s' if near.noise.kept > 1 else ''} in place of {best.noise.kept:,}"
        elif best.bands == max(c.bands for c in found) < most:
            hint = "; a larger b, which --bands tries, may leave less"
        return (
            f"{_named(best)} is best: its noise leaves {best.error:.3g} of the error of "
            f"independent noise, at {best.noise_multiplier / found[0].noise_multiplier:.3g} times "
            f"the sigma{hint}."
        )
    if len(found) == 1:
        return "b = 1, independent noise, is all that was tried."
    least = min(found[1:], key=lambda c: c.error)
    return (
        f"b = 1 is best, independent noise: with b = {least.bands} sampling amplifies as with "
        f"{least.bands} times fewer steps, which asks for "
        f"{least.noise_multiplier / found[0].noise_multiplier:.3g} times the sigma, and that is "
        "more than correlation gains: so it is with few steps an epoch and a small epsilon."
    )


def _usage(best: Candidate, momentum: float, schedule: str) -> list[str]:
    """Returns the lines that make the mechanism in Python."""
    import dataclasses

    from accounting import Bound

    drawn = best.sampler
    settings = ", ".join(
        f"{field.name}={value!r}"
        for field in dataclasses.fields(drawn)  # type: ignore[arg-type]  # a frozen dataclass
        if (value := getattr(drawn, field.name)) != field.default
    )
    sigma = Bound(best.noise_multiplier, best.noise_multiplier).format_upper(".6g")
    what = f"buffers={best.noise.kept}" if best.buffered else f"{best.bands}"
    command = []
    if schedule == "cosine":
        beta = f" --momentum {momentum:g}" if momentum else ""
        how = f"--buffers {best.noise.kept}" if best.buffered else f"--bands {best.bands}"
        command = [f"With `dpsgd train`: --optimizer sgd{beta} {how}"]
    return [
        *command,
        "With dpsgd.train, whose optimizer is optax.sgd(step sizes, momentum):",
        "  import dpsgd, samplers, dpsgd.noise.planning",
        f"  sampler = samplers.{type(drawn).__name__}({settings})",
        f"  noise = dpsgd.noise.planning.best_noise(sampler, {what}, momentum={momentum!r}, "
        f"schedule={schedule!r})  # {type(best.noise).__name__}",
        f"  mechanism = dpsgd.Mechanism(sampler, {sigma}, l2_clip_norm, noise)",
    ]
