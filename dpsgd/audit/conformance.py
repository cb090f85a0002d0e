"""Tests a sampler, noise, loss, optimizer or task alone.

Authors of such components call these functions in their own tests:

    def test_my_sampler():
        check_sampler(MySampler(1_000, 50, 4))

Each function returns the report of its checks, and raises AssertionError if the component violates
an assumption of the guarantee. The audit before a run tests the components of that run; these
functions test one component with more draws, and noise in leaves of every kind.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpsgd.audit.audit import audit_program, audit_queries
from dpsgd.audit.draws import draw_checks
from dpsgd.audit.laws import THOROUGH, law_checks
from dpsgd.audit.prices import cost_checks, price_check
from dpsgd.audit.report import LAW, AuditReport, CheckResult
from dpsgd.audit.runtime.flow import flow_checks
from dpsgd.audit.synthetic import generated_rows
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.noise import Noise
from dpsgd.core.queries import FullSums
from dpsgd.core.state import TrainState
from dpsgd.engine.algorithm import Algorithm, dpsgd
from dpsgd.engine.closures import held_arrays
from dpsgd.engine.feed import Layout
from dpsgd.engine.loop import train_blocks
from dpsgd.engine.programs import digest
from dpsgd.gradients.losses import LossFn
from dpsgd.gradients.rules import ClippingRule
from dpsgd.noise.keys import Keys
from samplers import BallsAndBins, BatchSampler, Deterministic, Poisson, Shuffle, UnitData

PyTree = Any

_ROWS = 64  # synthetic rows
_SIGMAS = 0.5, 2.0  # noise multipliers at which costs are compared
_PARAMS = {"w": np.ones((4, 3), np.float32), "b": np.ones(3, np.float32)}
_LOOP_ERROR = 1e-3
"""Largest difference of a loop's state, in units of the change of an array, due to rounding."""


def check_sampler(sampler: BatchSampler, *, noise_multiplier: float = 1.0) -> AuditReport:
    """Checks the draws and the privacy cost of a sampler.

    Draws must follow the law that the sampler states, and costs must be consistent. Seeds are
    fixed, so that the result depends on the code alone.

    Args:
      sampler: Sampler with the n, b and E to test; larger values reveal smaller deviations.
      noise_multiplier: Noise multiplier at which the cost is computed.

    Raises:
      AssertionError: If draws do not follow the law, steps of an example are closer than
        `separation`, the sampler states no law, or its costs are inconsistent.
    """
    checks = cost_checks(sampler, noise_multiplier)
    checks += draw_checks(sampler, sampler, seed=2**127 + 1, bands=sampler.separation)
    if all(check.passed for check in checks):
        checks += law_checks(sampler, entries=THOROUGH)
    if any(check.name == LAW and not check.performed for check in checks):
        checks.append(CheckResult(LAW, False, "row_law"))
    return _required(checks)


def check_noise(
    noise: Noise,
    *,
    steps: int = 200,
    sampler: BatchSampler | None = None,
    noise_multiplier: float | None = None,
) -> AuditReport:
    """Checks the values and the privacy cost of a noise.

    Key, step and coordinate determine every value. The tested leaves are a scalar, a vector, a
    table, an empty array and a bfloat16 vector.

    Args:
      noise: Noise, as in `Mechanism.noise`.
      steps: Least number of steps of the default samplers.
      sampler: Sampler of the tested run, whose separation the noise's bands need; by default
        `Deterministic` with at least two epochs, and costs are compared under samplers of every
        kind.
      noise_multiplier: Noise multiplier at which costs are compared; by default several.

    Raises:
      AssertionError: If a value is wrong or missing, or if `privacy` or `privacy_of` raises or
        returns less than the method of `Noise`, which raises if `bands` exceeds the sampler's
        separation.
    """
    tested = [sampler] if sampler else _samplers(noise.bands, steps)
    sigmas = [noise_multiplier] if noise_multiplier else _SIGMAS
    params = {
        "half": jnp.zeros(300, jnp.bfloat16),
        "nothing": jnp.zeros((0, 3)),
        "scalar": jnp.zeros(()),
        "table": jnp.zeros((64, 64)),
        "vector": jnp.zeros(1_001),
    }
    prices = price_check(noise, itertools.product(tested, sigmas))
    algorithm, mechanism = dpsgd(_total, optax.sgd(0.1)), Mechanism(tested[0], 1.0, 0.5, noise)
    rows = {"x": np.ones(_ROWS, np.float32)}
    layout = Layout.choose(tested[0], rows, block_steps=tested[0].num_steps)  # a single block
    program = audit_program(algorithm, mechanism, params, rows, layout=layout)
    return _required([prices, *program.checks])


