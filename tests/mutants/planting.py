"""Faults that are planted into the library through its functions, by name and around them.

`SEAMS` is the one table of the functions that faults go around, and says what each does. A fault
changes the arguments of such a function, or what it returns: it quotes no line of it.
"""

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

from dpsgd.engine import programs
from dpsgd.gradients import norms

OURS = ("accounting", "samplers", "dpsgd", "experiments")

SEAMS = {
    # what trains
    "keys": ("dpsgd.engine.feed:keys_of", "the keys of a run's noise and of its loss"),
    "plans": ("dpsgd.engine.feed:plan_blocks", "the steps and batches of block after block"),
    "executable": ("dpsgd.engine.loop:compiled_block", "the executable of a block"),
    "block": ("dpsgd.engine.step:_run_block", "the steps of a block, one after the other"),
    "step": ("dpsgd.engine.step:_Step.__call__", "one step of a block: sum and update"),
    "step's sum": ("dpsgd.engine.step:_Step._sum", "the sum of a step over its passes"),
    "clipped sum": ("dpsgd.gradients.clipping:ClippedSum.__call__", "the clipped sum of a pass"),
    "update": ("dpsgd.engine.algorithm:_Update.__call__", "noise, divisor and optimizer"),
    "noise": ("dpsgd.core.gaussian:add_gaussian_noise", "the Gaussian noise of all leaves"),
    "scales": ("dpsgd.core.mechanism:Mechanism.scales", "C, sigma C and b, as a program has them"),
    "factor": ("dpsgd.gradients.norms:clip_factor", "by how much each example is shortened"),
    "combined": ("dpsgd.gradients.norms:norm", "the norm of several leaves' squares"),
    "selected": ("dpsgd.gradients.norms:select", "gradients, of examples that count alone"),
    "repeated": ("dpsgd.gradients.ghost.parts:sum_repeated", "sums of rows looked up repeatedly"),
    # lazy tables
    "gap": ("dpsgd.engine.lazy.rows:caught_up", "rows, brought from one step to another"),
    "flush": ("dpsgd.engine.lazy.rows:flushed_table", "a table, all of it up to date"),
    "written": ("dpsgd.engine.lazy.rows:written", "a table with the rows of a step"),
    "read rows": ("dpsgd.engine.lazy.rows:read", "the rows that a step reads, up to date"),
    "unique rows": ("dpsgd.engine.lazy.group:unique_rows", "rows that are read, each once"),
    "lazy view": ("dpsgd.engine.lazy.group:LazyRows.view", "what a loss sees of tables"),
    "row noise": ("dpsgd.core.algorithm:privatize", "noised sums, those of rows among them"),
    "row update": ("dpsgd.engine.lazy.group:_updated_rows", "rows after a step"),
    # full-batch queries
    "queries": ("dpsgd.core.mechanism:Mechanism.sums_mechanism", "the mechanism of the queries"),
    "cost of queries": ("dpsgd.core.queries:FullSums.release", "what so many of them cost"),
    "cost of all rows": ("samplers.full_batch:FullBatch.privacy", "what sums of all rows cost"),
    "cost with queries": ("dpsgd.core.mechanism:Mechanism._with_sums", "steps' cost and queries'"),
    "query": ("dpsgd.engine.queries:refine", "queries, declared and released"),
    "child": ("dpsgd.noise.keys:RootKey.child", "a root of its own for some use"),
    "isolated": ("dpsgd.gradients.isolation:require_isolated", "a refusal of mixed rows"),
    "read": ("dpsgd.engine.queries:_read", "what a query reads of some rows"),
    # who takes part
    "key": ("samplers.randomness:Key.__init__", "a key, of a seed, stream, epoch and index"),
    "rate": ("samplers.poisson:exponential_rate", "the rate of Poisson's trials"),
    "rate of units": ("samplers.units_then_poisson:exponential_rate", "that of examples of units"),
    "trials": ("samplers.randomness:bernoulli_successes", "which independent trials succeed"),
    "drawn": ("samplers.batches:BatchSource._draw", "an epoch, drawn ahead or now"),
    "members": ("samplers.plans:EpochPlan.members", "who takes part in a step of an epoch"),
    "filled": ("samplers.batches:BatchSource.fill", "the passes of some steps, padded"),
    "cut": ("samplers.batches:BatchSource.passes_by_shard", "a step's passes, cut to the cap"),
    "shard": ("samplers.base:BatchSampler.shard_plan", "a data shard's part of an epoch"),
    "order": ("samplers.episodes:_ordered_draws", "units, drawn without replacement in order"),
}
"""Name of a seam -> the function, "module:qualified name", and what it does."""


@dataclass(frozen=True)
class Fault:
    """A fault of the library.

    Attributes:
      seam: Key of `SEAMS`.
      make: Of the sound function, the faulty one.
      check: Claim or check that must fail, where one is named.
      kind: Kind of run that is audited.
    """

    seam: str
    make: Callable
    check: object = ""
    kind: str = ""


def before(change):
    """A fault of arguments: `change` takes some by name, and returns others for some of them.

    Fields of `inputs`, a record, are arguments like others.
    """

    def around(sound, arguments, wanted):
        changes = change(*wanted)
        if (inputs := arguments.arguments.get("inputs")) is not None:
            fields = {name: changes.pop(name) for name in [*changes] if name in inputs._fields}
            changes["inputs"] = inputs._replace(**fields)
        arguments.arguments.update(changes)
        return sound(*arguments.args, **arguments.kwargs)

    return _around(around, [*inspect.signature(change).parameters])


def after(change):
    """A fault of what is returned: `change` takes that, and some arguments by name."""

    def around(sound, arguments, wanted):
        return change(sound(*arguments.args, **arguments.kwargs), *wanted)

    return _around(around, [*inspect.signature(change).parameters][1:])


def _around(planted, wanted):
    def make(sound):
        signature = inspect.signature(sound)

        @functools.wraps(sound)
        def faulty(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            inputs = bound.arguments.get("inputs")
            values = {**(inputs._asdict() if inputs else {}), **bound.arguments}
            return planted(sound, bound, [values[name] for name in wanted])

        return faulty

    return make


def seam(name):
    """Returns the owner of a seam, its name there, what stands there, and the function itself."""
    module, _, qualified = SEAMS[name][0].partition(":")
    *owners, last = qualified.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    sound = inspect.getattr_static(owner, last)
    return owner, last, sound, inspect.unwrap(sound)


def plant(fault, patch):
    """Replaces the function, wherever a module of the library knows it by name."""
    owner, name, sound, function = seam(fault.seam)
    faulty = fault.make(function)
    patch.setattr(owner, name, faulty)
    for module in [m for known, m in sys.modules.items() if known.split(".")[0] in OURS]:
        for known, value in list(vars(module).items()):
            if value is sound:
                patch.setattr(module, known, faulty)


@contextlib.contextmanager
def planted(*faults):
    """The library has the faults; what was compiled without them, or with them, is forgotten."""
    with pytest.MonkeyPatch.context() as patch:
        for fault in faults:
            plant(fault, patch)
        forget()
        yield
    forget()


def forget():
    for cache in (programs._executable, programs._compiled):
        cache.cache_clear()
    jax.clear_caches()


sound_norm = norms.norm


def largest_norm(found, squares):
    """A norm of several leaves that is the largest of theirs: each is then clipped by itself."""
    with norms.float64():
        largest = functools.reduce(jnp.maximum, squares)
    return sound_norm([largest])
