"""Reads named arrays from untrusted .npz files.

`npz_shapes` refuses compressed arrays, so that a file takes no more memory than its size.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.files import DAMAGED
from dpsgd.gradients.frozen import leaf_names

PyTree = Any


class ParameterMismatch(ValueError):
    """Raised if a file holds the parameters of another model."""


def read_arrays(path: Path, like: PyTree, *, cast: bool = False) -> PyTree:
    """Reads a pytree of arrays by name.

    Args:
      path: .npz file; a checkpoint is refused.
      like: Pytree with the structure, shapes and dtypes of the arrays.
      cast: True to convert floating-point arrays to the dtypes of `like`.

    Raises:
      ParameterMismatch: if the file lacks an array of `like` or holds others.
      ValueError: if the file is damaged, or has entries that are not finite after a cast.
    """
    shapes = npz_shapes(path)
    if "ledger_head" in shapes:
        raise ValueError(
            f"{path} is a checkpoint, which is not released: finish its run by `dpsgd resume`"
        )
    names = matching_names(path, shapes, like)
    if extra := sorted(shapes.keys() - {*jax.tree.leaves(names)}):
        extra_names = ", ".join(f"{name!a:.80}" for name in extra[:5])
        raise ParameterMismatch(
            f"{path} has arrays that the model does not: {extra_names}; remove them"
        )
    arrays = read_npz(path, jax.tree.leaves(names))

    def checked_array(name: str, leaf: Any) -> jax.Array:
        array = arrays[name]
        if not cast and array.dtype != leaf.dtype:
            raise ValueError(f"{path}: {name} is {array.dtype}, expected {leaf.dtype}")
        with np.errstate(over="ignore"):
            array = array.astype(leaf.dtype)
        if cast and jnp.issubdtype(array.dtype, jnp.floating) and not np.isfinite(array).all():
            raise ValueError(f"{path}: {name!a:.80} has entries that are not finite numbers")
        return jnp.asarray(array)

    return jax.tree.map(checked_array, names, like)


def matching_names(path: Path, shapes: Mapping[str, jax.ShapeDtypeStruct], like: PyTree) -> PyTree:
    """Returns the stored name of each leaf of `like`.

    A leaf is stored under its key path, its dotted key path or its name in `leaf_names`.

    Args:
      path: .npz file, for error messages.
      shapes: Shape and dtype of each stored array, by name.
      like: Pytree with the shapes and dtypes that are needed.

    Raises:
      ParameterMismatch: if no stored array has a leaf's name, or if the array of that name has
        another shape, or another dtype where the two are not both floating-point.
    """

    def stored_name(leaf_name: str, key_path: Any, leaf: Any) -> str:
        dotted = jax.tree_util.keystr(key_path, simple=True, separator=".")
        for name in (jax.tree_util.keystr(key_path), dotted, leaf_name):
            if (stored := shapes.get(name)) is None:
                continue
            floats = [jnp.issubdtype(array.dtype, jnp.floating) for array in (stored, leaf)]
            if stored.shape == leaf.shape and (all(floats) or stored.dtype == leaf.dtype):
                return name
            raise ParameterMismatch(
                f"{path}: {name} is {stored.dtype.name}{list(stored.shape)}, and the model needs "
                f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}; name a model of the same task"
            )
        raise ParameterMismatch(
            f"{path} lacks the parameter {leaf_name} of shape {list(leaf.shape)}; name a model of "
            "the same task"
        )

    leaves = jax.tree_util.tree_leaves_with_path(like)
    names = [
        stored_name(leaf_name, *leaf)
        for leaf_name, leaf in zip(leaf_names(like), leaves, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(like), names)


def npz_shapes(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of stored arrays by name.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(Path(folder) / "a.npz", w=np.zeros(2, np.float32))
    ...     npz_shapes(Path(folder) / "a.npz")
    {'w': ShapeDtypeStruct(shape=(2,), dtype=float32)}

    Args:
      path: .npz file, which need not be trusted.

    Raises:
      ValueError: if the file is damaged or compressed, holds objects, or repeats a name.
    """
    shapes = dict[str, jax.ShapeDtypeStruct]()
    headers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    with _located(path), zipfile.ZipFile(path) as file:
        for info in file.infolist():
            printable, name = f"{info.filename!a:.80}", info.filename.removesuffix(".npy")
            with file.open(info) as member:
                if (read_header := headers.get(np.lib.format.read_magic(member))) is None:
                    raise ValueError(f"{printable} is not a numeric array")
                shape, _, dtype = read_header(member)
                size = member.tell() + math.prod(shape) * dtype.itemsize
            if dtype.hasobject or size != info.file_size or name in shapes:
                raise ValueError(f"{printable} is truncated, not numeric, or stored twice")
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{printable} is compressed; write the file by numpy.savez")
            shapes[name] = jax.ShapeDtypeStruct(shape, dtype)
    return shapes


def read_npz(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Returns the arrays called `names`.

    Args:
      path: .npz file; check its headers by `npz_shapes` first.
      names: Names of arrays in the file.

    Raises:
      ValueError: if the file is damaged.
    """
    with _located(path), zipfile.ZipFile(path) as file:
        return {
            name: np.lib.format.read_array(file.open(f"{name}.npy"), allow_pickle=False)
            for name in names
        }


@contextmanager
def _located(path: Path) -> Iterator[None]:
    """Turns errors about damaged bytes into a ValueError with the path."""
    try:
        yield
    except DAMAGED as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{path} is damaged, or not an .npz file: {kind}{error}") from None
