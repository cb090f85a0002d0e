"""CPU time of a DP step beside an ordinary one, its peers and the machine's floor.

The model is the click model of the papers, at three sizes; data are random. All programs of a size
and batch take turns. No program reaches the floor: the time to move what a dense-Adam step must, at
the rate of a copy, and that of its matrix products at the rate of one. Peers: `clipped_grad` of
jax_privacy 2.0.0 on a few examples, one at a time, scaled (its microbatched form is a loop of equal
rounds); `differentially_private_aggregate` of optax, at the smallest size alone, as it needs all
gradients at once; and Opacus with ghost clipping, by an interpreter that has torch and opacus:
`--peer-python peer/bin/python`.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpsgd import clipped_grad
from dpsgd.core.algorithm import privatize
from dpsgd.core.state import TrainState
from dpsgd.engine.programs import compiler_options
from experiments.benchmarks.case import Row, at, cases, figure
from experiments.benchmarks.programs import (
    BYTES_PER_PARAMETER,
    SIZES,
    Problem,
    Program,
    copies_of,
    copy_rate,
    num_params,
    one_step,
    problem,
    total_loss,
    whole_batch,
)
from experiments.benchmarks.timing import Peer, in_turns
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import ModelConfig

BATCHES = 256, 1024, 8192
STEP_BARS = {("85M", 1024): 2.5, ("85M", 8192): 1.3}
"""Full DP step / non-private one, by size and batch; these sizes have the other bars, too."""
PEER_EXAMPLES = 4
"""Examples on which jax_privacy's loop is timed."""
MEASURED, QUICKLY = (1024, 2**26), (256, 2**22)
"""Sides of the matrices that are multiplied, and floats that are copied."""

# The same model on data of the same shapes: the median CPU seconds of a step, private or not.
OPACUS = """
import importlib.metadata, json, statistics, sys, time
import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

torch.set_num_threads(1)

class Model(torch.nn.Module):
    def __init__(self, rows, features, dim, dense, hidden):
        super().__init__()
        self.table = torch.nn.Embedding(rows, dim)
        widths = [features * dim + dense, *hidden]
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(m, n) for m, n in zip(widths, widths[1:]))
        self.logit = torch.nn.Linear(widths[-1], 1)

    def forward(self, ids, x):
        x = torch.cat([self.table(ids).flatten(1), x], dim=1)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.logit(x)[:, 0]

def seconds(private, batch, rounds, rows, features, dim, dense, hidden):
    ids = torch.randint(0, rows, (batch, features))
    x, y = torch.randn(batch, dense), torch.randint(0, 2, (batch,)).float()
    model = Model(rows, features, dim, dense, hidden)
    loss_fn = torch.nn.BCEWithLogitsLoss(reduction="mean")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if private:
        model = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="mean")
        optimizer = DPOptimizerFastGradientClipping(
            optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=batch)
        loss_fn = DPLossFastGradientClipping(model, optimizer, loss_fn, loss_reduction="mean")
    spent = []
    for _ in range(rounds + 1):
        begin = time.process_time()
        optimizer.zero_grad()
        loss_fn(model(ids, x), y).backward()
        optimizer.step()
        spent.append(time.process_time() - begin)
    return statistics.median(spent[1:])

print(json.dumps(importlib.metadata.version("opacus")), flush=True)
for line in sys.stdin:
    print(json.dumps(seconds(**json.loads(line))), flush=True)
"""


