"""Price of a step's noise beside `jax.random.normal`, in CPU time.

    scripts/bench noise --json noise.json        (some minutes and 2 GB)
    scripts/bench noise --quick                  (seconds)

Each program adds noise to a donated array of float32 sums, as the training loop does; all take
turns. The secure noise is drawn for fewer coordinates, and its time scaled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpsgd import RootKey
from dpsgd.noise.gaussian import add_gaussian_noise
from dpsgd.noise.secure import rounded_gaussian
from experiments.benchmarks.rows import Row, options_of, positive, report
from experiments.benchmarks.timing import Carried, in_turns

COORDINATES = 85_000_000
"""Parameters of the papers' click model."""
SECURE_COORDINATES = 2**20


def measure(size: int, secure_size: int, rounds: int) -> list[Row]:
    """Returns the rows for arrays of `size` coordinates."""
    root = RootKey.from_insecure_seed(0)
    secure_key = root.secure_noise_key(0).tobytes()

    def stock(implementation: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
        def add(sums: jax.Array, step: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(0, impl=implementation), step)
            return sums + 1.3 * jax.random.normal(key, sums.shape)

        return add

    def ours(sums: jax.Array, step: jax.Array) -> jax.Array:
        return add_gaussian_noise(sums, root.noise_key(0), step, 1.3)

    threefry, rbg = "jax.random.normal, threefry", "jax.random.normal, rbg"
    programs = {
        "ours": ours,
        threefry: stock("threefry2x32"),
        rbg: stock("rbg"),
    }

    def noiser(add: Callable[[jax.Array, jax.Array], jax.Array]) -> Carried:
        """Returns a program that owns its sums, and gives every step a number."""
        start = jnp.zeros(size), jnp.uint32(1)
        return Carried(lambda carry, _: (add(*carry), carry[1] + 1), start)

    series = in_turns({name: noiser(add) for name, add in programs.items()}, rounds)
    secure = in_turns(
        {"secure": lambda: rounded_gaussian(secure_key, 0, 0, (secure_size,), 2**20)}, rounds
    ).median("secure")
    at = f"{size / 1e6:g}M coordinates"
    return [
        Row(f"noise, {at}", series.median("ours"), "s"),
        Row.at_most(f"noise / {threefry}, {at}", series.ratio("ours", threefry), "x", 1.0),
        Row(f"noise / {rbg}, {at}", series.ratio("ours", rbg), "x"),
        Row(f"secure noise, {at} (scaled)", secure * size / secure_size, "s"),
    ]


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and returns 1 if a bar does not hold."""
    parser = options_of("noise", __doc__, quick="few coordinates, once")
    parser.add_argument("--rounds", type=positive, default=5, help="rounds for each median")
    options = parser.parse_args(argv)
    if options.quick:
        return report(measure(2**20, 2**16, 1), options.json)
    return report(measure(COORDINATES, SECURE_COORDINATES, options.rounds), options.json)


if __name__ == "__main__":
    sys.exit(main())
