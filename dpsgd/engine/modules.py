"""Flax modules as pure functions of their parameters; other state is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import jax
from flax import nnx
from jax import Array
from jax.extend import core
from jax.interpreters import partial_eval

from dpsgd.engine.algorithm import Algorithm
from dpsgd.gradients.clipping import ClippedSum
from dpsgd.gradients.frozen import named_leaves, stopped
from dpsgd.gradients.losses import Loss, takes_key
from dpsgd.gradients.rows import RowLoss

PyTree = Any


def split_module(
    module: nnx.Module, *, trained: nnx.filterlib.Filter | None = None
) -> tuple[PyTree, Callable[..., Any]]:
    """Returns (params, apply) with apply(params, *inputs) = module(*inputs).

    The guarantee bounds the effect of one example on the sum of gradients. Other state of a module
    bypasses that sum: batch statistics average examples without clipping or noise, and are part of
    the trained model. A module that updates them is refused when `apply` is called. One that only
    reads them, as after ``module.set_attributes(use_running_average=True)``, keeps them; they must
    not depend on private rows.

    >>> params, apply = split_module(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
    >>> apply(params, jax.numpy.ones(2)).shape
    (1,)

    **Dropout.** Random streams in a module, as of `nnx.Dropout(0.1, rngs=rngs)`, are not state
    here: apply(params, *inputs, key=key) seeds each of them from `key`, and without a key nothing
    may be drawn. The loss is then ``lambda params, example, key: loss(apply(params, example,
    key=key))``. Other keyword arguments go to the module, such as ``rngs=nnx.Rngs(dropout=key)``
    for layers without a stream. For predictions, split ``nnx.view(module, deterministic=True)``,
    whose parameters have the same tree.

    Args:
      module: Module whose variables are `nnx.Param`, state of random streams, or batch statistics
        that it only reads.
      trained: Flax filter of the parameters with derivatives, such as ``nnx.Any(nnx.LoRAParam,
        nnx.PathContains("head"))``; training leaves the others constant. By default `nnx.LoRAParam`
        if the module has any, and otherwise all.

    Raises:
      ValueError: If the module has other variables, or `trained` matches no parameter; from
        `apply`, if batch statistics are updated, numbers are drawn without a key, or a key has no
        stream.
    """
    params, run = _split(module, trained)

    def apply(params: PyTree, *inputs: Any, key: Array | None = None, **options: Any) -> Any:
        """Calls the module with `params` in its place.

        Args:
          params: Parameters of the module.
          *inputs: Arguments of the module.
          key: Key that seeds the module's random streams; None to draw nothing.
          **options: Keyword arguments of the module.
        """
        return run(params, lambda module: module(*inputs, **options), key)

    return params, apply


def module_with_rows(
    module: nnx.Module, loss: Callable[..., Array], *, trained: nnx.filterlib.Filter | None = None
) -> tuple[PyTree, RowLoss]:
    """Returns (params, loss) with declared look-ups of `nnx.Embed` layers.

    The look-ups are recorded by tracing the loss on one example. They are a convenience and no
    assumption of the guarantee: an example gets rows and no table, even if the record is wrong. Row
    indices beyond the table read its first or last row, see `with_rows`; `nnx.Embed` counts those
    below 0 from the end, and returns NaN for others.

    Args:
      module: Module as for `split_module`, with one or more `nnx.Embed` layers.
      loss: Pure function (module, example) -> scalar, or (module, example, key), whose key seeds
        the random streams of the module.
      trained: Flax filter of the parameters with derivatives, see `split_module`.

    >>> params, loss = module_with_rows(
    ...     nnx.Embed(8, 2, rngs=nnx.Rngs(0)), lambda embed, example: embed(example).sum()
    ... )
    >>> loss(params, jax.numpy.array([1, 7])).shape
    ()

    Raises:
      ValueError: As from `split_module`; if the module has no `nnx.Embed`; and from the loss, if
        the row indices depend on parameters, or a layer is read otherwise than by look-ups.
    """
    params, run = _split(module, trained)
    layers = {
        ".".join(map(str, (*path, "embedding"))): (path, layer.dtype)
        for path, layer in nnx.iter_modules(module)
        if type(layer) is nnx.Embed
    }
    if not layers:
        raise ValueError(f"{type(module).__name__} has no nnx.Embed layer; use split_module")
    shapes, keyed = jax.eval_shape(lambda: params), takes_key(loss)

    def call(params: PyTree, read: _Read, example: PyTree, *key: Any) -> Any:
        """Returns the loss of an example whose rows come from `read`."""

        def with_readers(module: Any) -> Any:
            """Returns the loss of the module with `_Reader`s as layers."""
            tables = named_leaves(params)
            for name, (path, dtype) in layers.items():
                if name in tables:  # not if it shares another layer's table
                    module = _replaced(module, path, _Reader(name, dtype, read))
            return loss(module, example, *key)

        return run(params, with_readers, key[0] if key else None)

    def lookups(example: PyTree, *key: Any) -> dict[str, Array]:
        """Returns the row indices of an example, int[...] by table name."""
        return _recorded_lookups(call, shapes, example, *key)

    def loss_of_rows(params: PyTree, rows: dict[str, Array], example: PyTree, *key: Any) -> Any:
        """Returns the loss of an example, given its rows by table name."""
        unread = {name: table.reshape(-1, table.shape[-1]) for name, table in rows.items()}

        def read(name: str, ids: Array) -> Array:
            """Returns the next rows of a table, in the order of the look-ups."""
            taken, unread[name] = unread[name][: ids.size], unread[name][ids.size :]
            return taken.reshape(*ids.shape, taken.shape[-1])

        return call(params, read, example, *key)

    return params, RowLoss(lookups, loss_of_rows, keyed, keyed)


class Binding(NamedTuple):
    """Algorithm and parameters of a run that was begun with a module, or with parameters."""

    algorithm: Algorithm
    params: PyTree
    view: Callable[[PyTree], Any]
    """Returns a copy of the module with the parameters; without a module, the parameters."""
    store: Callable[[PyTree], Any]
    """Puts the parameters into the module and returns it; without a module, the parameters."""


def bind_module(algorithm: Algorithm, module: nnx.Module) -> Binding:
    """Returns the run of a loss of a module, (module, example) or (module, example, key).

    Args:
      algorithm: Algorithm whose loss takes the module.
      module: Module as for `split_module`.

    Raises:
      ValueError: As from `split_module`, or if the algorithm has tables or an own clipped sum.
    """
    params, run = _split(module, None)
    module_loss: Any = algorithm.loss_fn
    clipped_sum = algorithm.clipped_sum
    if algorithm.lazy or not isinstance(clipped_sum, ClippedSum):
        raise ValueError(
            f"params is the module {type(module).__name__}, but the loss of an algorithm with "
            "tables or a custom clipped_sum cannot be replaced: pass the parameters of "
            "split_module(module) or module_with_rows(module, loss)"
        )

    def loss(params: PyTree, example: PyTree) -> Any:
        return run(params, lambda module: module_loss(module, example), None)

    def loss_with_key(params: PyTree, example: PyTree, key: Array) -> Any:
        return run(params, lambda module: module_loss(module, example, key), key)

    loss_fn = Loss(loss_with_key if algorithm.takes_key else loss, algorithm.foreign_calls)
    clipped_sum = ClippedSum(loss_fn, clipped_sum.clipping, clipped_sum.microbatch_size)
    algorithm = algorithm._replace(loss_fn=loss_fn, clipped_sum=clipped_sum)

    def store(params: PyTree, module: Any = module) -> nnx.Module:
        nnx.update(module, params)
        return module

    return Binding(algorithm, params, lambda params: store(params, nnx.clone(module)), store)


_Read = Callable[[str, Array], Array]
"""(name of the table, row indices) -> rows, [..., width]."""


@dataclass(frozen=True)
class _Reader:
    """Layer in the place of an `nnx.Embed`, whose rows come from `read`."""

    name: str
    """Name of the layer's table."""
    dtype: Any
    read: _Read

    def __call__(self, inputs: Array) -> Array:
        rows = self.read(self.name, jax.numpy.asarray(inputs))
        return rows if self.dtype is None else rows.astype(self.dtype)

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # which Python asks for
            raise AttributeError(attribute)
        raise ValueError(
            f"{self.name} is read other than by look-ups, as .{attribute}; call the layer, or "
            "use split_module, and train without tables="
        )


def _replaced(module: Any, path: tuple[Any, ...], layer: _Reader) -> Any:
    """Returns the module with another layer at a path, changed in place."""
    if not path:
        return layer
    *owners, last = path
    owner = module
    for step in owners:
        owner = owner[step] if isinstance(step, int) else getattr(owner, step)
    if isinstance(last, int):
        owner[last] = layer
    else:
        setattr(owner, last, layer)
    return module


def _recorded_lookups(
    call: Callable[..., Any], shapes: PyTree, example: PyTree, *key: Any
) -> dict[str, Array]:
    """Returns the row indices that a module's layers are asked for, int[...] by table name."""

    def recorded_ids(params: PyTree, example: PyTree, *key: Any) -> dict[str, Array]:
        """Returns the row indices of one call, in the order of the look-ups."""
        ids_by_table: dict[str, list[Array]] = {}
        tables = named_leaves(params)

        def read(name: str, ids: Array) -> Array:
            """Records the indices, and returns rows of the whole table."""
            ids_by_table.setdefault(name, []).append(ids.ravel())
            # Values of the parameters: indices that depend on rows are refused below.
            return jax.numpy.take(tables[name], ids, axis=0, mode="clip")

        call(params, read, example, *key)
        return {name: jax.numpy.concatenate(ids) for name, ids in ids_by_table.items()}

    try:
        closed, recorded = jax.make_jaxpr(recorded_ids, return_shape=True)(shapes, example, *key)
        leaked = any(isinstance(x, jax.core.Tracer) for x in closed.consts)
    except jax.errors.UnexpectedTracerError:
        leaked = True
    if leaked:
        raise ValueError(
            "a layer of the module looks up rows inside a loop or a transformation; declare its "
            "look-ups by with_rows(lookups, loss)"
        )
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    count = len(jax.tree.leaves(shapes))
    if any(used[:count]):
        raise ValueError(
            "row indices of the module depend on its parameters; compute them from the example "
            "alone, or use split_module, and train without tables="
        )
    inputs = [
        x
        for x, is_used in zip(jax.tree.leaves((example, *key)), used[count:], strict=True)
        if is_used
    ]
    ids = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, closed.consts))(*inputs)
    return dict(jax.tree.unflatten(jax.tree.structure(recorded), ids))


