"""Labels of the values in a program's trace: what each may depend on.

Every value carries labels of its possible dependencies, and the name of the argument to which it is
equal, if any. Claims and limits of the proof: docs/explanation/non-interference-of-the-program.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from dpsgd.core.marks import mark

ROWS, READ, PENDING = "private rows", "which rows of tables were read", "rows with pending noise"
KEY, NOISE, KEPT = "the noise key", "fresh noise", "noise of earlier steps"
STEP, RING, STDDEV, RELEASE = "the step", "the step's place in a ring", "sigma C", "releases"

DATA = frozenset({ROWS, READ, PENDING, RELEASE})
"""Labels of values that depend on private rows, also through releases."""


@dataclass(frozen=True)
class Sum:
    """A marked sum of clipped gradients."""

    number: int
    """Identifier of the equation that marks the sum."""
    rows: bool = False
    """True for a selection of rows of the sum, possibly with repetitions."""


@dataclass(frozen=True)
class Flow:
    """Possible dependencies of a value."""

    labels: frozenset[str] = frozenset()
    name: str | Sum | None = None
    """Argument of the program, or sum, that the value equals; None if it was computed."""

    def with_labels(self, added: Iterable[str]) -> Flow:
        """Returns this flow with additional labels."""
        return Flow(self.labels | frozenset(added), self.name)


Found = Counter[str | Sum]
"""Counts of fault messages, and of releases for each sum and for its rows."""

PUBLIC = Flow()
"""Flow of a value that depends on nothing secret."""

_ONE = Flow(name="1")

_NEXT, LAST = "the step after", "the step with which a loop ends"
"""Names of a step's successor, and of the step after a loop."""

_ARGUMENTS = {"key": KEY, "step": STEP, "stddev": STDDEV, "divisor": "b", "clip": "C"}
"""Unchanged argument of the program that each part of a mark must be."""

_CALLS = (
    "jit", "pjit", "shard_map", "checkpoint", "closed_call", "core_call", "custom_jvp_call",
    "custom_vjp_call",
)  # fmt: skip
_UNTOUCHED = (
    "convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "copy", "copy_p",
    "optimization_barrier", "sharding_constraint", "device_put",
)  # fmt: skip
_POSITIONS = {
    "gather": (1, 2),
    "dynamic_slice": (1, None),
    "dynamic_update_slice": (2, None),
    "scatter": (1, 2),
    "scatter-add": (1, 2),
}
"""Slice (start, stop) of the arguments that are positions, by primitive."""


def union(flows: Iterable[Flow]) -> frozenset[str]:
    """Returns the labels of all flows together."""
    return frozenset().union(*[flow.labels for flow in flows])


def _whence(where: frozenset[str], data: frozenset[str]) -> frozenset[str]:
    """Returns the labels revealed by positions, or trip counts, applied to `data`.

    Positions in tables with pending noise depend on the rows only by the look-ups.
    """
    return where - {ROWS} | {READ} if ROWS in where and PENDING in data else where


def _stale(flow: Flow) -> Flow:
    """Returns the flow of a loop's value one iteration later: its noise is old."""
    labels = flow.labels
    return Flow(labels - {NOISE} | {KEPT}, flow.name) if NOISE in labels else flow


def _either(x: Flow, y: Flow, counted: str | None = None) -> Flow:
    """Returns the flow of a value that is `x` or `y`.

    `counted` is the name of a step that a loop increments.
    """
    if counted and (x.name, y.name) == (STEP, _NEXT):
        return Flow(x.labels | y.labels, counted)
    return Flow(x.labels | y.labels, x.name if x.name == y.name else None)


