"""CPU seconds of several pieces of work, taken in turns, so that a busy machine slows all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


class Series(dict[str, list[float]]):
    """Seconds of each piece of work, one entry a round."""

    def median(self, name: str) -> float:
        """Returns the median over the rounds."""
        return statistics.median(self[name])

    def ratio(self, name: str, other: str) -> float:
        """Returns the median over the rounds of the ratio within one round."""
        return statistics.median(a / b for a, b in zip(self[name], self[other], strict=True))


def turns(names: Iterable[str], rounds: int) -> Iterator[tuple[str, bool]]:
    """Yields names for `rounds` rounds after one that does not count, and whether it does.

    Every other round goes backwards.
    """
    for number in range(rounds + 1):
        for name in list(names)[:: 1 if number % 2 else -1]:
            yield name, number > 0


def in_turns(
    work: Mapping[str, Callable[[], Any]],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
) -> Series:
    """Returns what each of `work` takes in `rounds` rounds, after one that is not counted.

    By default in CPU seconds; where another device works, `time.perf_counter` tells the time.

    Nothing that a piece of work returns outlives it: a result
    still held would make the next one take fresh pages of memory, which is slower than the work.
    """
    series = Series({name: [] for name in work})
    for name, counts in turns(work, rounds):
        begin = clock()
        result = work[name]()
        spent = clock() - begin
        del result
        if counts:
            series[name].append(spent)
    return series


class Carried:
    """A compiled (carry, inputs) -> carry that owns its carry: called, it puts the next in place.

    Args:
      function: What is compiled.
      carry: Where it begins; a copy is given away.
      inputs: What every call gets.
      options: Of the compiler.
    """

    def __init__(
        self,
        function: Callable[[PyTree, PyTree], PyTree],
        carry: PyTree,
        inputs: PyTree = None,
        options: Any = None,
    ) -> None:
        program = jax.jit(function, donate_argnums=0, compiler_options=options)
        self._program = program.lower(carry, inputs).compile()
        self._carry, self._inputs = jax.tree.map(jnp.array, carry), inputs

    def __call__(self) -> None:
        self._carry = jax.block_until_ready(self._program(self._carry, self._inputs))


def copy_rate(size: int, clock: Callable[[], float] = time.process_time) -> float:
    """Returns bytes a second, read and written, of copies in place of `size` floats."""
    copy = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    cell = [jnp.zeros(size)]

    def ten_times() -> None:
        for _ in range(10):
            cell[0] = copy(cell[0])
        jax.block_until_ready(cell[0])

    return 10 * 8 * size / in_turns({"copy": ten_times}, 5, clock).median("copy")
