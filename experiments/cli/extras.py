"""What a command needs beside the library itself, and how one gets it."""

from __future__ import annotations

from importlib.util import find_spec

EXTRAS = {
    "apache_beam": "beam",
    "array_record": "tfds",
    "dp_accounting": "peers",
    "importlib_resources": "tfds",
    "jinja2": "figures",
    "markdown_it": "cli",
    "matplotlib": "figures",
    "polars": "figures",
    "pyarrow": "data",
    "rich": "cli",
    "sklearn": "images",
    "tensorflow_datasets": "tfds",
    "tyro": "cli",
}
"""Each module that is imported and need not be there -> the extra that brings it."""


def require(module: str) -> None:
    """Refuses work whose result could not be shown or written for lack of `module`.

    Raises:
      ModuleNotFoundError: if there is no such module.
    """
    if find_spec(module) is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def how_to_get(module: str) -> str | None:
    """Returns the line about a module that is not there; None if no extra brings it.

    >>> how_to_get("matplotlib.figure")
    "matplotlib is not installed: pip install 'dpsgd[figures]'"
    """
    name = module.split(".")[0]
    if name not in EXTRAS:
        return None
    return f"{name} is not installed: pip install 'dpsgd[{EXTRAS[name]}]'"
