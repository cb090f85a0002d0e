"""Routes: the cheapest exact way to obtain the gradients of each parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpsgd.gradients.ghost.uses import contraction_of, rows_of
from dpsgd.gradients.taps import Taps


@dataclass(frozen=True)
class Route:
    """Way to obtain the gradients of one parameter.

    Attributes:
      kind: "frozen", "unused", "vmap", "entries" (gradients of each example, from taps), "slice"
        (norm of the cotangent), "rows", "outer" or "gram".
      why: Reason for the route, one line.
      floats: Numbers per example beyond the backward pass: gradients, and their scaled copies.
    """

    kind: str
    why: str
    floats: int


FROZEN = Route("frozen", "no derivative of the loss reaches it", 0)


def choose_route(taps: Taps, leaf: int, shape: tuple[int, ...]) -> Route:
    """Chooses the route to the gradients of one parameter.

    Args:
      taps: Taps of the loss.
      leaf: Index of the parameter.
      shape: Shape of the parameter.
    """
    uses, size = taps.uses[leaf], math.prod(shape)
    if leaf in taps.obstacle:
        return Route("vmap", f"used by {taps.obstacle[leaf]}, which has no rule", 2 * size)
    if not uses or size == 0:
        return Route("unused", "the loss does not depend on it", 0)
    ops = ", ".join(f"{u.op}" for u in uses)
    if not all(u.view.isometric for u in uses):
        return Route("entries", f"{ops} after a broadcast", 2 * size)
    look_ups = [r for u in uses if (r := rows_of(u))]
    products = [c for u in uses if (c := contraction_of(u))]
    if len(look_ups) + len(products) < len(uses):
        if len(uses) == 1 and uses[0].op == "dynamic_slice":
            return Route("slice", "dynamic_slice of distinct entries", 0)
        return Route("entries", ops, 2 * size)
    if len({u.view.slicing for u in uses}) > 1:
        return Route("entries", f"{ops} of different parts", 2 * size)
    same_rows = len({(r.rows, r.columns) for r in look_ups}) <= 1
    sides = {(frozenset((c.inner, c.outer)), c.batch) for c in products}
    if not products:
        if not same_rows:
            return Route("entries", f"{ops} of different axes", 2 * size)
        count = sum(r.count for r in look_ups)
        width = look_ups[0].width
        return Route("rows", f"look-up of {count} rows of {width}", 2 * count * width)
    if look_ups:
        sides |= {(frozenset((r.rows, r.columns)), ()) for r in look_ups}
    first = products[0]
    if not same_rows or len(sides) > 1:
        return Route("entries", f"{ops} of different axes", 2 * size)
    length = sum(c.length for c in products)
    if length == 1 and len(uses) == 1:
        return Route("outer", f"{ops} without a sequence axis", 0)
    side = first.inner_size + first.outer_size
    gram = first.batch_size * (2 * length**2 + sum(r.count for r in look_ups) * length)
    why = f"{ops} over {length} positions"
    if first.inner_size * first.outer_size <= length * side:
        return Route("entries", f"{why}: fewer operations than its Gram product", 2 * size)
    return Route("gram", f"{why}: fewer operations than its entries", gram)
