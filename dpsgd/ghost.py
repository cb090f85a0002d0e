"""Exact per-example clipping in one backward pass, without per-example gradients.

For one example, a use of a parameter as y = a W, with cotangent g of y, gives W the gradient
a^T g. So one backward pass that stops at the outputs y, with the activations a of the forward
pass, holds everything (book-keeping: Bu, Wang, Zha and Karypis, 2023, "Differentially Private
Optimization on Large Model at Small Cost", arXiv:2210.00038):

  * norms, by ||a^T g||_F^2 = ||a||^2 ||g||^2 without a sequence axis (Goodfellow, 2015, "Efficient
    per-example gradient computations", arXiv:1510.01799); with one of length S, of a [S, c] and
    g [S, n], by the Gram product sum_{s,t} (a_s . a_t) (g_s . g_t) (Li et al., 2022,
    arXiv:2110.05679) or from a^T g itself, whichever takes fewer operations: S^2 (c + n) or S c n.
    The memory of the cheaper one never exceeds S (c + n) numbers an example, the activations
    themselves. For look-ups, the cotangents of a row that occurs repeatedly are summed, then
    squared. Parameters used several times get their cross terms;
  * the clipped sum, by the transpose of the operation over the whole batch applied to the scaled
    cotangents: one contraction, one convolution, or one scatter-add.

A parameter with a use that has no rule is differentiated by vmap(grad), it alone; see
`dpsgd.explain`.

Rounding. Where a norm is a sum of squares it is as accurate as in `dpsgd.norms`. A Gram product
adds numbers of both signs, with an absolute error of a few u times its diagonal D = sum_s ||a_s||^2
||g_s||^2 (the errors of the S^2 terms are independent of each other); 16 u D is added to it, so
that cancellation cannot hide a large gradient. In the ordinary case, D near the square, the norm
comes out 5e-7 too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from dpsgd import norms
from dpsgd.taps import Path, Taps, Use, find_taps

PyTree = Any
_HIGHEST = lax.Precision.HIGHEST
_GRAM_MARGIN = 2.0**-20
_PAIRWISE_ROWS = 64
"""Up to so many look-ups an example, repeated rows are found by comparing all pairs."""


class Gradients(NamedTuple):
    """What a method knows about the gradients of one (micro)batch of B examples.

    Attributes:
      losses: [B].
      norm: The B gradient norms over all parameters together.
      add_clipped: (sum so far, factor) -> sum so far + sum of the contributions under that factor.
    """

    losses: Array
    norm: norms.Norm
    add_clipped: Callable[[PyTree, norms.ClipFactor], PyTree]


@dataclass(frozen=True)
class Contraction:
    """A use whose gradient is sum_s left_s right_s^T for each index of `batch`, s < `length`.

    The sides are named by the parameter's axes: `inner` is contracted with the activation, `outer`
    shows up in the output. Sizes are the products of those axes.
    """

    inner: tuple[str, ...]
    outer: tuple[str, ...]
    batch: tuple[str, ...]
    inner_size: int
    outer_size: int
    batch_size: int
    length: int


@dataclass(frozen=True)
class Rows:
    """A use that looks up `count` rows of the parameter, each a block of `width` entries.

    A row is named by its position in the axes `rows`, in the order of their names.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    count: int
    width: int


@dataclass(frozen=True)
class Route:
    """How the gradients of one parameter are obtained.

    Attributes:
      kind: "unused", "vmap", "entries" (per-example gradients of this parameter, from taps),
        "slice" (norm of the cotangent), "rows", "outer" or "gram".
      why: One line for people.
      floats: Numbers that each example takes beyond the backward pass: gradients, and again scaled.
    """

    kind: str
    why: str
    floats: int


def _named(use: Use, axes: Sequence[int]) -> tuple[list[int], tuple[str, ...]]:
    """Sorts axes of the operand by name, which makes their order the same in all uses.

    Axes of length one have no name, and none is needed.
    """
    labels, shape = use.view.labels, use.operand.shape
    ordered = sorted(axes, key=lambda axis: (labels[axis] or "", axis))
    return ordered, tuple(labels[axis] or "" for axis in ordered if shape[axis] != 1)


def _size(shape: Sequence[int], axes: Sequence[int]) -> int:
    return math.prod(shape[axis] for axis in axes)


