"""Arrays in the folder of a checkpoint of Orbax."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


def opened(
    path: Path,
) -> tuple[dict[str, jax.ShapeDtypeStruct], Callable[[Collection[str]], dict[str, np.ndarray]]]:
    """Returns shapes by name, and what reads arrays by their names, see `dpsgd.runs.arrays.Source`.

    Args:
      path: Folder that `StandardCheckpointer` or `PyTreeCheckpointer` wrote.

    Raises:
      ValueError: if Orbax cannot read it.
    """
    folder = path.absolute()

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

    return found, read


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
