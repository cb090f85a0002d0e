"""Flax modules as pure functions of their parameters, or a refusal where they are none."""

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
    """Returns (params, apply), with apply(params, *inputs) = module(*inputs) and no other state.

    The guarantee bounds what one example does to the sum of gradients. State that a module keeps
    beside its parameters goes around that sum: batch statistics are averages over examples
    without clipping or noise, and they are part of the trained model. So a module that updates any
    is refused when `apply` is called. One that only reads them, as after
    ``module.set_attributes(use_running_average=True)``, keeps those that it has, which must not
    depend on private rows.

    >>> params, apply = split_module(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
    >>> apply(params, jax.numpy.ones(2)).shape
    (1,)

    **Dropout.** Random streams that a module holds, as `nnx.Dropout(0.1, rngs=rngs)` does, are no
    state here: apply(params, *inputs, key=key) seeds each of them anew from `key`, and without a
    key nothing may be drawn from them. So the loss is
    ``lambda params, example, key: loss(apply(params, example, key=key))``. Other arguments by name
    are the module's own: where its layers hold no stream, ``rngs=nnx.Rngs(dropout=key)``. For
    predictions, split ``nnx.view(module, deterministic=True)``, whose parameters have the same
    tree.

    Args:
      module: Any module whose variables are all `nnx.Param`, the state of random streams, or batch
        statistics that it only reads.
      trained: Which parameters have derivatives, as a filter of flax, such as
        ``nnx.Any(nnx.LoRAParam, nnx.PathContains("head"))``; training leaves the others as they
        are. By default `nnx.LoRAParam` where the module has such parameters, and else all.

    Raises:
      ValueError: if there are other variables that are no parameters, or `trained` matches no
        parameter; from `apply`, if batch statistics are updated, numbers are drawn without a key,
        or a key is given and there is no stream.
    """
    graph, params, streams, statistics, rest = nnx.split(  # type: ignore[misc]
        module, nnx.Param, nnx.RngState, nnx.BatchStat, ...
    )
    if trained is None:
        adapted = any(isinstance(v, nnx.LoRAParam) for _, v in nnx.to_flat_state(params))
        trained = nnx.LoRAParam if adapted else nnx.Param
    is_trained = nnx.filterlib.to_predicate(trained)
    kept = [
        not is_trained(path, v) for path, v in nnx.to_flat_state(params) for _ in jax.tree.leaves(v)
    ]
    frozen = frozenset(k for k, keep in enumerate(kept) if keep)
    if kept and all(kept):
        names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(params)]
        shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if names[20:] else "")
        raise ValueError(f"trained matches no parameter of the module; there are {shown}")
    other = {
        jax.tree_util.keystr(path): type(variable)
        for path, variable in jax.tree_util.tree_leaves_with_path(
            rest, is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
    }
    if other:
        raise ValueError(
            "the module keeps state that is no parameter "
            f"({', '.join(f'{name}: {kind.__name__}' for name, kind in other.items())}); "
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
        before = {path: variable.get_value() for path, variable in nnx.to_flat_state(seeded)}
        read = jax.tree.map(lambda x: x, statistics)  # variables of this call's own
        known = {path: variable.get_value() for path, variable in nnx.to_flat_state(read)}
        outputs = nnx.merge(graph, params, seeded, read)(*inputs, **options)
        _refuse_updates([p for p, v in nnx.to_flat_state(read) if v.get_value() is not known[p]])
        if key is None:  # each draw has moved its stream on
            after = nnx.to_flat_state(seeded)
            _refuse_draws([path for path, v in after if v.get_value() is not before[path]])
        return outputs

    return params, apply


def _seeded(streams: Any, key: Array | None) -> Any:
    """Returns the state of random streams that begin, each in its own way, with `key` if any."""
    found = []
    for number, (path, variable) in enumerate(nnx.to_flat_state(streams)):
        value = variable.get_value()
        if isinstance(variable, nnx.RngCount):
            value = jax.numpy.zeros_like(value)
        elif key is not None:
            own = jax.random.fold_in(key, number)
            value = jax.random.split(own, value.shape) if value.shape else own
        found.append((path, variable.replace(value)))
    return nnx.from_flat_state(found)


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