def _dot_axes(use: Use) -> tuple[list[int], list[int], list[int], list[int]]:
    """Returns four lists of axes of a dot_general.

    They are the parameter's contracted axes, sorted by name, its batch axes and its free axes; then
    the axes of the activation that belong to the first two, in the same order.
    """
    (contracted, batch) = use.params["dimension_numbers"]
    mine, theirs = use.position, 1 - use.position
    inner = list(zip(contracted[mine], contracted[theirs], strict=True))
    batched = list(zip(batch[mine], batch[theirs], strict=True))
    free = [k for k in range(len(use.operand.shape)) if k not in (*contracted[mine], *batch[mine])]
    order = _named(use, [w for w, _ in inner])[0]
    partner = dict(inner)
    return (
        order,
        [w for w, _ in batched],
        free,
        [partner[w] for w in order] + [a for _, a in batched],
    )


def _contraction(use: Use) -> Contraction | None:
    shape = use.operand.shape
    if use.op == "dot_general":
        inner, batch, free, _ = _dot_axes(use)
    elif use.op == "conv_general_dilated" and (
        use.params["feature_group_count"] == use.params["batch_group_count"] == 1
    ):
        out_axis, *inner = use.params["dimension_numbers"].rhs_spec
        free, batch = [out_axis], []
    else:
        return None
    outer_size, batch_size = _size(shape, free), _size(shape, batch)
    if 0 in (use.out.size, use.operand.size):
        return None
    return Contraction(
        # The entries of a patch are ordered as lax orders them, not by name: a name of their own.
        inner=_named(use, inner)[1] if use.op == "dot_general" else (f"patch{use.view.labels}",),
        outer=_named(use, free)[1],
        batch=tuple(use.view.labels[axis] or "" for axis in batch),
        inner_size=_size(shape, inner),
        outer_size=outer_size,
        batch_size=batch_size,
        length=math.prod(use.out.shape) // (outer_size * batch_size),
    )


def _factors(use: Use, activation: Array, cotangent: Array) -> tuple[Array, Array]:
    """Returns the inner [B, batch, length, inner] and the outer side [B, batch, length, outer]."""
    c = _contraction(use)
    assert c is not None
    size = activation.shape[0]
    a, g = activation.astype(jnp.float32), cotangent.astype(jnp.float32)
    if use.op == "dot_general":
        inner, batch, free, partners = _dot_axes(use)
        contracted, batched = partners[: len(inner)], partners[len(inner) :]
        rest = [k for k in range(a.ndim - 1) if k not in partners]
        a = a.transpose([0, *(1 + k for k in (*batched, *rest, *contracted))])
        # The output has the batch axes, then the left operand's free axes, then the right one's.
        mine = [len(batch) + (len(rest) if use.position else 0) + k for k in range(len(free))]
        outer = [mine[free.index(k)] for k in _named(use, free)[0]]
        others = [k for k in range(g.ndim - 1) if k not in mine]
        g = g.transpose([0, *(1 + k for k in (*others, *outer))])
    else:
        a, g = _patches(use, a, g)
    return (
        a.reshape(size, c.batch_size, c.length, c.inner_size),
        g.reshape(size, c.batch_size, c.length, c.outer_size),
    )


def _fold(x: Array, y: Array) -> tuple[Array, Array]:
    """Moves the magnitude of each vector of x, a power of two, to its partner in y.

    Then y alone tells how large the products are. Scaling the one side of an example as a whole
    would not do: where the other side is tiny or zero, it may be scaled to infinity, and 0 * inf is
    NaN.
    """
    # In two dimensions: compilers see that these are the activations and cotangents themselves, and
    # the maxima those of the norms, and keep no second copy.
    count = math.prod(x.shape[:-1])
    flat = x.reshape(count, x.shape[-1])
    scale = norms.row_scale(flat)[:, None]
    return (
        (flat * (1.0 / scale)).reshape(x.shape),
        (y.reshape(count, y.shape[-1]) * scale).reshape(y.shape),
    )


def _patches(use: Use, a: Array, g: Array) -> tuple[Array, Array]:
    """Turns a convolution into a matrix product: each output position with the inputs it sees."""
    spec = use.params["dimension_numbers"]
    size, images = a.shape[0], use.out.shape[spec.out_spec[0]]
    a = a.transpose([0, *(1 + k for k in spec.lhs_spec)])
    g = g.transpose([0, *(1 + k for k in spec.out_spec)])
    a = lax.conv_general_dilated_patches(
        a.reshape(size * images, *a.shape[2:]),
        filter_shape=[use.operand.shape[k] for k in spec.rhs_spec[2:]],
        window_strides=use.params["window_strides"],
        padding=use.params["padding"],
        lhs_dilation=use.params["lhs_dilation"],
        rhs_dilation=use.params["rhs_dilation"],
        precision=_HIGHEST,
    )
    positions = math.prod(a.shape[2:])
    a = a.reshape(size, images, a.shape[1], positions).swapaxes(2, 3)
    return a, g.reshape(size, images, g.shape[2], positions).swapaxes(2, 3)


