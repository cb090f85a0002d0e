"""Sources of images, uint8[rows, height, width, channels], and classes, int32[rows]."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from accounting.records import Count, Ge, Must, Record
from dpsgd.files import DAMAGED
from experiments.tasks.splits import (
    SPLITS,
    ColumnError,
    Columns,
    concatenate,
    random_halves,
    random_split,
    taken,
)
from experiments.tasks.tfds import DataSet, SourceError


@dataclass(frozen=True)
class Sizes(Record):
    """Settings that decide the shapes of the network's parameters."""

    shape: Annotated[tuple[Count, ...], Must("height, width and channels", lambda x: len(x) == 3)]
    """Height, width and channels of an image."""
    classes: Annotated[int, Ge(2)]
    """Number of classes."""
    channels: tuple[Count, ...]
    """Channels of each convolution, which halves height and width."""
    new_classes: int = 0
    """Number of last classes without training images. With new classes the network ends in its
    convolutions, and distances from a few images of each class decide."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.new_classes and not 2 <= self.new_classes <= self.classes - 2:
            raise ValueError(
                f"--new-classes must be 0, or between 2 and {self.classes - 2} with "
                f"{self.classes} classes, got {self.new_classes}"
            )


class Images(NamedTuple):
    """Data set of images: "image" and "label" of each split."""

    name: str
    shape: tuple[int, ...]
    classes: int
    splits: dict[str, Columns]

    def rows(self, split: str | None) -> Columns:
        """Returns a split's rows, or all; raises SourceError if unknown."""
        if split is None:
            return concatenate(self.splits.values())
        if split not in self.splits:
            raise SourceError(
                f"{self.name} has no split {split!a}; it has {', '.join(self.splits)}"
            )
        return self.splits[split]

    def few_shot(self, new_classes: int) -> Images:
        """Returns the data set with the last classes as "test".

        "train" and "validation" keep images of all other classes.
        """
        first = self.classes - new_classes

        def pick(rows: Columns, new: bool) -> Columns:
            return taken(rows, (rows["label"] >= first) == new)

        splits = {split: pick(self.splits[split], False) for split in ("train", "validation")}
        return self._replace(splits={**splits, "test": pick(self.rows(None), True)})


