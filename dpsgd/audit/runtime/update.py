"""The update of the parameters, which sees the release of its step and nothing else of the batch.

What a step tells is its release, the private mean gradient g; the optimizer makes of it what it
likes. So the state after a step must be a function of g and of the state before. It is compared,

* with what the optimizer, compiled by itself, makes of the g that the same step shows: in the
  first step of the run and the second, in the last, and where a full block ends. Compilers order
  and fuse arithmetic as they like, so numbers agree up to rounding: in every coordinate, to a small
  part of how far it moved and how far the coordinates of its array do on average. Noise that is
  missing from one coordinate, or from one moment, is far more;
* to the bit, with that after another batch of the very same release: under noise that exceeds C so
  far that it swallows the sum. Where bits do not repeat, this is not compared;
* to the bit, from device to device. What a device computes with is its own copy, and all that is
  read of a state that lies on many is one of them: a device without noise would not show.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpsgd.audit.probe import Probe
from dpsgd.audit.report import CheckResult
from dpsgd.audit.runtime.sums import flat, loud, norm, same_bits
from dpsgd.core.state import dense_numbers
from dpsgd.engine.loop import repeats_exactly
from dpsgd.engine.programs import compiled
from dpsgd.gradients.frozen import with_leaves

PyTree = Any

_NAME = "the update sees the release alone"
_SAME = "batches of one release leave one state"
_COPIES = "every device has the same state"
_FROZEN = "what no derivative of the loss reaches stays as it is"
_PART = 2.0**-12  # of a movement, which rounding may change
_LARGE = 2**22  # coordinates of a model of which fewer steps are looked at
_PASS = 2**18  # coordinates that are looked at together


def update_checks(program: Probe) -> list[CheckResult]:
    """Checks that the state after a step is made of its release, and of the state before."""
    checks = [_made_of_the_release(program), _same_of_the_same(program)]
    if program.frozen:
        checks.append(_left_alone(program))
    placement = program.layout.placement
    if placement is not None and len(placement.devices) > 1:
        checks.append(_same_on_every_device(program, len(placement.devices)))
    return checks


def _same_on_every_device(program: Probe, devices: int) -> CheckResult:
    members = np.arange(program.places) % program.units
    if (path := program.differing(members)) is not None:
        return CheckResult(_COPIES, False, f"state{path} after a step differs from one to another")
    return CheckResult(_COPIES, True, f"{devices} devices, after a full batch")


def _left_alone(program: Probe) -> CheckResult:
    """Checks, to the bit, leaves that get no noise: nothing of a batch may be in them."""
    members = np.arange(program.places) % program.units
    for step in looked_at(program):
        gradient, after = (
            program.advanced(members, reveals=reveals, step=step).raw_params
            for reveals in (True, False)
        )
        for k in sorted(program.frozen):
            found, new, old = (
                jax.tree.leaves(tree)[k] for tree in (gradient, after, program.state.params)
            )
            if np.any(flat(found)) or not same_bits(new, old):
                return CheckResult(
                    _FROZEN, False, f"leaf {k} of the parameters moves in step {step:,}"
                )
    return CheckResult(_FROZEN, True, f"{len(program.frozen)} leaves, after a full batch")


def _made_of_the_release(program: Probe) -> CheckResult:
    optimizer = getattr(program.algorithm.update, "optimizer", None)
    if not callable(getattr(optimizer, "update", None)):
        why = "the algorithm's update names no optimizer to compare it with"
        return CheckResult(_NAME, True, why, made=False)
    members = np.arange(program.places) % program.units
    for step in looked_at(program):
        if (off := _differs(program, optimizer, members, step)) is not None:
            why = f"state{off} after step {step:,} is not what the optimizer makes of the release"
            return CheckResult(_NAME, False, why)
    return CheckResult(_NAME, True, "parameters and optimizer state, after a full batch")


def looked_at(program: Probe) -> list[int]:
    """Returns the steps whose update is looked at; of a large model the first and the last."""
    first, last = program.first_step, program.mechanism.sampler.num_steps - 1
    some = [first, last]
    if sum(program.sizes) <= _LARGE:
        some += [min(last, first + 1), min(last, first + program.layout.block_steps - 1)]
    return sorted(set(some))


def _differs(program: Probe, optimizer: Any, members: np.ndarray, step: int) -> str | None:
    """Returns the path of what a step leaves that is not made of its release, if there is any."""
    gradient = program.dense(program.advanced(members, reveals=True, step=step)).params
    before = program.dense(program.state)._replace(step=np.int32(step))
    start = jax.tree.map(jnp.array, (before.opt_state, before.params))
    arguments = gradient, *start
    run = compiled(_updated, (optimizer,), arguments, donate_argnums=(1, 2))
    params, opt_state = run(*arguments)
    params = with_leaves(params, before.params, dense_numbers(program.frozen, program.tables))
    del gradient, start, arguments
    expected = before._replace(step=before.step + 1, raw_params=params, opt_state=opt_state)
    after = program.dense(program.advanced(members, reveals=False, step=step))._replace(noise=())
    return _off(after, expected, before)


def _updated(optimizer, gradient, opt_state, params):
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def _same_of_the_same(program: Probe) -> CheckResult:
    if not repeats_exactly():
        return CheckResult(_SAME, True, "equal steps differ in their last bits", made=False)
    noisy, full = loud(program.mechanism), np.arange(program.places) % program.units
    # Of tables, batches that read the same rows.
    batches = ([0], 0 * full) if program.tables else ((), full)
    few = "a batch of one" if program.tables else "an empty"

    def same(*, reveals: bool) -> bool:
        states = [program.advanced(who, noisy, reveals=reveals) for who in batches]
        seen = [state.raw_params if reveals else state for state in states]
        return all(map(same_bits, *map(jax.tree.leaves, seen)))

    if same(reveals=False):
        return CheckResult(_SAME, True, f"{few} and a full batch of one release agree")
    if same(reveals=True):
        return CheckResult(_SAME, False, f"{few} and a full batch of one release differ")
    return CheckResult(_SAME, True, "no noise is large enough to make two releases one", made=False)


def _off(found: PyTree, expected: PyTree, before: PyTree) -> str | None:
    """Returns the path of the first array that is not the expected one up to rounding."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(found)]
    for path, *arrays in zip(paths, *map(jax.tree.leaves, (found, expected, before)), strict=True):
        x, y, old = map(flat, arrays)
        if not (close(x, y, old) if jnp.issubdtype(x.dtype, jnp.floating) else same_bits(x, y)):
            return path
    return None


def close(x: np.ndarray, y: np.ndarray, old: np.ndarray) -> bool:
    """Whether x and y, both of which were `old`, are one up to rounding."""
    unit = float(jnp.finfo(x.dtype).eps)
    part = max(_PART, 8 * unit)
    scale = norm((1, [y]), (-1, [old])) / math.sqrt(max(1, x.size))
    scale = scale if math.isfinite(scale) else 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, x.size, _PASS):
            a, b, c = (each[start : start + _PASS].astype(np.float64) for each in (x, y, old))
            allowed = part * (np.abs(b - c) + scale) + 4 * unit * (np.abs(b) + np.abs(c))
            if not np.all((np.abs(a - b) <= allowed) | (a == b) | (np.isnan(a) & np.isnan(b))):
                return False
    return True
