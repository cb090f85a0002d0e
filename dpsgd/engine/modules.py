"""Flax modules as pure functions of their parameters; other state is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import Array

from dpsgd.gradients.frozen import stopped

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
    graph, params, streams, statistics, rest = nnx.split(  # type: ignore[misc]
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
            rest, is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
    }
    if other_state:
        raise ValueError(
            "the module keeps state that is no parameter "
            f"({', '.join(f'{name}: {kind.__name__}' for name, kind in other_state.items())}); "
            "per-example gradients need a pure function of parameters and example"
        )

    def apply(params: PyTree, *inputs: Any, key: Array | None = None, **options: Any) -> Any:
        if key is not None and not streams:
            raise ValueError(
                "the module holds no random stream that a key could seed; give the key to what "
                "draws, for example as rngs=nnx.Rngs(dropout=key)"
            )
        if frozen:
            params = stopped(params, frozen)
        seeded = _seeded(streams, key)
        values = {path: variable.get_value() for path, variable in nnx.to_flat_state(seeded)}
        call_statistics = jax.tree.map(lambda x: x, statistics)  # variables of this call's own
        statistic_values = {
            path: variable.get_value() for path, variable in nnx.to_flat_state(call_statistics)
        }
        outputs = nnx.merge(graph, params, seeded, call_statistics)(*inputs, **options)
        _refuse_updates(
            [
                p
                for p, v in nnx.to_flat_state(call_statistics)
                if v.get_value() is not statistic_values[p]
            ]
        )
        if key is None:  # each draw has moved its stream on
            moved = nnx.to_flat_state(seeded)
            _refuse_draws([path for path, v in moved if v.get_value() is not values[path]])
        return outputs

    return params, apply


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
