"""Conformance of own parts: what the author of a sampler, noise, loss or task calls in their tests.

    def test_my_sampler():
        check_sampler(MySampler(1_000, 50, 4))

Each function returns the report of what it looked at, and raises AssertionError where the part is
not what the guarantee assumes of it. What an audit before a run sees of that run, these see of the
part alone, at any scale: laws of draws under many seeds, noise of every kind of leaf.
"""

from __future__ import annotations

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpsgd.audit.audit import audit_program
from dpsgd.audit.probe import Probe
from dpsgd.audit.report import LAW, AuditReport, CheckResult
from dpsgd.audit.runtime.blocks import block_checks
from dpsgd.audit.runtime.flow import flow_checks
from dpsgd.audit.runtime.noise import noise_checks
from dpsgd.audit.runtime.sums import sum_checks
from dpsgd.audit.samplers.checks import sampler_checks
from dpsgd.audit.synthetic import generated_rows
from dpsgd.core.algorithm import Algorithm
from dpsgd.core.mechanism import Mechanism
from dpsgd.engine.algorithm import dpsgd
from dpsgd.engine.feed import Layout
from dpsgd.gradients.losses import LossFn
from dpsgd.noise.base import Independent, Noise
from dpsgd.noise.keys import RootKey
from samplers import BatchSampler, Deterministic, Poisson, UnitData

PyTree = Any

_DELTA = 1e-6
_ROWS = 64  # synthetic ones


def check_sampler(
    sampler: BatchSampler, *, seeds: int = 2, noise_multiplier: float = 1.0
) -> AuditReport:
    """Checks the draws of a sampler against the law that it states, and its cost against itself.

    Args:
      sampler: At the n, b and E at which it is checked: more examples and epochs resolve more.
      seeds: Under how many it draws, each in many epochs.
      noise_multiplier: At which it is priced.

    Raises:
      AssertionError: if a draw is not of the law, it states none, or its costs contradict.
    """
    checks = [_cost_check(sampler, noise_multiplier)]
    for number in range(seeds):
        found = sampler_checks(sampler, sampler, seed=RootKey.from_entropy().sampling_seed(0))
        checks += [check._replace(name=f"seed {number}: {check.name}") for check in found]
        if any(check.name == LAW and not check.made for check in found):
            checks.append(CheckResult("the sampler states the law of its rows", False, "row_law"))
    return _required(checks)


def check_noise(
    noise: Noise, *, steps: int = 200, sampler: BatchSampler | None = None
) -> AuditReport:
    """Checks that a noise adds what key, step and place give, or, of its own generator, its law.

    Leaves are scalars, vectors, tables, empty and of half precision.

    Args:
      noise: As a mechanism has it.
      steps: Of the run that is looked at.
      sampler: Whose separation its bands need; by default a known order of so many steps.

    Raises:
      AssertionError: if the noise is another, lacks somewhere or costs more than is priced.
    """
    sampler = sampler or Deterministic(8 * steps, 8, 1)
    params = {
        "half": jnp.zeros(300, jnp.bfloat16),
        "nothing": jnp.zeros((0, 3)),
        "scalar": jnp.zeros(()),
        "table": jnp.zeros((64, 64)),
        "vector": jnp.zeros(1_001),
    }

    def loss(params: PyTree, example: PyTree) -> jax.Array:
        return sum(jnp.sum(x.astype(jnp.float32)) for x in params.values()) * example["x"]

    algorithm = dpsgd(loss, optax.sgd(0.1))
    mechanism = Mechanism(sampler, 1.0, 0.5, noise)
    state, rows = algorithm.init(params, mechanism), {"x": np.ones(_ROWS, np.float32)}
    probe = Probe(algorithm, mechanism, state, rows)
    checks = noise_checks(probe) + block_checks(probe)
    checks += flow_checks(algorithm, mechanism, state, probe.columns, probe.layout)
    return _required(checks)


def check_clipping(
    algorithm: Algorithm | LossFn,
    params: PyTree,
    rows: PyTree,
    *,
    l2_clip_norm: float = 1.0,
    batch_size: int = 64,
) -> AuditReport:
    """Checks that no example moves the clipped sum of a loss, or of an own rule, by more than C.

    Args:
      algorithm: Whose `clipped_sum` it is; or a loss of parameters and one example.
      params: At which gradients are taken.
      rows: Examples, [rows, ...] each leaf; none is read but these.
      l2_clip_norm: C.
      batch_size: Examples of a batch.

    Raises:
      AssertionError: if an example moves the sum by more, alone or among others.
      ValueError: if the loss could see other examples than its own.
    """
    if not isinstance(algorithm, Algorithm):
        algorithm = dpsgd(algorithm, optax.sgd(0.1))
    mechanism = Mechanism(Poisson(8 * batch_size, batch_size), 1.0, l2_clip_norm)
    state = algorithm.init(params, mechanism, *([rows] if algorithm.tables else []))
    probe = Probe(algorithm, mechanism, state, rows)
    checks = sum_checks(probe)
    checks += flow_checks(algorithm, mechanism, state, probe.columns, probe.layout)
    return _required(checks)


