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
from dpsgd.runs.spec import OPTIMIZERS, Optimizer
from samplers.registry import Registry

PyTree = Any


def conformance(part: Optimizer, progress: Callable[[str], None]) -> AuditReport:
    """Returns the conformance check of an optimizer from another package.

    The report is empty for built-in optimizers. The audit of a run covers all other parts.

    Args:
      part: Optimizer of a `RunSpec`.
      progress: Function of one line of text.
    """
    return _conformance(OPTIMIZERS, part, functools.partial(_optimizer_failure, part), progress)


def rule_conformance(
    rule: ClippingRule, params: PyTree, progress: Callable[[str], None]
) -> AuditReport:
    """Returns the conformance check of a large model's clipping rule from another package.

    The audit of a run compares few examples of a large model; here the rule clips many gradients of
    a small one that has the same leaves. The report is empty for built-in rules and small models.

    Args:
      rule: Clipping rule of a `RunSpec`.
      params: Parameters of the run: the rule groups their leaves.
      progress: Function of one line of text.
    """
    if sum(np.size(leaf) for leaf in jax.tree.leaves(params)) <= LARGE:
        return AuditReport(())

    def failure() -> str:
        from dpsgd.audit.conformance import check_rule  # imports scipy.stats, for few runs

        small = jax.tree.map(lambda x: np.ones([min(n, 4) for n in x.shape], x.dtype), params)
        return _first_failure(lambda: check_rule(rule, small))

    return _conformance(RULES, rule, failure, progress)


def _conformance(
    registry: Registry, part: Any, failure: Callable[[], str], progress: Callable[[str], None]
) -> AuditReport:
    if not registry.is_own(part):
        return AuditReport(())
    name = f"the {registry.noun} {registry.name_of(type(part))}"
    progress(f"checking {name}")
    detail = failure()
    return AuditReport((CheckResult(f"{name} passes its conformance check", not detail, detail),))


@functools.cache
def _optimizer_failure(part: Optimizer) -> str:
    from dpsgd.audit.conformance import check_optimizer  # imports scipy.stats, for few runs

    return _first_failure(lambda: check_optimizer(optimizer(part)))


def _first_failure(check: Callable[[], Any]) -> str:
    """Returns the first failed conformance check, or ""."""
    try:
        check()
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
