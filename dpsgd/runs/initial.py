"""The parameters that a run starts from: fresh ones, or those of an earlier model.

A run from an earlier model covers its own rows. Those of the earlier model keep the guarantee that
they have: to them, this run is a function of what was released. Proof and limits:
docs/explanation/training-from-an-earlier-model.md.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from accounting import Bound
from accounting.checks import check_guarantee_delta
from accounting.profile import format_delta
from dpsgd.core.guarantee import NO_GUARANTEE
from dpsgd.gradients.frozen import leaf_names
from dpsgd.runs.arrays import Source, is_orbax, sha256, source
from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.records import checked
from dpsgd.runs.result import GUARANTEE, MODEL, Bundle, FinishedRun
from dpsgd.runs.spec import RunSpec

PyTree = Any

_PUBLIC = f"{NO_GUARANTEE} (public rows need none)"
_KEPT = re.compile(
    rf"{NO_GUARANTEE}|{re.escape(_PUBLIC)}|"
    r"epsilon <= [\d.e+-]{1,20} at delta [\d.e+-]{1,20} \(unit: one [\w/' -]{1,40}\)"
)
"""What may be said of the rows of a model, which may be anybody's, in the sentence of a run."""


def initial_params(
    fresh: PyTree,
    init_from: str | None,
    rules: Sequence[str] = (),
    known: Sequence[str] = (),
    digest: str | None = None,
) -> tuple[PyTree, dict[str, Any]]:
    """Returns the parameters that a run starts from, and what was taken for which as JSON values.

    Args:
      fresh: Those that its task makes: their tree, shapes and dtypes are wanted.
      init_from: The directory of a finished run, an exported model, a file .npz or safetensors, or
        a checkpoint of Orbax; None for `fresh` itself.
      rules: Which array becomes which parameter, see `Rule`; by default those of equal names.
      known: Such rules of the task, of names that it knows.
      digest: SHA-256 that the file must have, see `pinned`.

    Raises:
      FileNotFoundError: if there is no such model.
      ValueError: if it is damaged, has other parameters, or another digest.
    """
    if init_from is None:
        return fresh, {}
    path = _found(init_from)
    arrays = _released(path)
    if digest is not None and (now := sha256(arrays)) != digest:
        raise ValueError(
            f"init_from: {path} is not the model that the run is to start from, of which the "
            f"SHA-256 is {digest!a:.70}: it is {now}; restore it from a copy"
        )
    found = source(arrays)
    if {"ledger_head", "state.step"} <= found.shapes.keys():
        raise ValueError(
            f"init_from: {path} is a checkpoint of a run that is not finished: nothing of it is "
            "released, and noise may be pending in it; `dpsgd resume` ends the run"
        )
    params, record = matched(fresh, found, rules, known)
    same = arrays != path and not (rules or record["fresh"] or record["left_out"])
    return params, {} if same else record


def pinned(spec: RunSpec) -> RunSpec:
    """Returns a spec whose earlier model is found again, as it is now, wherever a run resumes."""
    if spec.init_from is None:
        return spec
    found = sha256(_released(_found(spec.init_from)))
    if spec.init_sha256 not in (None, found):
        raise ValueError(
            f"init_sha256: {spec.init_from} has the SHA-256 {found}, not {spec.init_sha256!a:.70}"
        )
    return dataclasses.replace(
        spec,
        init_from=os.path.abspath(spec.init_from),
        init_map=lines_of(spec.init_map),
        init_sha256=found,
    )


def earlier_guarantees(init_from: str | None) -> tuple[str, ...]:
    """Returns what the models before a run keep for their rows, the nearest first."""
    if init_from is None:
        return ()
    path = _found(init_from)
    if _of_arrays(path):
        return (_PUBLIC,)
    if (path / MODEL).is_file():
        return _stated(Bundle.read(path).guarantee, path / GUARANTEE)
    return _stated(FinishedRun.read(path).record, path / "ledger.jsonl")


def earlier_task(init_from: str | None) -> Mapping[str, Any]:
    """Returns the record of the task of an earlier model; empty where nothing says it."""
    if init_from is None or _of_arrays(path := _found(init_from)):
        return {}
    return Bundle.read(path).task if (path / MODEL).is_file() else FinishedRun.read(path).task


