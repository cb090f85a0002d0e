"""CPU time of a step's noise beside `jax.random.normal`: some minutes and 2 GB.

Each program adds noise to a donated array of float32 sums, as the training loop does; all take
turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from dpsgd import RootKey
from dpsgd.noise.gaussian import add_gaussian_noise
from experiments.benchmarks.case import Row, at, cases
from experiments.benchmarks.programs import Program
from experiments.benchmarks.timing import in_turns

Adder = Callable[[jax.Array, jax.Array], jax.Array]


def noise(
    size: int = 85_000_000,  # parameters of the large click model
    *,
    rounds: int = 5,
) -> Iterator[Row]:
    root = RootKey.from_insecure_seed(0)

    def stock(implementation: str) -> Adder:
        def add(sums: jax.Array, step: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(0, impl=implementation), step)
            return sums + 1.3 * jax.random.normal(key, sums.shape)

        return add

    def program(add: Adder) -> Program:
        def function(carry: tuple[jax.Array, jax.Array]) -> tuple:
            return ((add(*carry), carry[1] + 1),)

        return Program(function, lambda: (jnp.zeros(size), jnp.uint32(1)), options={})

    threefry, rbg = "jax.random.normal, threefry", "jax.random.normal, rbg"
    adders: dict[str, Adder] = {
        "ours": lambda sums, step: add_gaussian_noise(sums, root.noise_key(0), step, 1.3),
        threefry: stock("threefry2x32"),
        rbg: stock("rbg"),
    }
    series = in_turns({name: program(add) for name, add in adders.items()}, rounds)
    row = at(f"{size / 1e6:g}M coordinates")
    yield row("noise", series.median("ours"), "s")
    yield row(f"noise / {threefry}", series.ratio("ours", threefry), "x", at_most=1.0)
    yield row(f"noise / {rbg}", series.ratio("ours", rbg), "x")


SMALL = {"size": 2**20, "rounds": 1}
CASES = cases(noise, quick=SMALL, seconds=200)