def _samplers(bands: int, steps: int) -> list[BatchSampler]:
    """Returns samplers of every kind whose separation is at least `bands`."""
    length = max(1, steps // 2 // bands) * bands
    sizes = 8 * length, 8, max(2, -(-steps // length))
    samplers = [
        Deterministic(*sizes),
        Shuffle(*sizes),
        Shuffle(*sizes, order="fixed"),
        Poisson(*sizes, cycle_length=bands),
        Poisson(*sizes, cycle_length=bands, overflow="accumulate"),
        BallsAndBins(*sizes, cycle_length=bands),
    ]
    return [sampler for sampler in samplers if sampler.separation >= bands]


def check_clipping(
    algorithm: Algorithm | LossFn,
    params: PyTree,
    rows: PyTree,
    *,
    l2_clip_norm: float = 1.0,
    batch_size: int = 64,
    num_rows: int | None = None,
) -> AuditReport:
    """Checks that an example moves sums by at most C.

    Args:
      algorithm: Algorithm whose `clipped_sum` is tested, or a per-example loss.
      params: Parameters at which gradients are computed.
      rows: Examples, each leaf [rows, ...]; no other rows are read.
      l2_clip_norm: Clip norm C.
      batch_size: Expected number of examples in a batch.
      num_rows: Number of rows of the data, by default 8 batches; arrays of this length in a closure
        are refused.

    Raises:
      AssertionError: If an example moves the sum by more than C, alone or among others.
      ValueError: If the loss could read other examples than its own.
    """
    if not isinstance(algorithm, Algorithm):
        algorithm = dpsgd(algorithm, optax.sgd(0.1))
    mechanism = Mechanism(Poisson(num_rows or 8 * batch_size, batch_size), 1.0, l2_clip_norm)
    return _required([*audit_program(algorithm, mechanism, params, rows).checks])


def check_rule(rule: ClippingRule, params: PyTree | None = None) -> AuditReport:
    """Checks a clipping rule on a small model, by `check_clipping`.

    Args:
      rule: Clipping rule, as in `dpsgd(loss_fn, optimizer, clipping=rule)`.
      params: Parameters that the rule groups; by default a matrix `w` and a vector `b`.

    Raises:
      AssertionError: If an example moves the sum by more than C, alone or among others.
      ValueError: If the rule refuses the parameters.
    """
    params = _PARAMS if params is None else params
    try:
        rule.groups(params)
    except ValueError as error:
        raise ValueError(f"check_rule(rule, params) needs parameters to group: {error}") from None
    rows = {"x": np.linspace(-1, 1, _ROWS, dtype=np.float32)}
    return check_clipping(dpsgd(_total, optax.sgd(0.1), clipping=rule), params, rows)


def check_optimizer(
    optimizer: optax.GradientTransformation, params: PyTree | None = None
) -> AuditReport:
    """Checks that an optimizer reads only the private mean gradient.

    Args:
      optimizer: Optax transformation of dense parameters.
      params: Parameters whose shapes and dtypes are tested; by default a matrix and a vector.

    Raises:
      AssertionError: If the optimizer holds an array, such as rows, that is no scalar and has no
        parameter's shape; its state depends on private values or on its call; or it changes shapes
        or dtypes.

    >>> check_optimizer(optax.adam(1e-3)).passed
    True
    """
    params = _PARAMS if params is None else params
    leaves = jax.tree.leaves(params)
    algorithm, mechanism = dpsgd(_total, optimizer), Mechanism(Poisson(97, 8), 1.0, 1.0)
    state = jax.eval_shape(lambda params: algorithm.init(params, mechanism), params)
    rows = {"x": np.ones(97, np.float32)}
    checks = flow_checks(algorithm, mechanism, state, rows, Layout.choose(mechanism.sampler, rows))
    gradient = jax.tree.map(jnp.ones_like, params)
    updates, next_state = jax.eval_shape(optimizer.update, gradient, state.opt_state, params)
    same = jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
    same &= _shapes(next_state) == _shapes(state.opt_state)
    detail = f"{len(leaves)} arrays, and {len(jax.tree.leaves(next_state))} of its state"
    checks.append(CheckResult("shapes and dtypes stay the same", same, detail))
    traces = (
        jax.make_jaxpr(optimizer.init)(params),
        jax.make_jaxpr(optimizer.update)(gradient, state.opt_state, params),
    )
    allowed = {(), *map(jnp.shape, leaves)}
    other_shapes = sorted({x.shape for trace in traces for x, _ in held_arrays(trace)} - allowed)
    detail = f"others: {other_shapes}" if other_shapes else ""
    name = "arrays in its closures have shapes of parameters"
    checks.append(CheckResult(name, not other_shapes, detail))
    alike = _alike(optimizer.init(params), optimizer.init(params))
    checks.append(CheckResult("its initial state is always the same", alike, ""))
    return _required(checks)


def _total(params: PyTree, example: PyTree) -> jax.Array:
    """Returns a loss whose gradient is the number `x` of the example in every coordinate."""
    return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(params)) * example["x"]


def check_task(task: Any, *, batch_size: int = 32) -> AuditReport:
    """Checks a task's rows, loss and parameters.

    Args:
      task: Task as in `dpsgd.Task`, with `init`, `loss` and `generated`, and optionally `describe`,
        `calibration` and `columns`, which gives the audited run its number of rows.
      batch_size: Largest expected number of examples in a batch.

    Raises:
      AssertionError: If equal seeds give different parameters, `generated` gives another number of
        rows, descriptions differ, or the audit of a run fails.
      ValueError: If synthetic rows differ from the data in shape or dtype, or the loss could
        read other examples than its own.
    """
    params, rows, num_rows = task.init(0), task.generated(_ROWS), 8 * batch_size
    counts = sorted({len(leaf) for leaf in jax.tree.leaves(rows)})
    checks = [
        CheckResult("equal seeds give equal parameters", _alike(params, task.init(0)), ""),
        CheckResult(
            "`generated` returns the requested number of rows", counts == [_ROWS], str(counts)
        ),
    ]
    if hasattr(task, "columns"):
        data = task.columns()
        columns = data.columns if isinstance(data, UnitData) else data
        generated_rows(columns, _ROWS, rows)  # or it says which column differs
        num_rows = len(jax.tree.leaves(columns)[0])
    if hasattr(task, "describe"):
        described = json.loads(json.dumps(task.describe()))
        same = described == json.loads(json.dumps(task.describe()))
        checks.append(CheckResult("its description is JSON, and always the same", same, ""))
    algorithm = dpsgd(task.loss, optax.sgd(0.1))
    sampler = Poisson(num_rows, min(batch_size, num_rows))
    mechanism = Mechanism(sampler, 1.0, 1.0, full_sums=FullSums(2, 1.0))
    checks += audit_program(algorithm, mechanism, params, rows).checks
    offered = getattr(task, "calibration", None)
    if callable(offered) and (refinement := offered()) is not None:
        checks += audit_queries(refinement, mechanism, params, rows).checks
    return _required(checks)


def check_loop(
    loop: Callable[[TrainState, PyTree, Keys], TrainState],
    algorithm: Algorithm,
    mechanism: Mechanism,
    params: PyTree,
    rows: PyTree,
) -> AuditReport:
    """Checks an own training loop against the audited program.

    The program of the run is audited, as before `train`. Then the loop must reach the state of
    `train_blocks` under equal keys: optimizer state included, within float32's rounding. Some
    synthetic rows are large, so that their gradients are clipped.

    Args:
      loop: Function (state, data, keys) that returns the state after the sampler's last step.
      algorithm: Training algorithm, whose `clipped_sum` and `update` the loop calls.
      mechanism: Sampler, sigma and C.
      params: Initial parameters.
      rows: Synthetic examples, each leaf [rows, ...]; they are repeated to the sampler's number.

    Raises:
      AssertionError: If the program fails its audit, or the loop reaches another state.
    """
    count = mechanism.sampler.num_examples
    data = jax.tree.map(lambda x: _enlarged(np.resize(x, (count, *x.shape[1:]))), rows)
    checks = list(audit_program(algorithm, mechanism, params, rows).checks)
    state, keys = algorithm.init(params, mechanism, data), Keys.of()
    *_, block = train_blocks(algorithm, mechanism, state, data, keys=keys)
    initial, expected = state, block.state
    reached = loop(algorithm.init(params, mechanism, data), data, keys)
    structure: Any = jax.tree.structure(reached)
    same = structure == jax.tree.structure(expected)
    name = "the loop reaches the state of the audited program"
    if not same:
        return _required([*checks, CheckResult(name, False, "the state has another structure")])
    leaves = zip(*map(jax.tree.leaves, (initial, expected, reached)), strict=True)
    errors = [_relative_error(*map(np.asarray, triple)) for triple in leaves]
    error = float(np.max(errors, initial=0.0))  # NaN stays NaN, and fails
    detail = f"largest difference {error:.1e} times the change of an array"
    return _required([*checks, CheckResult(name, error <= _LOOP_ERROR, detail)])


def _enlarged(column: np.ndarray) -> np.ndarray:
    """Returns a column whose floats are a hundred times as large in every fourth row."""
    if not np.issubdtype(column.dtype, np.floating):
        return column
    factors = np.where(np.arange(len(column)) % 4 == 3, 100, 1).astype(column.dtype)
    return column * factors.reshape(-1, *(1,) * (column.ndim - 1))


def _relative_error(initial: np.ndarray, expected: np.ndarray, reached: np.ndarray) -> float:
    """Returns the largest difference of an array from the expected one, in units of its change.

    It is infinite for another shape, and for integers that are not equal.
    """
    if reached.shape != expected.shape:
        return math.inf
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        return 0.0 if np.array_equal(expected, reached) else math.inf
    change = np.abs(expected.astype(float) - initial).max(initial=0.0)
    difference = np.abs(expected.astype(float) - reached).max(initial=0.0)
    return float(difference / change) if difference else 0.0


def check_neighbours(task: Any, neighbour: Any, *, batch_size: int = 32) -> AuditReport:
    """Checks that no public property depends on a row's values.

    Args:
      task: Task as in `dpsgd.Task`, with `columns` and `describe`.
      neighbour: The same task on data that differ in one row: its label, numbers and words are
        new, and larger than the values of all other rows.
      batch_size: Largest expected number of examples in a batch.

    Raises:
      AssertionError: If row counts, units, shapes of rows or parameters, descriptions or compiled
        programs differ: a difference reveals the row, and no guarantee counts it.
    """
    views = [_public_view(first, batch_size) for first in (task, neighbour)]
    pairs = [(name, *(view[name] for view in views)) for name in views[0]]
    return _required(
        [
            CheckResult(
                f"one row changes no {name}", first == second, f"{first}, then {second}"[:500]
            )
            for name, first, second in pairs
        ]
    )


def _public_view(task: Any, batch_size: int) -> dict[str, Any]:
    """Returns a task's public properties that rows could change, by name."""
    data = task.columns()
    columns = data.columns if isinstance(data, UnitData) else data
    num_rows = len(jax.tree.leaves(columns)[0])
    params = task.init(0)
    algorithm = dpsgd(task.loss, optax.sgd(0.1))
    mechanism = Mechanism(Poisson(num_rows, min(batch_size, num_rows)), 1.0, 1.0)
    state = algorithm.init(params, mechanism)
    program = Layout.choose(mechanism.sampler, columns, block_steps=4).program(
        algorithm, mechanism, state, columns
    )
    return {
        "row count": num_rows,
        "unit": data.population if isinstance(data, UnitData) else None,
        "shape of a row": str(jax.tree.map(lambda x: (x.shape[1:], str(x.dtype)), columns)),
        "shape of a parameter": str(_shapes(params)),
        "description": json.dumps(task.describe(), sort_keys=True),
        "compiled program": digest(program),
    }


def _alike(first: PyTree, again: PyTree) -> bool:
    structure: Any = jax.tree.structure(first)
    same = bool(structure == jax.tree.structure(again))
    return same and all(map(np.array_equal, jax.tree.leaves(first), jax.tree.leaves(again)))


def _shapes(tree: PyTree) -> Any:
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


def _required(checks: list[CheckResult]) -> AuditReport:
    report = AuditReport(tuple(checks))
    if not report.passed:
        raise AssertionError("\n".join(report.lines()))
    return report
