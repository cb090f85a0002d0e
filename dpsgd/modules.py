"""Flax modules as pure functions of their parameters, or a refusal where they are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

PyTree = Any


def split_module(module: nnx.Module) -> tuple[PyTree, Callable[..., Any]]:
    """Returns (params, apply), with apply(params, *inputs) = module(*inputs) and no other state.

    The guarantee bounds what one example does to the sum of gradients. State that a module keeps
    beside its parameters goes around that sum: batch statistics are averages over examples that
    nobody clips and nobody noises, and they are part of the trained model. So a module that has any
    is refused.

    >>> params, apply = split_module(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
    >>> apply(params, jax.numpy.ones(2)).shape
    (1,)

    Args:
      module: Any module whose variables are all `nnx.Param`.

    Raises:
      ValueError: if there are batch statistics or other variables that are no parameters.
    """
    graph, params, rest = nnx.split(module, nnx.Param, ...)  # type: ignore[misc]
    other = {
        jax.tree_util.keystr(path): type(variable)
        for path, variable in jax.tree_util.tree_leaves_with_path(
            rest, is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
    }
    statistics = [name for name, kind in other.items() if issubclass(kind, nnx.BatchStat)]
    if statistics:
        raise ValueError(
            f"the module keeps batch statistics ({', '.join(statistics)}), which mix examples "
            "without clipping or noise: use nnx.LayerNorm or nnx.GroupNorm in place of BatchNorm"
        )
    if other:
        raise ValueError(
            "the module keeps state that is no parameter "
            f"({', '.join(f'{name}: {kind.__name__}' for name, kind in other.items())}); "
            "per-example gradients need a pure function of parameters and example"
        )

    def apply(params: PyTree, *inputs: Any) -> Any:
        return nnx.merge(graph, params)(*inputs)

    return params, apply


def refuse_batch_statistics(params: PyTree) -> None:
    """Raises ValueError if `params` hold batch statistics, of flax.nnx or of flax.linen."""

    def is_variable(x: Any) -> bool:
        return isinstance(x, nnx.Variable)

    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_variable):
        name = jax.tree_util.keystr(path)
        if isinstance(leaf, nnx.BatchStat) or "['batch_stats']" in name:
            raise ValueError(
                f"the parameters hold the batch statistic {name}, which is no parameter: it mixes "
                "examples without clipping or noise; use LayerNorm or GroupNorm in place of "
                "BatchNorm"
            )
