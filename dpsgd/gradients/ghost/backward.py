"""One backward pass to the outputs of all uses, and the gradients' algebra after it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from dpsgd.gradients import norms
from dpsgd.gradients.ghost.norm import square_norms
from dpsgd.gradients.ghost.parts import Parts, parts_of
from dpsgd.gradients.ghost.routes import FROZEN, Route, choose_route
from dpsgd.gradients.ghost.sums import add_use, sum_entries
from dpsgd.gradients.isolation import isolated
from dpsgd.gradients.losses import allows_foreign_calls
from dpsgd.gradients.taps import Taps, Use, find_taps
from dpsgd.packing import join, packs, split

PyTree = Any


class Gradients(NamedTuple):
    """Losses, norms and clipped sums of one (micro)batch of B examples.

    Attributes:
      losses: Losses of the examples, [B].
      group_norms: The B gradient norms over each group of parameters.
      add_clipped: (sums so far, factor of each group) -> sums with the contributions added, by leaf
        index.
    """

    losses: Array
    group_norms: list[norms.Norm]
    add_clipped: Callable[[dict[int, Array], Sequence[norms.ClipFactor]], dict[int, Array]]


def gradients(
    loss_fn: Callable[[PyTree, PyTree], Array],
    params: PyTree,
    batch: PyTree,
    groups: Sequence[Sequence[int]],
    devices: int = 1,
) -> Gradients:
    """Differentiates the losses of `batch` once, for ghost clipping.

    Args:
      loss_fn: (params, example) -> scalar.
      params: Tree of floating-point arrays.
      batch: Tree of arrays with a leading axis of B examples.
      groups: Indices of the leaves that are clipped together; each leaf is in one group, or in none
        if no derivative reaches it.
      devices: Number of devices over which the compiler shards the batch.
    """
    params = jax.tree.map(jnp.asarray, params)
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    taps = find_taps(loss_fn, params, example)
    leaves = jax.tree.leaves(params)
    group_of = {k: number for number, group in enumerate(groups) for k in group}
    routes = [
        choose_route(taps, k, leaf.shape) if k in group_of else FROZEN
        for k, leaf in enumerate(leaves)
    ]
    losses, operands, trained, cotangents = _differentiated(loss_fn, taps, routes, leaves, batch)
    formed, terms_by_leaf = dict(trained), {}
    for k, (route, leaf) in enumerate(zip(routes, leaves, strict=True)):
        if route.kind == "entries":
            form = functools.partial(_entries, taps.uses[k], leaf.shape, devices)
            alone = _is_cotangent(taps.uses[k], leaf.size)
            sides = {u.path: (operands[u.path], cotangents[u.path]) for u in taps.uses[k]}
            formed[k] = form(sides) if alone else norms.once(form, sides)
        elif route.kind not in ("frozen", "unused", "vmap"):
            terms_by_leaf[k] = parts_of(route, taps.uses[k], operands, cotangents)
    terms = _Terms(taps, routes, terms_by_leaf, operands, cotangents)
    packs, joined, group_norms = [], [], []
    for number, group in enumerate(groups):
        sizes = {k: leaves[k].size for k in formed if k in group}
        lines = _packs(taps, sizes)
        arrays = [join([formed[k].astype(jnp.float32) for k in pack], lead=1) for pack in lines]
        squares = [norms.square_sums(g) for g in arrays] + terms.squares(group)
        nothing = [norms.square_sums(jnp.zeros((losses.shape[0], 1)))]
        group_norms.append(norms.norm(squares or nothing))
        packs += [(number, pack) for pack in lines]
        joined += arrays

    def add_clipped(
        total: dict[int, Array], factors: Sequence[norms.ClipFactor]
    ) -> dict[int, Array]:
        """Returns `total` plus the contributions, see `Gradients.add_clipped`."""
        sums = dict(total)
        for (number, pack), g in zip(packs, joined, strict=True):
            summed = split(sum_entries(g, factors[number]), [leaves[k].shape for k in pack])
            for k, x in zip(pack, summed, strict=True):
                sums[k] += x
        terms.add_to(sums, {k: factors[number] for k, number in group_of.items()})
        return sums

    return Gradients(losses, group_norms, add_clipped)


class _Terms(NamedTuple):
    """Terms of the leaves whose gradients are not formed, by leaf index."""

    taps: Taps
    routes: Sequence[Route]
    by_leaf: dict[int, Parts]
    operands: Any
    cotangents: Any

    def squares(self, group: Sequence[int]) -> list[Array]:
        """Returns squared norms of the gradients of a group's leaves, float64[B] each."""
        return [
            square_norms(self.routes[k], self.taps.uses[k], terms, self.cotangents)
            for k, terms in self.by_leaf.items()
            if k in group
        ]

    def add_to(self, sums: dict[int, Array], factors: Mapping[int, norms.ClipFactor]) -> None:
        """Adds the contributions to sums."""
        for k, terms in self.by_leaf.items():
            for u in self.taps.uses[k]:
                beside, cotangent = self.operands[u.path], self.cotangents[u.path]
                sums[k] = add_use(sums[k], u, terms, beside, cotangent, factors[k])