def chain(model: str | None) -> Iterator[RunDirectory]:
    """Yields the run of a model and those before it, the nearest first.

    They are run directories that lie where they lay, up to the first model that is none.
    """
    seen = set[str]()  # another run may have taken the place of one
    while isinstance(model, str) and (Path(model) / "ledger.jsonl").is_file():
        folder = RunDirectory(Path(model))
        history = folder.history()
        if history.name in seen:
            return
        seen.add(history.name)
        yield folder
        model = folder.config(history).get("init_from")


def check_other_rows(init_from: str | None, digest: str) -> None:
    """Raises ValueError if a run of the `chain` before a run had these very rows."""
    for folder in chain(init_from):
        if digest in folder.data():
            raise ValueError(
                f"init_from: {folder.path} was trained on these very rows, and the guarantee of "
                "this run would leave out what they cost there: train for more epochs in one run"
            )


def _found(init_from: str) -> Path:
    path = Path(init_from)
    if not path.exists():
        raise FileNotFoundError(
            f"init_from: {path} does not exist: name a finished run, an exported model, a file "
            ".npz or .safetensors, or a checkpoint of Orbax"
        )
    return path


def _of_arrays(path: Path) -> bool:
    """Returns whether a model is arrays alone, of which nothing says what they were trained on."""
    return path.is_file() or (not (path / MODEL).is_file() and is_orbax(path))


def _released(path: Path) -> Path:
    """Returns where the arrays of a model lie, of which nothing is pending."""
    if _of_arrays(path):
        return path
    if (path / MODEL).is_file():
        Bundle.read(path)  # refuses parts of two
    else:
        RunDirectory.open(path).check_released()
    return RunDirectory(path).params_path


def _stated(record: Mapping[str, Any], where: Path) -> tuple[str, ...]:
    upper = checked(record.get("epsilon_upper"), float | None, f"{where}: epsilon_upper")
    before = checked(record.get("earlier", []), list[str], f"{where}: earlier")
    unit = checked(record.get("unit"), str, f"{where}: unit")
    own = NO_GUARANTEE
    if upper is not None:
        if not 0 <= upper < math.inf:
            raise ValueError(f"{where} is damaged: epsilon_upper {upper}")
        delta = checked(record.get("delta"), float, f"{where}: delta")
        delta = format_delta(check_guarantee_delta(delta, f"{where}: delta"))
        own = f"epsilon <= {Bound(0.0, upper).format_upper()} at delta {delta}"
        own = f"{own} (unit: one {unit})"
    for text in (own, *before):
        if not _KEPT.fullmatch(text):
            raise ValueError(f"{where} is damaged: {text!a:.60}")
    return own, *before


# --- Which array becomes which parameter --------------------------------------------------------

_SHOWN = 5
"""Names that one line lists, of many."""


class Rule(NamedTuple):
    """Where arrays go: `REGEX=NAME`, `REGEX=` for those left out, `=REGEX` for fresh parameters."""

    pattern: re.Pattern[str]
    """Of the whole name of an array; of a parameter, if the rule is of fresh ones."""
    target: str | None
    """Name of a parameter, with groups of the pattern (\\1); "" for none; None: it starts fresh."""
    transposed: bool = False
    """Whether the array is the parameter's transpose (`:T`)."""
    first: bool = False
    """Whether the array has more rows, of which the first are taken (`:first`)."""
    part: tuple[int, int] = (1, 1)
    """(k, n): it is the k-th of n equal parts of the last axis (`:K/N`)."""

    @classmethod
    def of(cls, text: str, where: str = "") -> Rule:
        """Returns the rule that `text` says, which stands at `where` in a file.

        >>> Rule.of(r"h.(\\d+).query.weight=blocks.\\1.qkv.kernel:T:1/3").part
        (1, 3)

        Raises:
          ValueError: if it says none.
        """
        said = f"init_map: {text!a:.80} is no rule REGEX=NAME, REGEX= or =REGEX"
        said += f" ({where})" if where else ""
        pattern, *target = re.split(r"(?<![?<])=", text, maxsplit=1)  # not the = of (?=
        if not target:
            raise ValueError(f"{said}: it has no =")
        name, *how = target[0].split(":") if pattern else [""]
        part = (1, 1)
        for one in how:
            if found := re.fullmatch(r"(\d{1,4})/(\d{1,4})", one):
                part = int(found[1]), int(found[2])
            elif one not in ("T", "first"):
                raise ValueError(f"{said}: after NAME come :T, :first and :K/N, got {one!a:.20}")
        if not 1 <= part[0] <= part[1]:
            raise ValueError(f"{said}: there is no part {part[0]} of {part[1]}")
        try:
            compiled = re.compile(pattern or target[0])
            if name:  # refuses groups that there are not
                re.compile(f"(?:{pattern})|").sub(name, "")
        except (re.error, IndexError) as error:
            raise ValueError(f"{said}: {error}") from None
        return cls(compiled, name if pattern else None, "T" in how, "first" in how, part)