def _row_axes(use: Use) -> tuple[int, ...] | None:
    """Returns the axes along which a look-up selects single entries, the others being whole."""
    shape = use.operand.shape
    if use.op == "gather":
        numbers = use.params["dimension_numbers"]
        axes = tuple(numbers.start_index_map)
        if numbers.operand_batching_dims or numbers.start_indices_batching_dims:
            return None
    elif use.op == "dynamic_slice":
        axes = tuple(k for k, n in enumerate(use.params["slice_sizes"]) if n != shape[k])
    else:
        return None
    sizes = use.params["slice_sizes"]
    single = all(sizes[k] == 1 for k in axes)
    whole = all(sizes[k] == shape[k] for k in range(len(shape)) if k not in axes)
    return axes if axes and single and whole and _size(shape, axes) < 2**31 else None


def _rows(use: Use) -> Rows | None:
    axes = _row_axes(use)
    if axes is None or use.out.size == 0:
        return None
    columns = [k for k in range(len(use.operand.shape)) if k not in axes]
    width = _size(use.operand.shape, columns)
    return Rows(
        rows=_named(use, axes)[1],
        columns=_named(use, columns)[1],
        count=use.out.size // width,
        width=width,
    )


def _look_ups(use: Use, others: Sequence[Array], cotangent: Array) -> tuple[Array, Array, Array]:
    """Returns what a use looks up, and the cotangents.

    Returns:
      The index of each look-up, int32[B, count, axes]; the same as one number, int32[B, count]; the
      cotangents of the rows, float32[B, count, width], zero for look-ups out of bounds, from which
      no gradient flows.
    """
    axes, rows, shape = _row_axes(use), _rows(use), use.operand.shape
    assert axes is not None
    assert rows is not None
    size = cotangent.shape[0]
    columns = [k for k in range(len(shape)) if k not in axes]
    if use.op == "gather":
        numbers = use.params["dimension_numbers"]
        index = others[0].reshape(size, rows.count, len(axes))
        clamps = use.params["mode"] == lax.GatherScatterMode.CLIP
        # The axes of the output that run along the operand's, in the same order.
        present = [k for k in range(len(shape)) if k not in numbers.collapsed_slice_dims]
        position = dict(zip(present, numbers.offset_dims, strict=True))
    else:
        index = jnp.stack([others[k] for k in axes], axis=-1)[:, None]
        clamps, position = True, {k: k for k in range(len(shape))}
    along = [position[k] for k in _named(use, columns)[0]]
    across = [d for d in range(cotangent.ndim - 1) if d not in along]
    h = cotangent.astype(jnp.float32).transpose([0, *(1 + d for d in (*across, *along))])
    h = h.reshape(size, rows.count, rows.width)

    index = index.astype(jnp.promote_types(index.dtype, jnp.int32))
    limits = jnp.asarray([shape[k] - 1 for k in axes], index.dtype)
    if not clamps:
        inside = jnp.all((index >= 0) & (index <= limits), axis=-1)
        h = jnp.where(inside[..., None], h, 0.0)
    index = jnp.clip(index, 0, limits).astype(jnp.int32)
    flat = jnp.zeros((size, rows.count), jnp.int32)
    for k in _named(use, axes)[0]:
        flat = flat * shape[k] + index[..., axes.index(k)]
    return index, flat, h


def _sum_repeated(flat: Array, h: Array) -> Array:
    """Sums, for each example, the vectors h[B, K, :] of equal rows flat[B, K].

    Each sum takes the place of one of its terms; zeros take the others'.
    """
    count = flat.shape[1]
    if count == 1:
        return h
    if count <= _PAIRWISE_ROWS:
        same = flat[:, :, None] == flat[:, None, :]
        first = ~jnp.any(same & jnp.tri(count, k=-1, dtype=bool), axis=2)
        sums = jnp.einsum("bkl,bld->bkd", same.astype(h.dtype), h, precision=_HIGHEST)
        return jnp.where(first[..., None], sums, 0.0)

    def one(ids: Array, x: Array) -> Array:
        order = jnp.argsort(ids)
        ordered = ids[order]
        starts = jnp.pad(ordered[1:] != ordered[:-1], (1, 0))
        start = lax.cummax(jnp.where(starts, jnp.arange(count), 0))
        place = jnp.zeros_like(order).at[order].set(order[start])
        return jnp.zeros_like(x).at[place].add(x)

    return jax.vmap(one)(flat, h)