@dataclass
class Reader:
    """Follows labels through the trace of a program.

    Attributes:
      foreign: Labels that noise must not have, in addition to data.
    """

    foreign: frozenset[str]
    _known: dict[Any, Any] = field(default_factory=dict)
    _summed: frozenset[str] = frozenset()  # what any sum depends on: noise is added to all at once

    def read(self, of: Any, inputs: Sequence[Flow]) -> tuple[list[Flow], Found]:
        """Returns a jaxpr's output flows, faults and releases."""
        key = id(of), tuple(inputs)
        if key not in self._known:
            self._known[key] = self._equations(of, inputs)
        return self._known[key]

    def _equations(self, of: Any, inputs: Sequence[Flow]) -> tuple[list[Flow], Found]:
        closed = isinstance(of, core.ClosedJaxpr)
        jaxpr = of.jaxpr if closed else of
        flows: dict[Any, Flow] = dict.fromkeys(jaxpr.constvars, PUBLIC)
        flows |= dict(zip(jaxpr.invars, inputs, strict=True))
        faults: Found = Counter()

        def flow(atom: Any) -> Flow:
            """Returns the flow of a variable or literal."""
            if isinstance(atom, core.Literal):
                return _ONE if np.ndim(atom.val) == 0 and atom.val == 1 else PUBLIC
            return flows[atom]

        for equation in jaxpr.eqns:
            outputs, new_faults = self._equation(equation, [flow(x) for x in equation.invars])
            flows.update(zip(equation.outvars, outputs, strict=True))
            if new_faults:
                faults.update(new_faults)
        return [flow(x) for x in jaxpr.outvars], faults

    def _equation(self, equation: Any, inputs: list[Flow]) -> tuple[list[Flow], Found]:
        primitive, params = equation.primitive, equation.params
        name = primitive.name
        if primitive is mark:
            marked_inputs = dict(zip(params["names"], inputs[1:], strict=True))
            sizes = dict(
                zip(marked_inputs, (x.aval.size for x in equation.invars[1:]), strict=True)
            )
            if sizes.get("total", size := equation.invars[0].aval.size) != size:  # under vmap
                marked_inputs["total"] = Flow(marked_inputs["total"].labels)
            output, wrong = self._follow_mark(
                params["kind"], inputs[0], marked_inputs, id(equation)
            )
            return [output], Counter(wrong)
        if name in _CALLS:
            return self.read(params.get("jaxpr", params.get("call_jaxpr")), inputs)
        if name == "while":
            counts = params["cond_nconsts"], params["body_nconsts"]
            of_condition, consts, carry = _split(inputs, *counts)
            condition = params["cond_jaxpr"], of_condition
            return self._loop(params["body_jaxpr"], consts, carry, (), condition)
        if name == "scan":
            consts, carry, slices = _split(inputs, params["num_consts"], params["num_carry"])
            return self._loop(params["jaxpr"], consts, carry, slices)
        if name == "cond":
            (outputs, faults), *branches = [self.read(x, inputs[1:]) for x in params["branches"]]
            for alternative, wrong in branches:
                outputs = [_either(x, y) for x, y in zip(outputs, alternative, strict=True)]
                faults = faults | wrong  # of one branch: of each sum the most releases
            return [x.with_labels(inputs[0].labels) for x in outputs], faults
        if name in _UNTOUCHED and len(inputs) == len(equation.outvars):
            pairs = zip(equation.invars, equation.outvars, strict=True)
            keeps_value = [
                _keeps_digits(x.aval.dtype, y.aval.dtype)
                and not (isinstance(input.name, Sum) and x.aval.size != y.aval.size)  # no copies
                for (x, y), input in zip(pairs, inputs, strict=True)
            ]
            outputs = [
                x if keeps else Flow(x.labels) for x, keeps in zip(inputs, keeps_value, strict=True)
            ]
            return outputs, Counter()
        output, released = self._computed(name, inputs)
        return [output] * len(equation.outvars), released

    def _computed(self, name: str, inputs: list[Flow]) -> tuple[Flow, Found]:
        if name in _POSITIONS:
            start, stop = _POSITIONS[name]
            data = inputs[:start] + ([] if stop is None else inputs[stop:])
            positions, source = union(inputs[start:stop]), union(data)
            name_of_sum = data[0].name if len(data) == 1 else None
            selection = replace(name_of_sum, rows=True) if isinstance(name_of_sum, Sum) else None
            return Flow(source | _whence(positions, source), selection), Counter()
        if name in ("add", "add_any"):
            if {x.name for x in inputs} == {STEP, "1"}:
                return Flow(union(inputs), _NEXT), Counter()
            summed, addend = sorted(inputs, key=lambda x: not isinstance(x.name, Sum))
            noised = STDDEV in addend.labels and not self._wrong_noise(addend)
            if noised and isinstance(summed.name, Sum) and not summed.name.rows:
                return Flow(frozenset({RELEASE})), Counter([summed.name])
        return Flow(union(inputs)), Counter()

    def _wrong_noise(self, noise: Flow) -> frozenset[str]:
        """Returns the labels that disqualify a value as noise of a sum."""
        none = frozenset() if NOISE in noise.labels else {"no fresh draw"}
        return noise.labels & (DATA | self.foreign) | none

    def _follow_mark(
        self, kind: str, value: Flow, parts: dict[str, Flow], number: int
    ) -> tuple[Flow, Iterable[str | Sum]]:
        """Returns the flow of a marked value, and its faults and releases."""
        rows = parts.get("rows", PUBLIC)
        read = {READ} if rows.labels & {ROWS, READ} else frozenset()
        if kind == "sum":
            self._summed |= value.labels
            sum_name = value.name if isinstance(value.name, Sum) else Sum(number)
            return Flow(value.labels | {ROWS}, sum_name), ()
        if kind == "ring":
            return Flow(value.labels - {STEP} | {RING}), ()
        noise = kind == "release" and ROWS not in parts["total"].labels  # of a sum without rows
        required = ("key", "step") if noise else tuple(_ARGUMENTS)
        faults: set[str | Sum] = set()
        for role in set(required) & set(parts):
            flow, argument = parts[role], _ARGUMENTS[role]
            if flow.name != argument or (role == "step" and flow.labels != {STEP}):
                whence = words(flow.labels)
                faults.add(f"a {kind} uses a value in place of {argument}, computed from {whence}")
        if kind == "clip":
            return value, faults
        if kind == "draw" or noise:
            scale = union(parts[k] for k in ("stddev", "divisor", "total") if k in parts)
            names = value.labels - union(parts.values())  # of draws, made of something else
            return Flow(scale | {NOISE} | read | names), faults
        total = parts["total"].name
        if not isinstance(total, Sum) or (total.rows and "rows" not in parts):
            faults.add("a release adds noise to a value computed from a sum, not to the sum")
        elif ROWS in value.labels:  # or it is a release already
            faults.add(replace(total, rows="rows" in parts))
        if "noise" in parts:
            wrong = self._wrong_noise(parts["noise"])
        else:
            releases_noise = value.labels & {KEY, RELEASE}  # or a sum plus such noise already
            wrong = frozenset() if releases_noise else frozenset({"no fresh draw"})
        if wrong := wrong or value.labels - {RELEASE} - union(parts.values()) - self._summed:
            faults.add(f"a release has noise that depends on {words(wrong)}")
        return Flow(frozenset({RELEASE} | read)), faults

    def _loop(
        self,
        body: Any,
        consts: Sequence[Flow],
        carry: list[Flow],
        slices: Sequence[Flow],
        condition: tuple[Any, list[Flow]] | None = None,
    ) -> tuple[list[Flow], Found]:
        """Returns the flows of a loop's outputs, after any number of iterations.

        A sum from outside the loop counts as released in every iteration. Rows selected from a sum
        inside the loop count once: every iteration selects other rows of a table.
        """
        while True:
            outputs, faults = self.read(body, [*consts, *carry, *slices])
            rounds = list(zip(carry, outputs, strict=False))  # after these come a scan's own
            next_carry = [_either(x, _stale(y), STEP) for x, y in rounds]
            if next_carry == carry and condition is not None:  # then labels of the trip count
                test, of_test = condition
                (predicate,), _ = self.read(test, [*of_test, *carry])
                next_carry = [x.with_labels(_whence(predicate.labels, x.labels)) for x in carry]
            if next_carry == carry:
                without = {x.name for x in (*consts, *carry, *slices)}
                again = {x: n for x, n in faults.items() if isinstance(x, Sum) and x in without}
                faults = faults + Counter(again)
                return [_either(x, y, LAST) for x, y in rounds] + outputs[len(carry) :], faults
            carry = next_carry


def _split(
    inputs: list[Flow], first: int, second: int
) -> tuple[list[Flow], list[Flow], list[Flow]]:
    """Splits inputs into parts of the given lengths, and the remainder."""
    return inputs[:first], inputs[first : first + second], inputs[first + second :]


def _keeps_digits(old: Any, new: Any) -> bool:
    """Returns True if a conversion keeps a number's kind, in at least 32 bits."""
    same_kind = jnp.issubdtype(old, jnp.floating) == jnp.issubdtype(new, jnp.floating)
    return bool(same_kind and new.itemsize >= 4)


def words(labels: Iterable[str]) -> str:
    """Returns labels as a phrase, for messages."""
    return " and ".join(sorted(labels)) or "constants"