_SAME = Rule(re.compile(""), "")
"""That of an array which has the name of a parameter."""


def lines_of(rules: Iterable[str]) -> tuple[str, ...]:
    """Returns rules, with those of each file that is named `@FILE` in its place.

    Such a file has one rule a line; empty lines and those that begin with # say nothing.
    """
    found = list[str]()
    for rule in rules:
        try:
            lines = [(rule, "")]
            if rule.startswith("@"):
                text = Path(rule[1:]).read_text(encoding="utf-8").splitlines()
                lines = [(line.strip(), f"{rule[1:]}, line {k}") for k, line in enumerate(text, 1)]
        except (OSError, ValueError) as error:
            raise ValueError(f"init_map: {rule[1:]} cannot be read: {error}") from None
        for line, where in lines:
            if line and not (where and line.startswith("#")):
                Rule.of(line, where)
                found.append(line)
    return tuple(found)


class _Leaf(NamedTuple):
    """A parameter, and the array and rule of each part that is taken for it."""

    value: Any
    taken: dict[tuple[int, int], tuple[str, Rule]]


def matched(
    fresh: PyTree, source: Source, rules: Sequence[str], known: Sequence[str]
) -> tuple[PyTree, dict[str, Any]]:
    """Returns parameters taken from a file, and which array was taken for which, as JSON values.

    An array goes where the first of the user's `rules` says that matches its name; else to the
    parameter of its name; else where the first of the task's `known` rules says. Parameters that
    `rules` have start fresh take nothing; those that `known` have start fresh do so if nothing is
    taken.

    Raises:
      ValueError: if a parameter has no array, or two; an array no parameter; or they differ in
        shape or kind. The line names them.
    """
    leaves, names = dict[str, _Leaf](), dict[str, str]()
    paths = jax.tree_util.tree_leaves_with_path(fresh)
    for name, (at, value) in zip(leaf_names(fresh), paths, strict=True):
        leaves[name] = _Leaf(value, {})
        whole = jax.tree_util.keystr(at, simple=True, separator=".")
        names = {whole: name, **names, name: name}
    own, others = list(map(Rule.of, rules)), list(map(Rule.of, known))
    forced = {name for name in leaves if _fresh(name, own)}
    left_out, unknown = list[str](), list[str]()
    for array in source.shapes:
        rule, goes = _target(array, own)
        asked = rule is not None
        if not asked and array in names:
            rule, goes = _SAME, array
        elif not asked:
            rule, goes = _target(array, others)
        name = names.get(goes, "")
        if rule is None:
            unknown.append(array)
        elif not goes or (name in forced and not asked):
            left_out.append(array)
        elif not name:
            raise ValueError(f"init_map: {array!a:.80} goes to {goes!a:.80}, which is no parameter")
        elif name in forced:
            raise ValueError(f"init_map: {name} is to start fresh, and to be {array!a:.80}")
        else:
            taken = leaves[name].taken
            for part, (other, _) in taken.items():
                if part == rule.part or part[1] != rule.part[1]:
                    wrong = f"{name} would be both {other!a:.80} and {array!a:.80}"
                    raise ValueError(f"init_map: {wrong}")
            taken[rule.part] = array, rule
    begin = {name for name, leaf in leaves.items() if not leaf.taken}
    missing = [name for name in leaves if name in begin - forced and not _fresh(name, others)]
    parts = []
    if missing:
        shape = tuple(leaves[missing[0]].value.shape)
        parts = [f"does not hold the parameter {missing[0]} {shape}"]
        parts[0] += f" (nor {some(missing[1:])})" if missing[1:] else ""
    if unknown:
        parts.append(f"holds arrays of no parameter: {some(unknown)}")
    if parts:
        raise ValueError(
            f"{source.path} {' and '.join(parts)}; init_map says by REGEX=NAME what an array is, "
            "by REGEX= what is left out, and by =REGEX which parameters start fresh"
        )
    for name, leaf in leaves.items():
        _check(name, leaf, source)
    read = source.read([array for leaf in leaves.values() for array, _ in leaf.taken.values()])
    made = [_made(leaf, read, source) for leaf in leaves.values()]
    record = {
        "taken": {
            name: [_said(source, array, leaf) for _, (array, _) in sorted(leaf.taken.items())]
            for name, leaf in leaves.items()
            if leaf.taken
        },
        "fresh": sorted(begin),
        "left_out": sorted(left_out),
    }
    return jax.tree.unflatten(jax.tree.structure(fresh), made), record