def check_optimizer(
    optimizer: optax.GradientTransformation, params: PyTree | None = None
) -> AuditReport:
    """Checks that an optimizer sees the private mean gradient and nothing else of the data.

    Args:
      optimizer: Of dense parameters.
      params: Whose shapes and types it meets; by default a matrix and a vector.

    Raises:
      AssertionError: if it holds rows, keeps what it should not, or changes shapes or types.
    """
    if params is None:
        params = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}
    leaves = jax.tree.leaves(params)

    def loss(params: PyTree, example: PyTree) -> jax.Array:
        return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(params)) * example["x"]

    algorithm, mechanism = dpsgd(loss, optimizer), Mechanism(Poisson(97, 8), 1.0, 1.0)
    state = algorithm.init(params, mechanism)
    rows = {"x": np.ones(97, np.float32)}
    layout = Layout.of(mechanism.sampler, rows)
    checks = flow_checks(algorithm, mechanism, state, rows, layout)
    gradient = jax.tree.map(jnp.ones_like, params)
    updates, after = jax.eval_shape(optimizer.update, gradient, state.opt_state, params)
    same = jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
    same &= _shapes(after) == _shapes(state.opt_state)
    detail = f"{len(leaves)} arrays, and {len(jax.tree.leaves(after))} of its state"
    checks.append(CheckResult("shapes and types stay what they are", same, detail))
    first, again = (jax.tree.leaves(optimizer.init(params)) for _ in range(2))
    alike = all(map(np.array_equal, first, again))
    checks.append(CheckResult("it begins alike each time", alike, f"{len(first)} arrays"))
    return _required(checks)


def check_task(task: Any, *, batch_size: int = 32, steps: int = 8) -> AuditReport:
    """Checks a task: its rows, its loss and its parameters, as a run trains and audits them.

    Args:
      task: As `dpsgd.Task` says: `init`, `loss` and `generated` are called, and, where it has them,
        `columns` and `describe`.
      batch_size: Examples of a batch.
      steps: Of the run whose program is audited.

    Raises:
      AssertionError: if parameters differ from time to time, or the audit of a run of it fails.
      ValueError: if synthetic rows have other shapes or types than the data, or the loss could see
        other examples than its own.
    """
    first, again = (jax.tree.leaves(task.init(0)) for _ in range(2))
    alike, rows = all(map(np.array_equal, first, again)), task.generated(_ROWS)
    counts = sorted({len(leaf) for leaf in jax.tree.leaves(rows)})
    checks = [
        CheckResult("equal seeds give equal parameters", alike, f"{len(first)} arrays"),
        CheckResult("synthetic rows are as many as wanted", counts == [_ROWS], str(counts)),
    ]
    if hasattr(task, "columns"):
        data = task.columns()
        columns = data.columns if isinstance(data, UnitData) else data
        generated_rows(columns, _ROWS, rows)  # or it says which column differs
    if hasattr(task, "describe"):
        described = json.loads(json.dumps(task.describe()))
        same = described == json.loads(json.dumps(task.describe()))
        checks.append(CheckResult("it is described as JSON, each time alike", same, ""))
    algorithm = dpsgd(task.loss, optax.sgd(0.1))
    mechanism = Mechanism(Poisson(steps * batch_size, batch_size), 1.0, 1.0, Independent())
    found = audit_program(algorithm, mechanism, task.init(0), rows)
    return _required([*checks, *found.checks])


def _cost_check(sampler: BatchSampler, noise_multiplier: float) -> CheckResult:
    """Checks that a cost is an interval, and no larger with more noise."""
    name = "its cost is an interval, and falls with more noise"
    costs = [sampler.privacy(k * noise_multiplier).epsilon(_DELTA) for k in (1, 2)]
    passed = all(0 <= cost.lower <= cost.upper for cost in costs)
    passed &= costs[1].lower <= costs[0].upper and not math.isnan(costs[0].upper)
    return CheckResult(name, passed, " and ".join(f"{cost.upper:.4g}" for cost in costs))


def _shapes(tree: PyTree) -> Any:
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


def _required(checks: list[CheckResult]) -> AuditReport:
    report = AuditReport(tuple(checks))
    if not report.passed:
        raise AssertionError("\n".join(report.lines()))
    return report
