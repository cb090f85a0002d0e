"""Audits a run's compiled program on synthetic rows before training."""

from __future__ import annotations

import functools
import json
import math
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from dpsgd.audit.report import UNSEEN, AuditReport, CheckResult
from dpsgd.audit.runtime.differential import STEP
from dpsgd.audit.runtime.releases import LARGE
from dpsgd.core.mechanism import Mechanism
from dpsgd.engine.programs import Parts, compilation
from dpsgd.gradients.rules import RULES, ClippingRule
from dpsgd.runs.optimizer import optimizer
from dpsgd.runs.spec import OPTIMIZERS, Optimizer, RunSpec

PyTree = Any


def conformance(
    spec: RunSpec, params: PyTree, progress: Callable[[str], None] = lambda line: None
) -> AuditReport:
    """Returns the conformance checks of an optimizer and a clipping rule from other packages.

    The audit of a run covers all other parts, and the rule too unless the model is large: then it
    compares few examples, and here the rule clips many gradients of a small model that has the same
    leaves.

    Args:
      spec: Settings of the run.
      params: Parameters of the run: the rule groups their leaves.
      progress: Function of one line of text.
    """
    shapes = tuple((np.shape(leaf), np.result_type(leaf)) for leaf in jax.tree.leaves(params))
    structure, checks = jax.tree.structure(params), []
    rule = [(RULES, spec.clipping)] * (sum(math.prod(shape) for shape, _ in shapes) > LARGE)
    for registry, component in [(OPTIMIZERS, spec.optimizer), *rule]:
        if registry.is_own(component):
            name = f"the {registry.noun} {registry.name_of(type(component))}"
            progress(f"checking {name}")
            detail = _failure(Parts(component), shapes, structure)
            name = f"{name} passes its conformance check"
            checks.append(CheckResult(name, not detail, detail))
    return AuditReport(tuple(checks))


@functools.cache
def _failure(component: Parts, shapes: tuple[Any, ...], structure: Any) -> str:
    """Returns the first failed conformance check, or ""."""
    from dpsgd.audit.conformance import check_optimizer, check_rule  # imports scipy.stats

    part: Optimizer | ClippingRule
    (part,) = component.values
    try:
        if isinstance(part, Optimizer):
            check_optimizer(optimizer(part))
        else:
            small = [np.ones([min(n, 4) for n in shape], kind) for shape, kind in shapes]
            check_rule(part, jax.tree.unflatten(structure, small))
    except Exception as error:  # AssertionError, or what the user's class raises
        lines = str(error).splitlines() or [type(error).__name__]
        failed = next((line for line in lines if line.startswith("FAIL")), lines[0])
        return " ".join(failed.removeprefix("FAIL").split())
    return ""


ROWS = 64
"""Synthetic examples per audit; an example may be a block of rows."""

NOT_MADE = (
    "not made: that the compiled program and the draws are what is claimed was not tested in this "
    "run"
)
"""Verdict of a run whose configuration turns the audit off."""

_passed: dict[Hashable, AuditReport] = {}


def verdict(report: AuditReport, parts: list[str]) -> str:
    """Returns the verdict of an audit in one line.

    Args:
      report: Report of the audit.
      parts: Names of the audited parts, such as "the compiled program"; at least one.

    Raises:
      ValueError: if a check of the audit failed.
    """
    report.require_passed()
    num_checks = len(report.checks) - len(report.left_out)
    *first, last = parts
    line = f"{', '.join(first)} and {last}" if first else last
    keep = "keeps" if parts == ["the compiled program"] else "keep"
    line = f"passed: {line} {keep} what the guarantee assumes"
    line = f"{line}, by {num_checks} checks on generated rows"
    if not report.sampler_audited:
        line = f"SAMPLER NOT AUDITED; {line}"
    for why, names in report.reasons.items():
        remainder = f" and {len(names) - 2} more" if names[2:] else ""
        line += f". Not tested, as {why}: {', '.join(names[:2])}{remainder}"
    return f"{line}. {UNSEEN}"


def probe_rows(mechanism: Mechanism) -> int:
    """Returns the number of synthetic rows of an audit."""
    return ROWS * math.prod(mechanism.sampler.clipped_shape)


def once(
    make: Callable[[], AuditReport], state: PyTree, program: Any, key: tuple[Any, ...]
) -> AuditReport:
    """Returns an audit's report, cached for equal audits of one executable.

    Parameters and learning rates are values of `state`: inputs of the executable, which change in
    every step. An audit calls the executable with one state, and stands for all later steps; in the
    same way it stands for runs of equal `key` that begin with other values.

    A process caches a report if it passed and some example added to the sum of the audited step. A
    task that was changed in place is audited again once its program is compiled again.

    Args:
      make: Function that performs the audit.
      state: Pytree of arrays that the audit reads, compared by shapes and dtypes.
      program: Executable that trains; the cache does not keep it alive.
      key: Everything else that the audit depends on; without cache if its first entry is None.
    """
    if key[0] is None:
        return make()
    leaves, structure = jax.tree.flatten(state)
    shapes = structure, *map(jax.typeof, leaves)
    # Other settings of the compiler give another program.
    key = Parts(*key), weakref.ref(program), shapes, json.dumps(compilation())
    if (cached := _passed.get(key)) is not None:
        return cached
    report = make()
    if report.passed and not any(check.name.endswith(STEP) for check in report.left_out):
        if len(_passed) == 256:
            _passed.clear()
        _passed[key] = report
    return report
