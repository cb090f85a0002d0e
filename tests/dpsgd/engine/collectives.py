"""The exchanges between devices in a compiled program, read in its HLO."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import jax

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


class Collective(NamedTuple):
    """One exchange between all devices of a program.

    Attributes:
      kind: One of `KINDS`.
      size: Bytes of what is exchanged, whole: the sum of an all-reduce, what an all-gather
        gathers and a reduce-scatter adds up, and what a device sends in the others.
      depth: Loops that it stands in. In a block of steps those of depth 0 happen once a block, of
        depth 1 once a step, and deeper ones several times in each step.
    """

    kind: str
    size: int
    depth: int


def collectives(program: jax.stages.Compiled | str) -> list[Collective]:
    """Returns the collectives of a program for several devices, or of its HLO, in its order.

    >>> found = collectives('''
    ... %body (x: f32[8]) -> f32[8] {
    ...   ROOT %r = (f32[8]{0}, f32[]) all-reduce(%x, %y), replica_groups={{0,1}}, to_apply=%add
    ... }
    ...
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %g = s32[4,2]{1,0} all-gather(%x), dimensions={0}
    ...   ROOT %w = f32[8]{0} while(%x), condition=%less, body=%body
    ... }''')
    >>> [tuple(one) for one in found]
    [('all-gather', 32, 0), ('all-reduce', 36, 1)]
    """
    text = program if isinstance(program, str) else program.as_text()
    assert text is not None, "it is compiled"
    bodies = {match[1]: match[0] for match in re.finditer(r"^%(\S+) \(.*?^}", text, re.M | re.S)}
    entry = re.search(r"^ENTRY .*?^}", text, re.M | re.S)
    assert entry is not None, "a program has an entry"
    return _of_computation(entry[0], bodies, 0)


def _of_computation(computation: str, bodies: dict[str, str], depth: int) -> list[Collective]:
    found = []
    for result, op, rest in re.findall(
        r"^\s+(?:ROOT )?%\S+ = (.*?) ([a-z][a-z0-9-]*)\((.*)$", computation, re.M
    ):
        kind = op.removesuffix("-start")
        if kind in KINDS:
            size = _bytes(result)
            if kind == "reduce-scatter":
                size *= _group_size(rest)
            found.append(Collective(kind, size, depth))
        elif op in ("while", "call", "conditional"):
            called = re.findall(r"%([\w.-]+)", rest.partition("), ")[2].partition("metadata=")[0])
            for name in called:
                if name in bodies:
                    found += _of_computation(bodies[name], bodies, depth + (op == "while"))
    return found


_ITEM_BYTES = {"pred": 1, "bf16": 2}


def _bytes(shapes: str) -> int:
    """Returns the bytes of the shapes in a text, such as "(f32[8,2]{1,0}, s32[])"."""
    total = 0
    for kind, sizes in re.findall(r"([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]", shapes):
        item = _ITEM_BYTES.get(kind) or int(re.findall("[0-9]+", kind)[0]) // 8
        total += item * math.prod(int(size) for size in sizes.split(",") if size)
    return total


def _group_size(attributes: str) -> int:
    """Returns how many devices take part in each group of a collective."""
    mesh = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", attributes)
    if mesh:  # such as mesh['a'=4,'b'=2] {'a'}
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(iota[1])
    groups = re.search(r"replica_groups=\{\{(.*?)\}", attributes)
    assert groups is not None, f"a collective names its groups: {attributes[:200]}"
    return groups[1].count(",") + 1
