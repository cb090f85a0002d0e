"""What papers and libraries report, and what their settings give here.

A figure of `PUBLISHED` says where it could be read, with the digits that are given there. Where the
source states its settings, `their batches` are priced, in whole epochs of all rows, and `their
setting` is a run of this project by them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dpsgd import RunSpec
from experiments.benchmarks.case import Row, at, cases
from experiments.benchmarks.evidence_data import DATA, METRICS, FreshTest
from experiments.benchmarks.evidence_peers import earned
from experiments.benchmarks.models import Models, mean, run_of
from experiments.tasks.models import Functions, functions_of

ROWS = 60_000
"""Training images of MNIST, all of which train in the sources."""


class Setting(NamedTuple):
    """By what a figure was reached: a network and the options of a run, of SGD at one rate."""

    network: Literal["tanh", "relu"]
    sampler: Literal["shuffle", "poisson"]
    batch_size: int
    epochs: int
    noise_multiplier: float
    l2_clip_norm: float
    learning_rate: float
    momentum: float = 0.0

    @property
    def batches(self) -> dict[str, Any]:
        """Such batches in whole epochs of `ROWS`, in the words of `evidence_peers.profile`."""
        an_epoch, rate = ROWS // self.batch_size, self.batch_size / ROWS
        drawn = {"sampling_prob": rate, "steps": an_epoch * self.epochs}
        if self.sampler == "shuffle":
            drawn = {"steps_per_epoch": an_epoch, "epochs": self.epochs}
        return {"sampler": self.sampler, "noise_multiplier": self.noise_multiplier, **drawn}

    def spec(self) -> RunSpec:
        """Returns the run on the training rows that are here."""
        sgd = {"optimizer": "sgd", "schedule": "constant", "momentum": self.momentum}
        return run_of(
            self.sampler,
            self.batch_size,
            self.epochs,
            noise_multiplier=self.noise_multiplier,
            l2_clip_norm=self.l2_clip_norm,
            learning_rate=self.learning_rate,
            target_delta=1e-5,
            audit=False,
            **sgd,
        )


class Published(NamedTuple):
    """A figure that a paper or a library reports."""

    data: str
    epsilon: float
    delta: str
    metric: str
    value: float
    what: str
    source: str
    setting: Setting | None = None

    @property
    def place(self) -> str:
        """Of what is measured by its setting."""
        named = f"{self.data}, epsilon {self.epsilon:g}, their setting: {self.what}"
        return f"{named} ({self.source})"


_HANDCRAFTED = (
    "Tramèr, Boneh, ICLR 2021; table of main results in the README of the authors' repository, "
    "github.com/ftramer/Handcrafted-DP"
)
_TUTORIAL = (
    "TensorFlow Privacy; table of parameters in tutorials/README.md, github.com/tensorflow/privacy"
)
_OPACUS = "Opacus; sample parameter sets in examples/mnist_README.md, github.com/pytorch/opacus"
_GDP = (
    "Bu, Dong, Long, Su, Harvard Data Science Review 2020; table 4, epsilon by moments accountant, "
    "pmc.ncbi.nlm.nih.gov/articles/PMC7695347/table/T4"
)
_RELU, _RELU_TOO = "CNN on pixels, TensorFlow Privacy", "CNN on pixels, Opacus"
PUBLISHED = (
    Published("mnist", 3.0, "1e-05", "accuracy", 0.981, "CNN on pixels", _HANDCRAFTED,
              Setting("tanh", "shuffle", 512, 40, 1.23, 0.1, 0.5, 0.9)),
    Published("mnist", 3.0, "1e-05", "accuracy", 0.987, "scattering, linear", _HANDCRAFTED),
    Published("mnist", 3.0, "1e-05", "accuracy", 0.987, "scattering, CNN", _HANDCRAFTED),
    Published("mnist", 9.74, "1e-05", "accuracy", 0.973, _RELU, _TUTORIAL,
              Setting("relu", "shuffle", 256, 30, 0.6, 1.0, 0.4)),
    Published("mnist", 2.92, "1e-05", "accuracy", 0.966, _RELU, _TUTORIAL,
              Setting("relu", "shuffle", 256, 60, 1.12, 1.0, 0.08)),
    Published("mnist", 1.20, "1e-05", "accuracy", 0.950, _RELU, _TUTORIAL,
              Setting("relu", "shuffle", 256, 10, 1.2, 1.0, 0.32)),
    Published("mnist", 7.10, "1e-05", "accuracy", 0.9709, _RELU_TOO, _OPACUS,
              Setting("relu", "poisson", 240, 45, 0.7, 1.5, 0.25)),
    Published("mnist", 3.01, "1e-05", "accuracy", 0.9678, _RELU_TOO, _OPACUS,
              Setting("relu", "poisson", 240, 60, 1.1, 1.0, 0.15)),
    Published("mnist", 1.19, "1e-05", "accuracy", 0.9463, _RELU_TOO, _OPACUS,
              Setting("relu", "poisson", 240, 15, 1.3, 1.5, 0.25)),
    Published("movielens", 15.39, "1e-06", "rmse", 0.915, "MovieLens 1M, by rating", _GDP),
)  # fmt: skip
"""Only what could be read where it says, to the digits that are given there; papers' own splits."""


