"""Price of a DP step beside an ordinary one, its peers and the machine's floor, in CPU time.

    scripts/bench step --json step.json          (some ten minutes and 4 GB)
    scripts/bench step --quick                   (seconds: the smallest model, one batch, no peers)

The model is the click model of the papers, at three sizes; data are random. Every figure is the
median over rounds in which all programs of one size and batch take turns. The floor of a step is
the time to move what an ordinary dense-Adam step must move, at the measured rate of a copy, plus
the time of its matrix products at the measured rate of one: no program reaches it.

Peers: `clipped_grad` of jax_privacy 2.0.0 on a few examples, one at a time, scaled to the batch
(its microbatched form is a loop whose every round costs the same); `differentially_private_
aggregate` of optax, which needs all gradients of a batch at once, at the smallest size alone; and
Opacus with ghost clipping, measured by an interpreter that has it, after the others:

    python -m venv peer && peer/bin/pip install torch opacus
    scripts/bench step --peer-python peer/bin/python
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpsgd import Mechanism, RootKey, TrainState, clipped_grad, dpsgd
from dpsgd.core.algorithm import privatize
from dpsgd.engine.programs import compiler_options
from experiments.benchmarks.opacus import opacus
from experiments.benchmarks.rows import Row, options_of, positive, report
from experiments.benchmarks.timing import Carried, Series, copy_rate, in_turns
from experiments.tasks.clicks.model import functional
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import PRESETS, ModelConfig
from samplers import Deterministic

PyTree = Any

SIZES = {
    "1M": ModelConfig(embedding_dim=14, max_buckets=2**11, hidden=(256, 256)),
    "8M": ModelConfig(embedding_dim=14, max_buckets=2**15, hidden=(598, 598, 598)),
    "85M": PRESETS["paper"],
}
BATCHES = (256, 1024, 8192)
STEP_BARS = {1024: 2.5, 8192: 1.3}
"""Full DP step / non-private one, 85M parameters, by batch."""
PEER_EXAMPLES = 4
"""Examples on which jax_privacy's loop is timed."""
BYTES_PER_PARAMETER = 24
"""Parameter and two moments in float32, each read and written once."""