def _gram_norm(left: Array, right: Array, look_ups: tuple[Array, Array, bool] | None) -> norms.Norm:
    """Returns the norm of sum_s left_s right_s^T, [B, batch, s, :], plus the looked-up rows.

    Args:
      left: One side of the contractions.
      right: The other one.
      look_ups: Flat row indices, their cotangents, and whether the rows are the left side's.
    """
    left, right = _fold(left, right)
    size = left.shape[0]
    largest = jnp.max(jnp.abs(right), axis=(1, 2, 3))
    if look_ups is not None:
        largest = jnp.maximum(largest, jnp.max(jnp.abs(look_ups[1]), axis=(1, 2)))
    unit = norms.power_of_two(largest)
    right = right * (1.0 / unit)[:, None, None, None]
    ll, rr = (jnp.einsum("bksc,bktc->bkst", x, x, precision=_HIGHEST) for x in (left, right))
    square = jnp.sum((ll * rr).reshape(size, -1), axis=1)
    diagonal = jnp.einsum("bkss,bkss->b", ll, rr)
    if look_ups is not None:
        flat, h, rows_left = look_ups
        h = h * (1.0 / unit)[:, None, None]
        by_row, by_column = (left, right) if rows_left else (right, left)
        weight = jnp.take_along_axis(by_row[:, 0], flat[:, None, :], axis=2)
        dots = jnp.einsum("bsd,bkd->bsk", by_column[:, 0], h, precision=_HIGHEST)
        square += 2 * jnp.sum(weight * dots, axis=(1, 2))
        square += jnp.sum(jnp.square(_sum_repeated(flat, h)), axis=(1, 2))
        diagonal += jnp.sum(jnp.square(h), axis=(1, 2))
    # Rounding may leave a small negative number where everything cancels; NaN stays NaN.
    square = jnp.maximum(square, 0.0) + _GRAM_MARGIN * diagonal
    # As in `norms.product`: products of the sides that may leave the float32 range.
    return norms.Norm(unit, jnp.where(largest < 2.0**126, square, jnp.inf))


def choose_route(taps: Taps, leaf: int, shape: tuple[int, ...]) -> Route:
    """Chooses how to obtain the gradients of parameter number `leaf`."""
    uses, size = taps.uses[leaf], math.prod(shape)
    if leaf in taps.obstacle:
        return Route("vmap", f"used by {taps.obstacle[leaf]}, which has no rule", 2 * size)
    if not uses or size == 0:
        return Route("unused", "the loss does not depend on it", 0)
    ops = ", ".join(f"{u.op}" for u in uses)
    if not all(u.view.isometric for u in uses):
        return Route("entries", f"{ops} after a broadcast", 2 * size)
    look_ups = [r for u in uses if (r := _rows(u))]
    products = [c for u in uses if (c := _contraction(u))]
    if len(look_ups) + len(products) < len(uses):
        if len(uses) == 1 and uses[0].op == "dynamic_slice":
            return Route("slice", "dynamic_slice of distinct entries", 0)
        return Route("entries", ops, 2 * size)
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


def _entries(uses: Sequence[Use], shape: tuple[int, ...], others: Any, cotangents: Any) -> Array:
    """Returns the gradient of each example, float32[B, *shape]."""

    def one(use: Use, operands: list[Array], g: Array) -> Array:
        parameter = jax.ShapeDtypeStruct(shape, jnp.float32)
        operands = [_as_float32(x) for x in operands]
        return jax.linear_transpose(lambda w: use.linear(w, operands), parameter)(g)[0]

    parts = [
        jax.vmap(lambda x, g, use=use: one(use, x, g))(
            others[use.path], cotangents[use.path].astype(jnp.float32)
        )
        for use in uses
    ]
    return sum(parts[1:], start=parts[0])


def _as_float32(x: Array) -> Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


@dataclass(frozen=True)
class Parts:
    """What norm and sum of one parameter are made of, by the path of the use.

    Attributes:
      products: Both sides of the contractions, see `_factors`.
      look_ups: Index and cotangents, see `_look_ups`.
    """

    products: dict[Path, tuple[Array, Array]]
    look_ups: dict[Path, tuple[Array, Array, Array]]