def _differentiated(
    loss_fn: Callable[[PyTree, PyTree], Array],
    taps: Taps,
    routes: Sequence[Route],
    leaves: list[Array],
    batch: PyTree,
) -> tuple[Array, Any, dict[int, Array], Any]:
    """Returns losses, operands beside parameters, gradients of leaves without rule, cotangents."""
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)

    def loss(
        variables: tuple[dict, dict], leaves: list[Array], example: PyTree
    ) -> tuple[Array, Any]:
        """Returns the tapped loss of an example, and each tap's other operands."""
        trained, zeros = variables
        return taps.loss([trained.get(k, leaf) for k, leaf in enumerate(leaves)], example, zeros)

    direct = {k: leaves[k] for k, route in enumerate(routes) if route.kind == "vmap"}
    variables = direct, taps.zeros()
    differentiated = isolated(
        jax.value_and_grad(loss, has_aux=True),
        variables,
        leaves,
        example,
        foreign_calls=allows_foreign_calls(loss_fn),
    )
    (losses, operands), (trained, cotangents) = norms.once(
        differentiated.map_rows, variables, leaves, batch
    )
    return losses, operands, trained, cotangents


def _is_cotangent(uses: Sequence[Use], size: int) -> bool:
    """Returns True for a bias of `size` numbers whose gradient is the cotangent of one output."""
    alone = [u.op for u in uses] in (["add"], ["add_any"]) and uses[0].out.size == size
    return alone and uses[0].view.isometric  # after a broadcast, cotangents are summed


def _packs(taps: Taps, sizes: Mapping[int, int]) -> list[list[int]]:
    """Returns packs of parameters whose gradients are formed and treated as one.

    A bias whose gradient is the cotangent of one output stays alone, beside its kernel.
    """
    alone = [k for k, size in sizes.items() if _is_cotangent(taps.uses[k], size)]
    return [[k] for k in alone] + packs({k: n for k, n in sizes.items() if k not in alone})


def _entries(
    uses: Sequence[Use],
    shape: tuple[int, ...],
    devices: int,
    sides: Mapping[Any, tuple[Any, Array]],
) -> Array:
    """Returns the gradient of each example, float32[B, *shape]."""

    def transpose_use(use: Use, operands: list[Array], g: Array) -> Array:
        """Returns an example's gradient by one use with output cotangent `g`."""
        parameter = jax.ShapeDtypeStruct(shape, jnp.float32)
        operands = [_as_float32(x) for x in operands]
        return jax.linear_transpose(lambda w: use.linear(w, operands), parameter)(g)[0]

    def map_rows(use: Use) -> Callable[[list[Array], Array], Array]:
        """Returns `transpose_use` for all examples."""
        if devices > 1 and use.op == "conv_general_dilated":
            # XLA shards feature groups wrongly: rows beyond device 0 would add no gradient.
            return lambda *rows: lax.map(lambda row: transpose_use(use, *row), rows)
        return jax.vmap(functools.partial(transpose_use, use))

    gradients_by_use = [
        map_rows(use)(sides[use.path][0], sides[use.path][1].astype(jnp.float32)) for use in uses
    ]
    return sum(gradients_by_use[1:], start=gradients_by_use[0])


def _as_float32(x: Array) -> Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