def random_batch(size: int, config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns `size` examples of random values, as columns of the store."""
    rng = np.random.default_rng(seed)
    rows = np.array(DISPLAY_ADS.table_sizes(config.max_buckets))
    integers = len(DISPLAY_ADS.integers)
    return {
        "label": rng.integers(0, 2, size).astype(np.uint8),
        "integers": rng.normal(size=(size, integers)).astype(np.float32),
        "integers_missing": rng.random((size, integers)) < 0.1,
        "categories": rng.integers(0, rows, (size, len(rows))).astype(np.int32),
    }


def measure(
    name: str,
    config: ModelConfig,
    batch_size: int,
    rounds: int,
    floor: Floor,
    peer_python: str | None = None,
    *,
    with_peers: bool = True,
) -> list[Row]:
    """Returns the rows of one size and batch."""
    params, _, loss_fn = functional(config, DISPLAY_ADS, 0)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    batch = jax.device_put(random_batch(batch_size, config))
    weights = jnp.ones(batch_size)
    optimizer = optax.adam(1e-3)
    mechanism = Mechanism(Deterministic(batch_size, batch_size), 1.0, 1.0)
    algorithm = dpsgd(loss_fn, optimizer)
    scales = mechanism.scales()
    noise_key = jnp.asarray(RootKey.from_insecure_seed(0).noise_key(0))

    def plain_grad(params, batch):
        def total(params):
            return jnp.sum(jax.vmap(loss_fn, (None, 0))(params, batch))

        return jax.grad(total)(params)

    def ghost_grad(params, batch):
        return clipped_grad(loss_fn, l2_clip_norm=1.0)(params, batch, weights)[0]

    def plain_step(state, batch):
        gradient = jax.tree.map(lambda leaf: leaf / batch_size, plain_grad(state.params, batch))
        updates, moments = optimizer.update(gradient, state.opt_state, state.params)
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), moments)

    # As in the training loop, scales and key are arguments: of a constant stddev XLA would know
    # that the noise's loop has one round, unroll it, and make the noise once for each moment.
    def private_step(state, inputs):
        batch, noise_key, scales = inputs
        total, _ = algorithm.clipped_sum(state.params, batch, weights, scales)
        return algorithm.update(state, total, noise_key, scales)[0]

    def noise(total, inputs):
        noise_key, scales = inputs
        return privatize(total, (), noise_key, 0, scales)[0]

    def adam(state, gradient):
        updates, moments = optimizer.update(gradient, state.opt_state, state.params)
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), moments)

    options = compiler_options()  # those of the training loop, for all programs
    grads = {
        label: jax.jit(f, compiler_options=options).lower(params, batch).compile()
        for label, f in (("plain", plain_grad), ("ours", ghost_grad))
    }
    gradients = in_turns(
        {k: functools.partial(_run, f, params, batch) for k, f in grads.items()}, rounds
    )
    memory = {k: _temporary_bytes(f) for k, f in grads.items()}

    peers = _peers(loss_fn, params, batch, batch_size, name) if with_peers else {}
    peer_seconds = in_turns({k: f for k, (f, _) in peers.items()}, 1 if peers else 0)

    # Each program owns its state, which it gives away and gets back.
    state = algorithm.init(params)
    del params
    stepper = functools.partial(Carried, options=options)
    programs: dict[str, Callable[[], Any]] = {
        "plain": stepper(plain_step, state, batch),
        "ours": stepper(private_step, state, (batch, noise_key, scales)),
        "noise": stepper(noise, state.params, (noise_key, scales)),
        "update": stepper(lambda s, _: (adam(s[0], s[1]), s[1]), (state, _zeros(state))),
    }
    del state
    steps = in_turns(programs, rounds)
    del programs
    gc.collect()

    at = f"{name}, batch {batch_size}"
    large = name == "85M"
    barred = large and batch_size in STEP_BARS
    exact = f"{num_params / 1e6:.3g}M parameters, batch {batch_size}"
    grad_ratio, step_ratio = gradients.ratio("ours", "plain"), steps.ratio("ours", "plain")
    memory_ratio = memory["ours"] / memory["plain"]
    rows = [
        Row(f"non-private step, {exact}", steps.median("plain"), "s"),
        Row(f"DP step, {at}", steps.median("ours"), "s"),
        Row(f"floor of a step, {at}", floor.step(num_params, config, batch_size), "s"),
        _at_most(f"DP / non-private step, {at}", step_ratio, STEP_BARS.get(batch_size), barred),
        _at_most(f"clipped / non-private gradient, {at}", grad_ratio, 1.15, barred),
        _at_most(f"temporary memory, clipped / non-private, {at}", memory_ratio, 1.3, barred),
        Row(f"temporary memory, clipped gradient, {at}", memory["ours"] / 1e6, "MB"),
        Row(f"forward, backward, norms and sum, {at}", gradients.median("ours"), "s"),
        Row(f"noise alone, {at}", steps.median("noise"), "s"),
        Row(f"Adam alone, {at}", steps.median("update"), "s"),
        *_shares(gradients, steps, at),
    ]
    for peer, (_, scale) in peers.items():
        ratio = peer_seconds.median(peer) * scale / gradients.median("ours")
        row = f"{peer} / our clipped gradient, {at}"
        if peer.startswith("jax_privacy") and large and batch_size == 1024:
            rows += [
                Row(row, ratio, "x"),
                Row.at_least(
                    f"{peer}, plus our noise and update / our step, {at}",
                    (peer_seconds.median(peer) * scale + steps.median("noise")
                     + steps.median("update")) / steps.median("ours"),
                    "x",
                    100.0,
                ),
            ]  # fmt: skip
        else:
            rows.append(Row(row, ratio, "x"))
    if peer_python is not None:
        theirs = opacus(peer_python, config, batch_size, rounds)
        label = f"Opacus {theirs.version} with ghost clipping"
        rows += [
            Row(f"{label} / our step, {at}", theirs.private / steps.median("ours"), "x"),
            Row(f"{label} / its non-private step, {at}", theirs.private / theirs.plain, "x"),
        ]
    return rows


def _shares(gradients: Series, steps: Series, at: str) -> list[Row]:
    """Returns what part of the private step its parts are: of their sum, each run by itself."""
    plain = gradients.median("plain")
    parts = {
        "forward and backward": plain,
        "norms and clipping": gradients.median("ours") - plain,
        "noise": steps.median("noise"),
        "update": steps.median("update"),
    }
    total = sum(parts.values())
    return [
        Row(f"share of a step: {part}, {at}", 100 * seconds / total, "%")
        for part, seconds in parts.items()
    ]


def _peers(
    loss_fn: Callable, params: PyTree, batch: PyTree, batch_size: int, name: str
) -> dict[str, tuple[Callable[[], Any], float]]:
    """Returns each peer's clipped gradient, and by what its time is to be multiplied."""
    peers: dict[str, tuple[Callable[[], Any], float]] = {}
    if importlib.util.find_spec("jax_privacy") is not None:
        from jax_privacy import clipping

        few = min(PEER_EXAMPLES, batch_size)
        theirs = clipping.clipped_grad(
            loss_fn, l2_clip_norm=1.0, keep_batch_dim=False, microbatch_size=1
        )
        head = jax.tree.map(lambda column: column[:few], batch)
        label = f"jax_privacy clipped_grad (timed on {few} examples, scaled)"
        program = jax.jit(theirs).lower(params, head).compile()
        peers[label] = functools.partial(_run, program, params, head), batch_size / few
    if name == "1M" and batch_size == min(BATCHES):
        aggregate = optax.contrib.differentially_private_aggregate(1.0, 0.0, key=0)

        def theirs_optax(params, batch):
            per_example = jax.vmap(jax.grad(loss_fn), (None, 0))(params, batch)
            return aggregate.update(per_example, aggregate.init(params))[0]

        program = jax.jit(theirs_optax).lower(params, batch).compile()
        peers["optax.contrib dp aggregate"] = functools.partial(_run, program, params, batch), 1.0
    return peers


class Floor:
    """The rates of this machine: what memory copies and matrix products reach here, in CPU time."""

    def __init__(self, quick: bool) -> None:
        side = 256 if quick else 1024
        product, matrix = jax.jit(lambda a: a @ a), jnp.ones((side, side))
        series = in_turns({"product": lambda: _run(product, matrix)}, 5)
        self.bytes_per_second = copy_rate(2**22 if quick else 2**26)
        self.flops = 2 * side**3 / series.median("product")

    def step(self, num_params: int, config: ModelConfig, batch_size: int) -> float:
        """Returns seconds that no dense-Adam step can beat: its bytes, then its products."""
        features = len(DISPLAY_ADS.categories) * config.embedding_dim + 2 * len(
            DISPLAY_ADS.integers
        )
        widths = [features, *config.hidden, 1]
        products = sum(m * n for m, n in itertools.pairwise(widths))
        # Forward, the gradient of the weights and that of the inputs: 2 flops an entry each.
        return (
            BYTES_PER_PARAMETER * num_params / self.bytes_per_second
            + 6 * products * batch_size / self.flops
        )

    def rows(self) -> list[Row]:
        """Returns the two rates."""
        return [
            Row("rate of a copy in place, read and write", self.bytes_per_second / 1e9, "GB/s"),
            Row("rate of a float32 matrix product", self.flops / 1e9, "GFLOP/s"),
        ]


def _run(program: Callable, *arguments: Any) -> Any:
    return jax.block_until_ready(program(*arguments))


def _temporary_bytes(program: Any) -> int:
    return program.memory_analysis().temp_size_in_bytes


def _zeros(state: TrainState) -> PyTree:
    return jax.tree.map(jnp.zeros_like, state.params)


def _at_most(name: str, value: float, bar: float | None, barred: bool) -> Row:
    return Row.at_most(name, value, "x", bar) if barred and bar else Row(name, value, "x")


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and returns 1 if a bar does not hold."""
    parser = options_of("step", __doc__, quick="the smallest model and batch, once, no peers")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--batches", nargs="+", type=positive, default=list(BATCHES))
    parser.add_argument("--rounds", type=positive, default=5, help="rounds for each median")
    parser.add_argument("--peer-python", metavar="PATH", help="an interpreter that has Opacus")
    options = parser.parse_args(argv)
    if options.quick:
        options.sizes, options.batches, options.rounds = ["1M"], [min(BATCHES)], 1

    floor = Floor(options.quick)
    rows = floor.rows()
    for name in options.sizes:
        for batch_size in options.batches:
            rows += measure(
                name,
                SIZES[name],
                batch_size,
                options.rounds,
                floor,
                options.peer_python,
                with_peers=not options.quick,
            )
            print(f"measured {name}, batch {batch_size}", file=sys.stderr)
    if options.peer_python is None:
        rows.append(Row("Opacus with ghost clipping / our step (see --peer-python)", None, "x"))
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
