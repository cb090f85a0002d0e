"""What tasks have in common: a model as pure functions, and metrics of rows that do not train."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # a command's help reads the fields alone, and waits for no array
    import jax
    from flax import nnx

PyTree = Any


class Models:
    """What a model needs beside rows to be trained on."""

    @property
    def functions(self) -> Any:
        """The model as pure functions: the same ones for equal models, which share programs."""
        raise NotImplementedError

    @property
    def loss(self) -> Callable[[PyTree, PyTree], Any]:
        """(params, example) -> loss, a scalar: one function for equal models."""
        return self.functions.loss

    @property
    def predict(self) -> Callable[[PyTree, PyTree], Any]:
        """(params, rows) -> what is predicted of each row, float32[rows] or float32[rows, ...]."""
        return self.functions.predict


class ClassModels(Models):
    """Networks that tell classes apart."""

    def init(self, seed: int) -> PyTree:
        """Returns fresh parameters, which depend on no row."""
        return self.functions.init(seed)

    def evaluate(self, params: PyTree, blocks: Iterable[PyTree]) -> dict[str, float]:
        """Returns accuracy and, but of embeddings, log loss (nats); NaN where it diverged.

        Raises:
          ValueError: if there are no rows, or too few.
        """
        import numpy as np

        _, _, _, logits, metrics = self.functions
        return metrics((np.asarray(logits(params, rows)), rows["label"]) for rows in blocks)


class HeldOut:
    """A task whose validation and test rows are read block by block."""

    evaluate: Callable[[PyTree, Iterable[PyTree]], dict[str, float]]

    def held_out(self, split: str) -> Iterable[PyTree]:
        """Returns the blocks of rows of "validation" or of "test"."""
        raise NotImplementedError

    def metrics(self, params: PyTree) -> dict[str, float]:
        """Returns what `evaluate` does of the validation and of the test rows, by their names."""
        return {
            f"{split}_{name}": value
            for split in ("validation", "test")
            for name, value in self.evaluate(params, self.held_out(split)).items()
        }


class Functions(NamedTuple):
    """A network that tells classes apart, as pure functions of its parameters."""

    init: Callable[[int], PyTree]
    """(seed) -> fresh parameters."""
    loss: Callable[[PyTree, PyTree], jax.Array]
    """(params, example) -> cross entropy in nats of what the network reads, and "label"."""
    predict: Callable[[PyTree, PyTree], jax.Array]
    """(params, rows) -> probabilities of the classes, float32[rows, classes]."""
    logits: Callable[[PyTree, PyTree], jax.Array]
    """(params, rows) -> their logarithms, up to a constant a row; compiled."""
    metrics: Callable[[Iterable[tuple[Any, Any]]], dict[str, float]]
    """Of blocks of logits and labels."""


def functions_of(
    made: Callable[[nnx.Rngs], nnx.Module], inputs: tuple[str, ...], trained: Any = None
) -> tuple[Functions, Callable[..., jax.Array]]:
    """Returns a network as pure functions, and as (params, *inputs) -> logits of one row.

    Args:
      made: Returns the network, which maps `inputs` of one row to its logits.
      inputs: Columns that it reads.
      trained: Which parameters have derivatives, as a filter of flax; by default all.
    """
    import jax
    import optax
    from flax import nnx

    from dpsgd import split_module
    from experiments.tasks.classes import class_metrics

    shapes = nnx.eval_shape(lambda: made(nnx.Rngs(0)))
    _, network = split_module(shapes, trained=nnx.Param if trained is None else trained)

    def init(seed):
        return split_module(made(nnx.Rngs(seed)), trained=nnx.Param)[0]

    def loss(params, example):
        found = network(params, *(example[name] for name in inputs))
        return optax.softmax_cross_entropy_with_integer_labels(found, example["label"])

    def logits(params, rows):
        columns = [rows[name] for name in inputs]
        return jax.vmap(network, (None, *(0 for _ in columns)))(params, *columns)

    def predict(params, rows):
        return jax.nn.softmax(logits(params, rows))

    return Functions(init, loss, predict, jax.jit(logits), class_metrics), network