def step(
    size: str,
    batch_size: int,
    measured: tuple[int, int] = MEASURED,
    peers: bool = True,
    *,
    rounds: int = 5,
    peer_python: str | None = None,
) -> Iterator[Row]:
    config, optimizer = SIZES[size], optax.adam(1e-3)
    made = params, loss_fn, batch = problem(config, batch_size)
    plain_grad = jax.grad(total_loss(loss_fn))
    dp_step, (state, *inputs) = one_step(loss_fn, optimizer, whole_batch(batch_size), params, batch)
    weights, *of_noise = inputs[1:]

    def ghost_grad(params, batch):
        return clipped_grad(loss_fn, l2_clip_norm=1.0)(params, batch, weights)[0]

    def adam(state, gradient):
        updates, moments = optimizer.update(gradient, state.opt_state, state.params)
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), moments)

    def plain_step(state, batch):
        gradient = jax.tree.map(lambda leaf: leaf / batch_size, plain_grad(state.params, batch))
        return (adam(state, gradient),)

    options = compiler_options()  # those of the training loop, for all programs
    grads = {
        label: jax.jit(f, compiler_options=options).lower(params, batch).compile()
        for label, f in (("plain", plain_grad), ("ours", ghost_grad))
    }
    gradients = in_turns(
        {k: functools.partial(_run, f, params, batch) for k, f in grads.items()}, rounds
    )
    read: dict[str, Any] = {k: f.memory_analysis() for k, f in grads.items()}
    memory = {k: found.temp_size_in_bytes for k, found in read.items()}
    others = _peers(made, size, batch_size) if peers else {}
    theirs = in_turns({k: f for k, (f, _) in others.items()}, 1 if others else 0)

    # Each program owns its state, which it gives away and gets back.
    count = num_params(params)
    del made, params
    zeros = jax.tree.map(jnp.zeros_like, state.params)

    def noise_alone(total, key, scales):
        return (privatize(total, (), key, 0, scales)[0],)

    programs = {
        "plain": Program(plain_step, copies_of(state), batch),
        "ours": Program(dp_step, copies_of(state), *inputs),
        "noise": Program(noise_alone, copies_of(state.params), *of_noise),
        "update": Program(lambda s: ((adam(*s), s[1]),), copies_of((state, zeros))),
    }
    del state, zeros
    steps = in_turns(programs, rounds)
    del programs
    gc.collect()

    row, bar = at(f"{size}, batch {batch_size}"), STEP_BARS.get((size, batch_size))
    exact = f"{count / 1e6:.3g}M parameters, batch {batch_size}"
    ours, noise, update = (steps.median(part) for part in ("ours", "noise", "update"))
    plain, clipped = (gradients.median(part) for part in ("plain", "ours"))
    yield figure(f"non-private step, {exact}", steps.median("plain"), "s")
    yield row("DP step", ours, "s")
    yield row("floor of a step", floor_of_step(count, config, batch_size, rates(*measured)), "s")
    yield row("DP / non-private step", steps.ratio("ours", "plain"), "x", at_most=bar)
    ratio = gradients.ratio("ours", "plain")
    yield row("clipped / non-private gradient", ratio, "x", at_most=bar and 1.15)
    ratio = memory["ours"] / memory["plain"]
    yield row("temporary memory, clipped / non-private", ratio, "x", at_most=bar and 1.3)
    yield row("temporary memory, clipped gradient", memory["ours"] / 1e6, "MB")
    yield row("forward, backward, norms and sum", clipped, "s")
    yield row("noise alone", noise, "s")
    yield row("Adam alone", update, "s")
    parts = {  # of their sum, each run by itself
        "forward and backward": plain,
        "norms and clipping": clipped - plain,
        "noise": noise,
        "update": update,
    }
    for part, seconds in parts.items():
        yield row(f"share of a step: {part}", 100 * seconds / sum(parts.values()), "%")
    for peer, (_, scale) in others.items():
        seconds = theirs.median(peer, scale)
        yield row(f"{peer} / our clipped gradient", seconds / clipped, "x")
        if peer.startswith("jax_privacy") and (size, batch_size) == ("85M", 1024):
            whole = (seconds + noise + update) / ours
            yield row(f"{peer}, plus our noise and update / our step", whole, "x", at_least=100.0)
    if peer_python is None:
        yield figure("Opacus with ghost clipping / our step (see --peer-python)", None, "x")
        return
    tables = DISPLAY_ADS.table_sizes(config.max_buckets)
    question = {
        "rows": sum(tables), "features": len(tables), "dim": config.embedding_dim,
        "dense": 2 * len(DISPLAY_ADS.integers), "hidden": config.hidden,
        "batch": batch_size, "rounds": rounds,
    }  # fmt: skip
    with Peer(peer_python, OPACUS) as opacus:
        its_own, its = (opacus.ask(private=private, **question) for private in (False, True))
        label = f"Opacus {opacus.description} with ghost clipping"
    yield row(f"{label} / our step", its / ours, "x")
    yield row(f"{label} / its non-private step", its / its_own, "x")


def _peers(made: Problem, size: str, batch_size: int) -> dict[str, tuple[Callable[[], Any], float]]:
    """Returns each peer's clipped gradient, and by what its time is to be multiplied."""
    params, loss_fn, batch = made
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
    if size == "1M" and batch_size == min(BATCHES):
        aggregate = optax.contrib.differentially_private_aggregate(1.0, 0.0, key=0)

        def theirs_optax(params, batch):
            per_example = jax.vmap(jax.grad(loss_fn), (None, 0))(params, batch)
            return aggregate.update(per_example, aggregate.init(params))[0]

        program = jax.jit(theirs_optax).lower(params, batch).compile()
        peers["optax.contrib dp aggregate"] = functools.partial(_run, program, params, batch), 1.0
    return peers


@functools.cache
def rates(side: int, copied: int) -> tuple[float, float]:
    """Returns bytes a second of copies and flops a second of matrix products, in CPU time."""
    product, matrix = jax.jit(lambda a: a @ a), jnp.ones((side, side))
    series = in_turns({"product": lambda: _run(product, matrix)}, 5)
    return copy_rate(copied), 2 * side**3 / series.median("product")


def floor(measured: tuple[int, int] = MEASURED) -> Iterator[Row]:
    copies, products = rates(*measured)
    yield figure("rate of a copy in place, read and write", copies / 1e9, "GB/s")
    yield figure("rate of a float32 matrix product", products / 1e9, "GFLOP/s")


def floor_of_step(
    count: int, config: ModelConfig, batch_size: int, rates: tuple[float, float]
) -> float:
    """Returns seconds that no dense-Adam step can beat: its bytes, then its products."""
    copies, products = rates
    features = len(DISPLAY_ADS.categories) * config.embedding_dim + 2 * len(DISPLAY_ADS.integers)
    widths = [features, *config.hidden, 1]
    # Forward, the gradient of the weights and that of the inputs: 2 flops an entry each.
    flops = 6 * sum(m * n for m, n in itertools.pairwise(widths)) * batch_size
    return BYTES_PER_PARAMETER * count / copies + flops / products


def _run(program: Callable, *arguments: Any) -> Any:
    return jax.block_until_ready(program(*arguments))


CASES = [
    *cases(floor, quick={"measured": QUICKLY}, seconds=10),
    *cases(
        step,
        over={"size": SIZES, "batch_size": BATCHES},
        quick={"rounds": 1, "peers": False, "measured": QUICKLY},
    ),
]
