"""Named arrays in files of several formats, which may be anybody's: .npz, safetensors, Orbax.

A file takes no more memory than its own size, or than the arrays that are asked for.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import zipfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.files import DAMAGED, parse_json
from dpsgd.runs.records import checked

PyTree = Any

_HEADER = 100_000_000
"""Most bytes of a header that the library safetensors reads."""
_DTYPES = {
    "BOOL": np.bool_, "I8": np.int8, "U8": np.uint8, "I16": np.int16, "U16": np.uint16,
    "F16": np.float16, "BF16": jnp.bfloat16, "I32": np.int32, "U32": np.uint32, "F32": np.float32,
    "I64": np.int64, "U64": np.uint64, "F64": np.float64,
}  # fmt: skip
_ORBAX = "_METADATA"


class Source(NamedTuple):
    """Arrays of a file, which are not read yet."""

    path: Path
    shapes: dict[str, jax.ShapeDtypeStruct]
    """Shape and dtype of each, by its name; parts of a path in a tree have dots between them."""
    read: Callable[[Collection[str]], dict[str, np.ndarray]]
    """names -> these arrays; raises ValueError for what is damaged."""


def is_orbax(path: Path) -> bool:
    """Returns whether `path` is the folder of a checkpoint of Orbax, or of a step of several."""
    return _orbax_folder(path) is not None


def source(path: Path) -> Source:
    """Returns what a file .npz, of safetensors or a folder of Orbax holds, or raises ValueError."""
    if path.is_dir():
        return _orbax(path)
    with _damaged(path):
        return _npz(path, _dotted) if zipfile.is_zipfile(path) else _safetensors(path)


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, or of names and contents of all files below a folder."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    files = {p.relative_to(path).as_posix(): p for p in path.rglob("*") if p.is_file()}
    lines = "".join(f"{sha256(files[name])} {name!a}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def read_arrays(path: Path, like: PyTree) -> PyTree:
    """Reads arrays of a file .npz, named `['a']['b']` or `a.b`, in the structure of `like`."""
    with _damaged(path):
        found = _npz(path, lambda name: name)

    def name(at: Any, leaf: Any) -> str:
        for one in (jax.tree_util.keystr(at), jax.tree_util.keystr(at, simple=True, separator=".")):
            stored = found.shapes.get(one)
            if stored is not None and (stored.shape, stored.dtype) == (leaf.shape, leaf.dtype):
                return one
        raise ValueError(f"{path} does not hold the parameter {one} {leaf.shape}")

    names = jax.tree_util.tree_map_with_path(name, like)
    read = found.read(jax.tree.leaves(names))
    return jax.tree.map(lambda one: jnp.asarray(read[one]), names)


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """Has what damaged bytes raise be one line, which names the file."""
    try:
        yield
    except DAMAGED as error:
        what = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{path} is damaged, or of another format: {what}{error}") from None


def _npz(path: Path, named: Callable[[str], str]) -> Source:
    """Reads the headers of the arrays that `numpy.savez` wrote."""
    found, members = dict[str, jax.ShapeDtypeStruct](), dict[str, zipfile.ZipInfo]()
    headers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    with zipfile.ZipFile(path) as file:
        for info in file.infolist():
            said, name = f"{info.filename!a:.80}", named(info.filename.removesuffix(".npy"))
            with file.open(info) as member:
                if (read_header := headers.get(np.lib.format.read_magic(member))) is None:
                    raise ValueError(f"{said} is no array of numbers")
                shape, _, dtype = read_header(member)
                size = member.tell() + math.prod(shape) * dtype.itemsize
            if dtype.hasobject or size != info.file_size or name in found:
                raise ValueError(f"{said} is no whole array of numbers, or there are two")
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{said} is compressed: write it by numpy.savez")
            found[name], members[name] = jax.ShapeDtypeStruct(shape, dtype), info

    def read(names: Collection[str]) -> dict[str, np.ndarray]:
        with _damaged(path), zipfile.ZipFile(path) as file:
            return {
                name: np.lib.format.read_array(file.open(members[name]), allow_pickle=False)
                for name in names
            }

    return Source(path, found, read)


def _safetensors(path: Path) -> Source:
    """Reads the header of a file of safetensors.

    It is 8 bytes, the length of the header as a little-endian integer; the header, which is JSON
    and says of each array its dtype, its shape and at which bytes after the header it begins and
    ends; and these bytes, without gaps, in C order and little-endian.

    Source: the section "Format" of the README of github.com/huggingface/safetensors.
    """
    with path.open("rb") as file:
        size = path.stat().st_size - 8
        length = int.from_bytes(file.read(8), "little")
        if size < 2 or not 2 <= length <= min(size, _HEADER):
            raise ValueError("it is no file .npz, and as safetensors its header is not whole")
        header = checked(parse_json(file.read(length)), dict[str, Any], "header")
    header.pop("__metadata__", None)
    found, begins = dict[str, jax.ShapeDtypeStruct](), dict[str, int]()
    spans = list[tuple[int, int, str]]()
    for name, entry in header.items():
        said = f"array {name!a:.80}"
        fields = checked(entry, dict[str, Any], said)
        dtype = _DTYPES.get(checked(fields.get("dtype"), str, f"{said}: dtype"))
        shape = tuple(checked(fields.get("shape"), list[int], f"{said}: shape"))
        span = checked(fields.get("data_offsets"), list[int], f"{said}: data_offsets")
        if dtype is None:
            raise ValueError(f"{said} has the dtype {fields['dtype']!a:.20}, which JAX has not")
        expected = math.prod(shape) * np.dtype(dtype).itemsize
        if min(shape, default=0) < 0 or len(span) != 2 or span[1] - span[0] != expected:
            raise ValueError(f"{said} of the shape {shape!s:.80} has other bytes: {span!s:.80}")
        found[name] = jax.ShapeDtypeStruct(shape, np.dtype(dtype).newbyteorder("<"))
        begins[name] = 8 + length + span[0]
        spans.append((span[0], span[1], said))
    end = 0
    for begin, after, said in sorted(spans):
        if begin != end:
            raise ValueError(f"{said} begins at byte {begin}, and the one before ends at {end}")
        end = after
    if end != size - length:
        raise ValueError(f"its arrays have {end} bytes, and there are {size - length}")

    def read(names: Collection[str]) -> dict[str, np.ndarray]:
        def array(name: str) -> np.ndarray:
            shape, dtype = found[name].shape, found[name].dtype
            flat = np.fromfile(path, dtype, math.prod(shape), offset=begins[name])
            return flat.reshape(shape)

        with _damaged(path):
            return {name: array(name) for name in names}

    return Source(path, found, read)


def _orbax(path: Path) -> Source:
    """Reads the metadata of a folder that `StandardCheckpointer` or `PyTreeCheckpointer` wrote."""
    import orbax.checkpoint as ocp  # takes a second

    folder = (_orbax_folder(path) or path).absolute()

    def name(at: Any) -> str:
        return jax.tree_util.keystr(at, simple=True, separator=".")

    with _no_traceback(path), ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(folder).item_metadata.tree
        found = {
            name(at): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for at, leaf in jax.tree_util.tree_leaves_with_path(tree)
            if hasattr(leaf, "shape")  # texts have none
        }

    def read(names: Collection[str]) -> dict[str, np.ndarray]:
        wanted = jax.tree_util.tree_map_with_path(
            lambda at, _: 0 if name(at) in names else ocp.PLACEHOLDER, tree
        )
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
        how = ocp.args.PyTreeRestore(item=wanted, restore_args=kinds)
        with _no_traceback(path), ocp.PyTreeCheckpointer() as checkpointer:
            restored = jax.tree_util.tree_leaves_with_path(checkpointer.restore(folder, args=how))
        return {name(at): leaf for at, leaf in restored if name(at) in names}

    return Source(path, found, read)


@contextmanager
def _no_traceback(path: Path) -> Iterator[None]:
    """Has what Orbax raises, which has no type of its own, and what it logs, be one line."""
    loggers = logging.getLogger("absl"), logging.getLogger("asyncio")
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:
        line = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read by Orbax: {line:.200}") from None
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _dotted(name: str) -> str:
    """Returns a path in a tree with dots between its parts.

    >>> _dotted("['blocks'][0]['kernel'].value")
    'blocks.0.kernel.value'
    """
    return re.sub(r"\['(.*?)'\]|\[(\d+)\]", r".\1\2", name).removeprefix(".")


def _orbax_folder(path: Path) -> Path | None:
    return next((one for one in (path, path / "default") if (one / _ORBAX).is_file()), None)