class Pooled(nnx.Module):
    """Two convolutions, each pooled, and 32 units: 26,010 weights, as all of these sources have.

    They are products with windows of the image: in a loop on a CPU ten times as fast as others.
    """

    def __init__(self, activation: Any, rngs: nnx.Rngs):
        self.activation = activation
        self.convolutions = nnx.List(
            nnx.Linear(side**2 * m, n, rngs=rngs) for side, m, n in ((8, 1, 16), (4, 16, 32))
        )
        self.hidden, self.logits = nnx.Linear(512, 32, rngs=rngs), nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, image: Any) -> jax.Array:
        """Returns float32[10] for uint8[28, 28, 1]."""
        x = jnp.pad(jnp.asarray(image, jnp.float32) / 255, [(3, 3), (3, 3), (0, 0)])
        for layer, side in zip(self.convolutions, (8, 4), strict=True):
            at = np.arange(0, len(x) - side + 1, 2)[:, None] + np.arange(side)
            windows = x[at][:, :, at].swapaxes(1, 2)  # [height, width, side, side, channels]
            x = self.activation(layer(windows.reshape(len(at), len(at), -1)))
            x = jnp.maximum(x[1:], x[:-1])  # the largest of 2 x 2
            x = jnp.maximum(x[:, 1:], x[:, :-1])
        return self.logits(self.activation(self.hidden(x.ravel())))


@functools.cache
def functions(network: str) -> Functions:
    """Returns the same functions for equal networks."""
    activation = {"tanh": jnp.tanh, "relu": nnx.relu}[network]
    return functions_of(functools.partial(Pooled, activation), ("image",))[0]


@dataclass(frozen=True)
class TheirNetwork(FreshTest):
    """Images as a source's network reads them."""

    network: str = "tanh"

    @property
    def functions(self) -> Functions:
        """See `functions`."""
        return functions(self.network)


def published() -> Iterator[Row]:
    """Yields what papers report; nothing is measured."""
    for one in PUBLISHED:
        place = f"{one.data}, epsilon {one.epsilon:g}, delta {one.delta}, {one.what}"
        yield at(f"{place} ({one.source})")(f"{METRICS[one.metric]}, published", one.value)


def priced() -> Iterator[Row]:
    """Yields what batches of each setting cost, beside the epsilon that the source prints."""
    for one in PUBLISHED:
        if one.setting:
            told = one.setting.batches | {"printed": one.epsilon}
            yield from earned(at(one.place), told, float(one.delta))


def settings(
    figure: str, *, files: str | None = None, setting_seeds: int = 1, written: str | None = None
) -> Iterator[Row]:
    """Measures what a source's setting gives here."""
    one, path = FIGURES[figure], DATA["mnist"].path(Path(files or "."))
    assert one.setting is not None, figure
    theirs = TheirNetwork(path, network=one.setting.network, num_classes=10)
    models = Models(theirs, setting_seeds, None if written is None else Path(written) / "settings")
    runs, row = models.trained(figure, one.setting.spec()), at(one.place)
    yield row(f"{METRICS[one.metric]}, test rows", mean(runs, f"test_{one.metric}"))
    yield row("CPU time of a run", mean(runs, "cpu_seconds"), "s")


FIGURES = {f"{one.what}, epsilon {one.epsilon:g}": one for one in PUBLISHED if one.setting}
CASES = [
    *cases(published, quick={}, seconds=1),
    *cases(priced, "their batches", seconds=20),
    *cases(
        settings,
        "their setting",
        over={"figure": FIGURES},
        seconds=300,
        needs=("--files",),
        asked=True,
    ),
]
