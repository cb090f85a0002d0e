"""Uses of a parameter by named axes: contractions and look-ups of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpsgd.gradients.taps import Use


@dataclass(frozen=True)
class Contraction:
    """Use with gradient sum_s left_s right_s^T for each index of `batch`, s < `length`.

    The sides are named by the parameter's axes: `inner` is contracted with the activation, `outer`
    is in the output. Sizes are the products of those axes.
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
    """Use that looks up `count` rows of the parameter, blocks of `width` entries.

    A row is identified by its position in the axes `rows`, in the order of their names.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    count: int
    width: int


def named_axes(use: Use, axes: Sequence[int]) -> tuple[list[int], tuple[str, ...]]:
    """Sorts operand axes by name, alike in all uses.

    Axes of length one have no name.

    Args:
      use: Use of a parameter.
      axes: Axes of its operand.

    Returns:
      (axes in order, names of those longer than one).
    """
    labels, shape = use.view.labels, use.operand.shape
    ordered = sorted(axes, key=lambda axis: (labels[axis] or "", axis))
    return ordered, tuple(labels[axis] or "" for axis in ordered if shape[axis] != 1)


def size_of(shape: Sequence[int], axes: Sequence[int]) -> int:
    """Returns the number of entries along some axes."""
    return math.prod(shape[axis] for axis in axes)


def dot_axes(use: Use) -> tuple[list[int], list[int], list[int], list[int]]:
    """Returns four lists of axes of a dot_general.

    The lists are the parameter's contracted axes, sorted by name, its batch axes and its free axes;
    then the axes of the activation that belong to the first two, in the same order.
    """
    (contracted, batch) = use.params["dimension_numbers"]
    side, facing = use.position, 1 - use.position
    inner = list(zip(contracted[side], contracted[facing], strict=True))
    batched = list(zip(batch[side], batch[facing], strict=True))
    free = [k for k in range(len(use.operand.shape)) if k not in (*contracted[side], *batch[side])]
    order = named_axes(use, [w for w, _ in inner])[0]
    partner = dict(inner)
    return (
        order,
        [w for w, _ in batched],
        free,
        [partner[w] for w in order] + [a for _, a in batched],
    )


def contraction_of(use: Use) -> Contraction | None:
    """Returns the use as a contraction, or None."""
    shape = use.operand.shape
    if use.op == "dot_general":
        inner, batch, free, _ = dot_axes(use)
    elif use.op == "conv_general_dilated" and (
        use.params["feature_group_count"] == use.params["batch_group_count"] == 1
    ):
        out_axis, *inner = use.params["dimension_numbers"].rhs_spec
        free, batch = [out_axis], []
    else:
        return None
    outer_size, batch_size = size_of(shape, free), size_of(shape, batch)
    if 0 in (use.out.size, use.operand.size):
        return None
    # The entries of a patch are ordered as lax orders them, not by name: a name of their own.
    patch = (f"patch{[use.view.labels[axis] for axis in inner]}",)
    return Contraction(
        inner=named_axes(use, inner)[1] if use.op == "dot_general" else patch,
        outer=named_axes(use, free)[1],
        batch=tuple(use.view.labels[axis] or "" for axis in batch),
        inner_size=size_of(shape, inner),
        outer_size=outer_size,
        batch_size=batch_size,
        length=math.prod(use.out.shape) // (outer_size * batch_size),
    )


def row_axes(use: Use) -> tuple[int, ...] | None:
    """Returns the axes along which a look-up selects, or None."""
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
    complete = all(sizes[k] == shape[k] for k in range(len(shape)) if k not in axes)
    return axes if axes and single and complete and size_of(shape, axes) < 2**31 else None


def rows_of(use: Use) -> Rows | None:
    """Returns the use as a look-up of rows, or None."""
    axes = row_axes(use)
    if axes is None or use.out.size == 0:
        return None
    columns = [k for k in range(len(use.operand.shape)) if k not in axes]
    width = size_of(use.operand.shape, columns)
    return Rows(
        rows=named_axes(use, axes)[1],
        columns=named_axes(use, columns)[1],
        count=use.out.size // width,
        width=width,
    )