def _split(
    module: nnx.Module, trained: nnx.filterlib.Filter | None
) -> tuple[PyTree, Callable[[PyTree, Callable[[Any], Any], Array | None], Any]]:
    """Returns (params, run) with run(params, call, key) = call(module)."""
    graph, params, streams, statistics, remainder = nnx.split(  # type: ignore[misc]
        module, nnx.Param, nnx.RngState, nnx.BatchStat, ...
    )
    if trained is None:
        adapted = any(isinstance(v, nnx.LoRAParam) for _, v in nnx.to_flat_state(params))
        trained = nnx.LoRAParam if adapted else nnx.Param
    is_trained = nnx.filterlib.to_predicate(trained)
    is_frozen = [
        not is_trained(path, v) for path, v in nnx.to_flat_state(params) for _ in jax.tree.leaves(v)
    ]
    frozen = frozenset(k for k, frozen_leaf in enumerate(is_frozen) if frozen_leaf)
    if is_frozen and all(is_frozen):
        names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(params)]
        listed = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if names[20:] else "")
        raise ValueError(f"trained matches no parameter of the module; there are {listed}")
    other_state = {
        jax.tree_util.keystr(path): type(variable)
        for path, variable in jax.tree_util.tree_leaves_with_path(
            remainder, is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
    }
    if other_state:
        raise ValueError(
            "the module keeps state that is no parameter "
            f"({', '.join(f'{name}: {kind.__name__}' for name, kind in other_state.items())}); "
            "per-example gradients need a pure function of parameters and example"
        )

    def run(params: PyTree, call: Callable[[Any], Any], key: Array | None) -> Any:
        """Returns `call(module)`; refuses updates of its other state."""
        if key is not None and not streams:
            raise ValueError(
                "the module holds no random stream that a key could seed; give the key to the "
                "layer that draws, for example as rngs=nnx.Rngs(dropout=key)"
            )
        if frozen:
            params = stopped(params, frozen)
        seeded = _seeded(streams, key)
        values = {path: variable.get_value() for path, variable in nnx.to_flat_state(seeded)}
        call_statistics = jax.tree.map(lambda x: x, statistics)  # variables of this call's own
        statistic_values = {
            path: variable.get_value() for path, variable in nnx.to_flat_state(call_statistics)
        }
        outputs = call(nnx.merge(graph, params, seeded, call_statistics))
        updated = nnx.to_flat_state(call_statistics)
        _refuse_updates([p for p, v in updated if v.get_value() is not statistic_values[p]])
        if key is None:  # each draw has moved its stream on
            moved = nnx.to_flat_state(seeded)
            _refuse_draws([path for path, v in moved if v.get_value() is not values[path]])
        return outputs

    return params, run


def _seeded(streams: Any, key: Array | None) -> Any:
    """Returns random streams restarted, each from its own fold of `key` if any."""
    streams_by_path = []
    for number, (path, variable) in enumerate(nnx.to_flat_state(streams)):
        value = variable.get_value()
        if isinstance(variable, nnx.RngCount):
            value = jax.numpy.zeros_like(value)
        elif key is not None:
            stream_key = jax.random.fold_in(key, number)
            value = jax.random.split(stream_key, value.shape) if value.shape else stream_key
        streams_by_path.append((path, variable.replace(value)))
    return nnx.from_flat_state(streams_by_path)


def _refuse_updates(paths: list[tuple[Any, ...]]) -> None:
    if paths:
        names = ", ".join(".".join(map(str, path)) for path in paths)
        raise ValueError(
            f"the module updates batch statistics ({names}), which mix examples without clipping "
            "or noise: use nnx.LayerNorm or nnx.GroupNorm in place of BatchNorm, or keep those of "
            "a module that was trained on public rows: module.set_attributes("
            "use_running_average=True)"
        )


def _refuse_draws(moved: list[tuple[Any, ...]]) -> None:
    if moved:
        names = ", ".join(".".join(map(str, path[:-1])) for path in moved)
        raise ValueError(
            f"the module draws random numbers ({names}) and has no key for them: call it as "
            "apply(params, *inputs, key=key) in a loss_fn(params, example, key), or split "
            "nnx.view(module, deterministic=True)"
        )
