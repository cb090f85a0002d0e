"""Base classes of tasks: models as pure functions, and metrics of held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # a command's help reads the fields alone, and waits for no array
    import jax
    from flax import nnx

PyTree = Any


class Models:
    """Model without training rows."""

    @property
    def functions(self) -> Any:
        """Model as pure functions, equal for equal models, which share programs."""
        raise NotImplementedError

    @property
    def loss(self) -> Callable[[PyTree, PyTree], Any]:
        """Loss (params, example) -> scalar, one function for equal models."""
        return self.functions.loss

    @property
    def predict(self) -> Callable[[PyTree, PyTree], Any]:
        """Predictions (params, rows) -> float32[rows] or float32[rows, ...]."""
        return self.functions.predict


class ClassModels(Models):
    """Classification networks."""

    def init(self, seed: int) -> PyTree:
        """Returns new parameters, which depend on no row."""
        return self.functions.init(seed)

    def evaluate(self, params: PyTree, blocks: Iterable[PyTree]) -> dict[str, float]:
        """Returns accuracy and, except for embeddings, log loss (nats).

        A diverged model has NaN.

        Raises:
          ValueError: If there are no rows, or too few.
        """
        import numpy as np

        _, _, _, logits, metrics = self.functions
        return metrics((np.asarray(logits(params, rows)), rows["label"]) for rows in blocks)


class HeldOut:
    """Task whose validation and test rows are read block by block."""

    evaluate: Callable[[PyTree, Iterable[PyTree]], dict[str, float]]

    def held_out(self, split: str) -> Iterable[PyTree]:
        """Returns the blocks of "validation" or "test" rows."""
        raise NotImplementedError

    def metrics(self, params: PyTree) -> dict[str, float]:
        """Returns `evaluate` of the validation and test rows, by name."""
        return {
            f"{split}_{name}": value
            for split in ("validation", "test")
            for name, value in self.evaluate(params, self.held_out(split)).items()
        }


class Functions(NamedTuple):
    """Classification network as pure functions of its parameters."""

    init: Callable[[int], PyTree]
    """(seed) -> new parameters."""
    loss: Callable[[PyTree, PyTree], jax.Array]
    """(params, example) -> cross entropy of the inputs and "label", nats."""
    predict: Callable[[PyTree, PyTree], jax.Array]
    """(params, rows) -> probabilities of the classes, float32[rows, classes]."""
    logits: Callable[[PyTree, PyTree], jax.Array]
    """(params, rows) -> log probabilities up to a constant per row; compiled."""
    metrics: Callable[[Iterable[tuple[Any, Any]]], dict[str, float]]
    """Blocks of logits and labels -> metrics by name."""


def functions_of(
    build: Callable[[nnx.Rngs], nnx.Module], inputs: tuple[str, ...]
) -> tuple[Functions, Callable[..., jax.Array]]:
    """Returns a network as pure functions, and as (params, *inputs) -> logits.

    Args:
      build: Function that builds the network, which maps `inputs` of one row to its logits.
      inputs: Columns that the network reads.
    """
    import jax
    import optax
    from flax import nnx

    from dpsgd import split_module
    from experiments.tasks.classes import class_metrics

    shapes = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    _, network = split_module(shapes, trained=nnx.Param)

    def init(seed):
        return split_module(build(nnx.Rngs(seed)), trained=nnx.Param)[0]

    def loss(params, example):
        row_logits = network(params, *(example[name] for name in inputs))
        return optax.softmax_cross_entropy_with_integer_labels(row_logits, example["label"])

    def logits(params, rows):
        columns = [rows[name] for name in inputs]
        return jax.vmap(network, (None, *(0 for _ in columns)))(params, *columns)

    def predict(params, rows):
        return jax.nn.softmax(logits(params, rows))

    return Functions(init, loss, predict, jax.jit(logits), class_metrics), network