def _parts(route: Route, uses: Sequence[Use], others: Any, cotangents: Any) -> Parts:
    products = {
        u.path: _factors(u, others[u.path][0], cotangents[u.path]) for u in uses if _contraction(u)
    }
    look_ups = {u.path: _look_ups(u, others[u.path], cotangents[u.path]) for u in uses if _rows(u)}
    if route.kind == "rows":
        # Equal rows are summed once, over all uses, so that the vector whose norm is taken is the
        # one that is scattered.
        paths = list(look_ups)
        flat = jnp.concatenate([look_ups[p][1] for p in paths], axis=1)
        h = _sum_repeated(flat, jnp.concatenate([look_ups[p][2] for p in paths], axis=1))
        start = 0
        for p in paths:
            index, row, _ = look_ups[p]
            look_ups[p] = (index, row, h[:, start : start + row.shape[1]])
            start += row.shape[1]
    return Parts(products, look_ups)


def _norm(route: Route, uses: Sequence[Use], parts: Parts, cotangents: Any) -> norms.Norm:
    """Returns the norms over one parameter, for the routes that form no entries."""
    if route.kind == "slice":
        return norms.norm(cotangents[uses[0].path])
    looked_up = [parts.look_ups[u.path] for u in uses if u.path in parts.look_ups]
    if route.kind == "rows":
        return norms.norm(jnp.concatenate([h for _, _, h in looked_up], axis=1))
    contractions = [c for u in uses if (c := _contraction(u))]
    factors = [parts.products[u.path] for u in uses if u.path in parts.products]
    first = contractions[0]
    if route.kind == "outer":
        inner, outer = factors[0]
        return norms.combine(
            [
                norms.product(norms.norm(inner[:, k]), norms.norm(outer[:, k]))
                for k in range(first.batch_size)
            ]
        )
    # Two uses of one parameter may contract opposite sides of it: align them.
    aligned = [
        (x, y) if c.inner == first.inner else (y, x)
        for (x, y), c in zip(factors, contractions, strict=True)
    ]
    left, right = (jnp.concatenate(side, axis=2) for side in zip(*aligned, strict=True))
    if not looked_up:
        return _gram_norm(left, right, None)
    flat = jnp.concatenate([x[1] for x in looked_up], axis=1)
    h = jnp.concatenate([x[2] for x in looked_up], axis=1)
    rows_left = any(r.rows == first.inner for u in uses if (r := _rows(u)))
    return _gram_norm(left, right, (flat, h, rows_left))


def _add_use(
    total: Array,
    use: Use,
    parts: Parts,
    others: Sequence[Array],
    cotangent: Array,
    factor: norms.ClipFactor,
) -> Array:
    """Adds the clipped gradients of one use, summed over the batch, to `total`."""
    if use.path in parts.look_ups and use.view.whole:
        return _add_rows(total, use, *parts.look_ups[use.path], factor)
    if use.op == "dot_general":
        return total + _transpose_view(use, total, _sum_products(use, parts, factor))
    # What is left is a convolution, a slice, or a look-up in a rearranged parameter.
    kept = [norms.select(factor, x) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in others]
    scaled = norms.contribution(factor, cotangent)
    # Huge cotangents of tiny activations may overflow here: then the example gives this parameter
    # nothing, which makes its contribution smaller.
    finite = jnp.all(jnp.isfinite(scaled), axis=tuple(range(1, scaled.ndim)), keepdims=True)
    scaled = jnp.where(finite, scaled, 0.0)

    def whole_batch(parameter: Array) -> Array:
        return jax.vmap(lambda x: use.linear(parameter, x), axis_size=len(scaled))(kept)

    parameter = jax.ShapeDtypeStruct(total.shape, jnp.float32)
    return total + jax.linear_transpose(whole_batch, parameter)(scaled)[0]