def digits() -> Images:
    """Returns scikit-learn's 1,797 handwritten digits, split 80/10/10.

    Source: Alpaydin, Kaynak, "Optical Recognition of Handwritten Digits" (UCI, 1998), its test set:
    8 x 8 pixels of 0 to 16, here scaled to 0 to 255.

    Raises:
      SourceError: If scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SourceError(
            "the digits need scikit-learn, which is not installed; run pip install scikit-learn, "
            "or name another data set by --data"
        ) from None
    data = load_digits()
    pixels = np.round(data.images[..., None] * (255 / 16)).astype(np.uint8)
    rows = {"image": pixels, "label": data.target.astype(np.int32)}
    return Images("digits", (8, 8, 1), 10, random_split(rows, 0))


def prepared(path: Path) -> Images:
    """Reads a data set of TensorFlow Datasets by its version directory.

    Raises:
      SourceError: If there is no data set, or its records do not have one image and one class.
    """
    if not path.is_dir():
        raise SourceError(
            f"{path} is not a directory; name the version directory of a data set, such as "
            "~/tensorflow_datasets/mnist/3.0.1"
        )
    data_set = DataSet(str(path))
    feature, shape, classes = _features(data_set)

    def decode(records: list[dict[str, Any]]) -> Columns:
        labels = np.array([record[data_set.label] for record in records], np.int32)
        for row in np.flatnonzero((labels < 0) | (labels >= classes))[:1]:
            raise ColumnError.unexpected(
                labels[row].item(),
                f"a class from 0 to {classes - 1}",
                column=data_set.label,
                row=int(row),
            )
        return {"image": np.stack([record[feature] for record in records]), "label": labels}

    empty: Columns = {"image": np.zeros((0, *shape), np.uint8), "label": np.zeros(0, np.int32)}
    splits = {split: [empty] for split in SPLITS}
    for target, rows in data_set.parts(decode):
        splits[target].append(rows)
    columns = {split: concatenate(blocks) for split, blocks in splits.items()}
    return Images(f"tfds:{data_set.name}", shape, classes, columns)


def _features(data_set: DataSet) -> tuple[str, tuple[int, ...], int]:
    """Returns the name of the image feature, the image shape and the number of classes."""
    import tensorflow_datasets as tfds

    name, features, label = data_set.name, data_set.features, data_set.label
    classes = getattr(features[label], "num_classes", None)
    if classes is None:
        raise SourceError(f"{name}, feature {label}: expected a class label")
    images = [key for key, kind in features.items() if isinstance(kind, tfds.features.Image)]
    if len(images) != 1:
        raise SourceError(
            f"{name} has {len(images)} image features, expected one; its features are "
            f"{', '.join(features)}"
        )
    kind = features[images[0]]
    if None in kind.shape or kind.np_dtype != np.uint8:
        raise SourceError(
            f"{name}, feature {images[0]}: found images of shape {kind.shape} and dtype "
            f"{np.dtype(kind.np_dtype)}, expected one fixed shape and uint8"
        )
    return images[0], kind.shape, classes


def stored(path: Path, num_classes: int | None) -> Images:
    """Reads the images of a NumPy archive, split 80/10/10.

    Args:
      path: Archive (.npz) of images "x", uint8[rows, height, width] or uint8[rows, height, width,
        channels], and classes "y", integer[rows].
      num_classes: Declared number of classes; counting them in "y" would read private labels.

    Raises:
      SourceError: If the archive is invalid.
    """
    if num_classes is None:
        raise SourceError(f"{path}: an archive needs --num-classes, its number of classes")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            x, y = arrays["x"], arrays["y"]
    except DAMAGED as error:
        raise SourceError(f"{path} is not a NumPy archive with arrays x and y: {error}") from None
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or not x.size:
        raise SourceError(
            f"{path}, x: expected uint8[rows, height, width] or uint8[rows, height, width, "
            f"channels], found {x.dtype}{x.shape}"
        )
    if (
        y.shape != x.shape[:1]
        or y.dtype.kind not in "iu"
        or not 0 <= y.min() <= y.max() < num_classes
    ):
        raise SourceError(
            f"{path}, y: expected one class per image, integers from 0 to "
            f"{num_classes - 1}, found {y.dtype}{y.shape} from {y.min(initial=0)} to "
            f"{y.max(initial=0)}"
        )
    pixels = x if x.ndim == 4 else x[..., None]
    rows = {"image": pixels, "label": y.astype(np.int32)}
    return Images(path.name, pixels.shape[1:], num_classes, random_split(rows, 0))


def load(
    data: Path | None,
    test: Path | None = None,
    num_classes: int | None = None,
) -> Images:
    """Returns the images of `data`, by default the digits.

    Args:
      data: NumPy archive (.npz), or version directory of a data set.
      test: Archive of validation and test images; all of `data` then trains.
      num_classes: Declared number of classes of an archive.

    Raises:
      SourceError: If the images cannot be read, or all images of `test` are in `data`.
    """
    if data is not None and data.suffix == ".npz":
        images = stored(data, num_classes)
    else:
        images = digits() if data is None else prepared(data)
    if test is not None:
        test_images = stored(test, images.classes)
        if test_images.shape != images.shape:
            raise SourceError(
                f"{test} has images of shape {test_images.shape}, {images.name} of {images.shape}"
            )
        trained = {image.tobytes() for image in images.rows(None)["image"]}
        if all(image.tobytes() in trained for image in test_images.rows(None)["image"]):
            raise SourceError(
                f"{test}: all its images are also in {images.name}; name other test images"
            )
        images = images._replace(
            splits={"train": images.rows(None), **random_halves(test_images.rows(None), 0)}
        )
    return images
