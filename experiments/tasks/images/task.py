"""Image task: pixels, a small convolutional network, accuracy and log loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpsgd.runs.records import build, to_json
from experiments.tasks import Models
from experiments.tasks.classes import few_shot_problem
from experiments.tasks.images import sources
from experiments.tasks.images.sources import Sizes
from experiments.tasks.splits import blocks_of
from samplers import UnitData, UnitTree

if TYPE_CHECKING:  # a command's help reads the fields alone, and waits for no JAX
    from experiments.tasks.images.model import Functions

PyTree = Any


class ImageModels(Models):
    """Image network without rows, determined by its sizes."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    @property
    def functions(self) -> Functions:
        """Pure functions of the network, see `model.functions`."""
        from experiments.tasks.images.model import functions

        return functions(self.sizes)

    def evaluate(self, params: PyTree, blocks: Iterable[PyTree]) -> dict[str, float]:
        """Returns accuracy and, except for embeddings, log loss (nats).

        A diverged model has NaN.

        Raises:
          ValueError: If there are no rows, or too few.
        """
        _, _, _, logits, metrics = self.functions
        return metrics((np.asarray(logits(params, rows)), rows["label"]) for rows in blocks)

    def read(
        self, path: Path, *, labelled: bool = True, split: str | None = None
    ) -> Iterator[PyTree]:
        """Yields the images of a data set or split in blocks.

        Raises:
          ValueError: If the images cannot be read, or do not fit the network.
        """
        sizes = self.sizes
        images = sources.load(path, num_classes=sizes.classes)
        if (images.shape, images.classes) != (sizes.shape, sizes.classes):
            raise ValueError(
                f"{images.name} has images of shape {images.shape} and {images.classes} classes, "
                f"but the model needs {sizes.shape} and {sizes.classes}"
            )
        if split is not None and sizes.new_classes:
            images = images.few_shot(sizes.new_classes)
        rows = images.rows(split)
        return blocks_of(rows if labelled else {"image": rows["image"]})

    def generated(self, count: int) -> PyTree:
        """Returns `count` synthetic probe rows: uniform noise and labels."""
        rng = np.random.default_rng(0)
        rows = {"image": rng.integers(0, 256, (count, *self.sizes.shape), np.uint8)}
        if self.sizes.new_classes:
            return rows
        return {**rows, "label": rng.integers(0, self.sizes.classes, count, np.int32)}

    def describe(self) -> dict[str, Any]:
        """Returns the sizes, the input of `described`."""
        return {"sizes": to_json(self.sizes), "headline": "test_accuracy", "better": "higher"}

    @staticmethod
    def described(description: Mapping[str, Any], where: str = "task") -> ImageModels:
        """Returns the networks of a described task, without its images.

        Raises:
          ValueError: If `description` is invalid; the message begins with `where`.
        """
        return ImageModels(build(Sizes, description.get("sizes"), f"{where}: sizes"))


@dataclass(frozen=True)
class Images(ImageModels):
    """Images of some classes, a small convolutional network, accuracy.

    Attributes:
      data: Prepared data set of TensorFlow Datasets (its version directory, array_record) or a
        NumPy archive (.npz) of images x and labels y. Default: scikit-learn's digits.
      channels: Channels of each convolution, which halves the image's sides. Without any, the model
        has one layer.
      new_classes: Number of final classes that no training image has (few-shot, with
        sampler:multistage). An episode draws classes, then images of each; its one gradient is
        clipped (clipped level 0). Images are protected; the class of an image is not.
      tasks: Parts of the images, by public number, for few-shot training. With several, a step
        draws some of them and an episode of each (clipped level 1).
      test: NumPy archive of validation and test images; all images of --data then train.
      num_classes: Declared number of classes of an archive; larger labels are refused. Data sets of
        TensorFlow and the digits state their own.
    """

    data: Path | None = None
    channels: tuple[int, ...] = (16, 32)
    new_classes: int = 0
    tasks: int = 1
    test: Path | None = None
    num_classes: int | None = None

    def __post_init__(self) -> None:
        if self.tasks < 1 or (self.tasks > 1 and not self.new_classes):
            raise ValueError(
                f"--tasks must be at least 1, or exactly 1 without --new-classes, got {self.tasks}"
            )

    @cached_property
    def source(self) -> sources.Images:
        """Images, read on first use."""
        images = sources.load(self.data, self.test, self.num_classes)
        if self.num_classes not in (None, images.classes):
            raise ValueError(
                f"--num-classes {self.num_classes}: {images.name} has {images.classes} classes; "
                "leave it out"
            )
        return images.few_shot(self.new_classes) if self.new_classes else images

    @property
    def sizes(self) -> Sizes:  # type: ignore[override]
        """Sizes of the network, from public properties of the images."""
        source = self.source
        return Sizes(source.shape, source.classes, self.channels, self.new_classes)

    def not_covered(self) -> tuple[str, ...]:
        """Returns facts about the images that the guarantee leaves public."""
        return ("which class an image is of, and how many images a class has",) * bool(
            self.new_classes
        )

    def columns(self) -> PyTree:
        """Returns the training images and labels.

        Images are uint8[rows, height, width, channels]. In few-shot training tasks and classes are
        units of a public tree, not columns.
        """
        rows = self.source.splits["train"]
        if not self.new_classes:
            return rows
        task = np.zeros(len(rows["label"]), np.int64)
        for label in np.unique(rows["label"]):  # equal shares of each class
            of_class = rows["label"] == label
            task[of_class] = np.arange(of_class.sum()) % self.tasks
        levels = {"task": task, "class": rows["label"]}
        tree = UnitTree.from_columns(levels if self.tasks > 1 else {"class": rows["label"]})
        return UnitData.of_tree(tree, {"image": rows["image"]})

    def held_out(self, split: str) -> Iterator[PyTree]:
        """Returns the images of a split, block by block."""
        return blocks_of(self.source.rows(split))

    def check(self, begun: Mapping[str, Any] | None = None) -> None:
        """Raises ValueError if a split is too small, or the sizes changed."""
        for split in self.source.splits:
            labels = self.source.rows(split)["label"]
            if not len(labels):
                raise ValueError(f"{self.source.name} has no {split} images")
            # Labels of training images are private, and have no metrics.
            if self.new_classes and split != "train" and (problem := few_shot_problem(labels)):
                raise ValueError(f"{self.source.name}, {split} images: {problem}; give more images")
        if begun is not None and begun.get("sizes") != self.describe()["sizes"]:
            raise ValueError(
                f"{self.source.name} has other image shapes or classes than the run; pass the "
                "run's data"
            )