def some(names: Sequence[str]) -> str:
    """Returns the first of names, and how many there are."""
    shown = ", ".join(name if name.isprintable() else ascii(name) for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{shown:.400}{more}"


def taken_in_words(record: dict[str, Any]) -> str:
    """Returns what `matched` recorded, in words."""
    arrays = [array for one in record["taken"].values() for array in one]
    casts = sorted({array.rpartition(" (from ")[2][:-1] for array in arrays if array[-1:] == ")"})
    said = f"took {len(record['taken'])} parameters from {len(arrays)} arrays"
    said += f", cast from {', '.join(casts)}" if casts else ""
    for word, names in (("starts fresh", record["fresh"]), ("left out", record["left_out"])):
        said += f"; {word}: {some(names)}" if names else ""
    return said


def _fresh(name: str, rules: Sequence[Rule]) -> bool:
    return any(rule.target is None and rule.pattern.fullmatch(name) for rule in rules)


def _target(array: str, rules: Sequence[Rule]) -> tuple[Rule | None, str]:
    for rule in rules:
        if rule.target is not None and (found := rule.pattern.fullmatch(array)):
            return rule, found.expand(rule.target) if rule.target else ""
    return None, ""


def _said(source: Source, array: str, leaf: _Leaf) -> str:
    dtype = source.shapes[array].dtype
    return array if dtype == leaf.value.dtype else f"{array} (from {np.dtype(dtype).name})"


def _check(name: str, leaf: _Leaf, source: Source) -> None:
    """Raises ValueError unless what is taken for a parameter has its shape and kind."""
    wanted, dtype = tuple(leaf.value.shape), leaf.value.dtype
    for (k, n), (array, rule) in leaf.taken.items():
        if len(leaf.taken) < n:
            raise ValueError(
                f"{source.path}: {name} has {n} parts, and {array!a:.80} is part {k}: name arrays "
                "for the others too"
            )
        stored = source.shapes[array]
        shape = stored.shape[::-1] if rule.transposed else stored.shape
        part = (*wanted[:-1], wanted[-1] / n) if n > 1 and wanted else wanted
        rows = shape[:1] >= part[:1] and len(shape) == len(part) and shape[1:] == part[1:]
        if not (rows if rule.first and part else shape == part):
            as_part = f", of which it would be part {k} of {n}" if n > 1 else ""
            also = " (transposed)" if rule.transposed else ""
            raise ValueError(
                f"{source.path} does not hold the parameter {name} {wanted}: {array!a:.80} is "
                f"{stored.shape}{also}{as_part}"
            )
        floats = [jnp.issubdtype(one, jnp.floating) for one in (dtype, stored.dtype)]
        if dtype != stored.dtype and not all(floats):
            raise ValueError(
                f"{source.path}: {array!a:.80} is {np.dtype(stored.dtype).name}, and the parameter "
                f"{name} {np.dtype(dtype).name}"
            )


def _made(leaf: _Leaf, read: dict[str, np.ndarray], source: Source) -> Any:
    """Returns a parameter of what is taken for it, or fresh."""
    if not leaf.taken:
        return leaf.value
    parts = []
    for _, (array, rule) in sorted(leaf.taken.items()):
        found = read[array].T if rule.transposed else read[array]
        found = found[: len(leaf.value)] if rule.first else found
        with np.errstate(over="ignore"):
            parts.append(np.asarray(found).astype(leaf.value.dtype))
        _check_finite(source.path, array, parts[-1])
    return jnp.asarray(parts[0] if len(parts) == 1 else np.concatenate(parts, -1))


def _check_finite(path: Path, name: str, array: Any) -> None:
    if jnp.issubdtype(array.dtype, jnp.floating) and not np.isfinite(array).all():
        raise ValueError(f"{path}: {name!a:.80} has entries that are not finite numbers")