def _add_rows(
    total: Array, use: Use, index: Array, flat: Array, h: Array, factor: norms.ClipFactor
) -> Array:
    """Scatters rows straight into the running sum: no second buffer of the table's size."""
    axes = _row_axes(use)
    assert axes is not None
    shape = use.operand.shape
    columns = [k for k in range(len(shape)) if k not in axes]
    rows = norms.contribution(factor, h)
    names = _named(use, columns)[0]
    rows = rows.reshape(-1, *(shape[k] for k in names))
    rows = rows.transpose([0, *(1 + names.index(k) for k in columns)])
    numbers = lax.ScatterDimensionNumbers(
        tuple(range(1, 1 + len(columns))), tuple(sorted(axes)), axes
    )
    # The indices are inside: `_look_ups` saw to it.
    return lax.scatter_add(
        total,
        index.reshape(-1, len(axes)),
        rows,
        numbers,
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


def _sum_products(use: Use, parts: Parts, factor: norms.ClipFactor) -> Array:
    """Contracts the scaled sides over batch and sequence; the result has the operand's layout."""
    c = _contraction(use)
    assert c is not None
    left, right = parts.products[use.path]
    subscripts = "bksi,bkso->kio"
    if c.batch_size == 1:
        left, right, subscripts = left[:, 0], right[:, 0], "bsi,bso->io"
        if c.length == 1:
            left, right, subscripts = left[:, 0], right[:, 0], "bi,bo->io"
    total = _contract(subscripts, left, right, factor)
    inner, batch, free, _ = _dot_axes(use)
    order = [*batch, *inner, *_named(use, free)[0]]
    total = total.reshape([use.operand.shape[k] for k in order])
    return total.transpose([order.index(k) for k in range(len(order))])


def _contract(subscripts: str, left: Array, right: Array, factor: norms.ClipFactor) -> Array:
    """Contracts two sides whose products, for each example, are a gradient, and clips it.

    The right side, cotangents, is scaled without looking at the left one: a dense layer and its
    bias have the same cotangents, and share the scaled ones.
    """
    right, left = _fold(right, left)
    left, right = norms.normalized(factor, left), norms.shortened(factor, right)
    return jnp.einsum(subscripts, left, right, precision=_HIGHEST)


def _sum_entries(g: Array, factor: norms.ClipFactor) -> Array:
    """Sums the clipped gradients g[B, ...] of one parameter: a layer whose input is one."""
    size = g.shape[0]
    total = _contract("bi,bo->io", jnp.ones((size, 1)), g.reshape(size, g[0].size), factor)
    return total.reshape(g.shape[1:])


def _transpose_view(use: Use, like: Array, x: Array) -> Array:
    """Brings a cotangent of the operand of a use back to the parameter's own layout."""
    parameter = jax.ShapeDtypeStruct(like.shape, jnp.float32)
    return jax.linear_transpose(use.view, parameter)(x)[0]


def gradients(
    loss_fn: Callable[[PyTree, PyTree], Array], params: PyTree, batch: PyTree
) -> Gradients:
    """Differentiates the losses of `batch` once; norms and clipped sums are then algebra.

    Args:
      loss_fn: (params, example) -> scalar.
      params: Tree of floating-point arrays.
      batch: Tree of arrays with a leading axis of B examples.
    """
    params = jax.tree.map(jnp.asarray, params)
    taps = find_taps(loss_fn, params, _first_example(batch))
    leaves = jax.tree.leaves(params)
    routes = [choose_route(taps, k, leaf.shape) for k, leaf in enumerate(leaves)]
    direct = {k: leaves[k] for k, route in enumerate(routes) if route.kind == "vmap"}

    def loss(variables: tuple[dict, dict], example: PyTree) -> tuple[Array, Any]:
        own, zeros = variables
        return taps.loss([own.get(k, leaf) for k, leaf in enumerate(leaves)], example, zeros)

    (losses, others), (own, cotangents) = jax.vmap(
        jax.value_and_grad(loss, has_aux=True), in_axes=(None, 0)
    )((direct, taps.zeros()), batch)

    formed, parts = dict(own), {}
    for k, route in enumerate(routes):
        if route.kind == "entries":
            formed[k] = _entries(taps.uses[k], leaves[k].shape, others, cotangents)
        elif route.kind not in ("unused", "vmap"):
            parts[k] = _parts(route, taps.uses[k], others, cotangents)
    squares = [norms.norm(g) for g in formed.values()] + [
        _norm(routes[k], taps.uses[k], part, cotangents) for k, part in parts.items()
    ]
    norm = norms.combine(squares) if squares else norms.norm(jnp.zeros((losses.shape[0], 1)))

    def add_clipped(total: PyTree, factor: norms.ClipFactor) -> PyTree:
        sums, structure = jax.tree.flatten(total)
        for k in range(len(leaves)):
            if k in formed:
                sums[k] += _sum_entries(formed[k].astype(jnp.float32), factor)
            elif k in parts:
                for u in taps.uses[k]:
                    sums[k] = _add_use(
                        sums[k], u, parts[k], others[u.path], cotangents[u.path], factor
                    )
        return jax.tree.unflatten(structure, sums)

    return Gradients(losses, norm, add_clipped)


def _first_example(batch: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
