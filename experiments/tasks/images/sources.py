"""Images with their classes, uint8[rows, height, width, channels] and int32[rows], by split."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.tasks import tfds
from experiments.tasks.splits import Columns, joined, random_halves, random_split, taken
from experiments.tasks.tfds import SourceError

ROWS_PER_READ = 1024


class Images(NamedTuple):
    """A data set of images: "image" and "label" of each split."""

    name: str
    shape: tuple[int, ...]
    classes: int
    splits: dict[str, Columns]

    def rows(self, split: str | None) -> Columns:
        """Returns the rows of a split, or of all; ValueError if there is no such split."""
        if split is None:
            return joined(self.splits.values())
        if split not in self.splits:
            raise SourceError(f"{self.name} has no split {split!a}: {', '.join(self.splits)}")
        return self.splits[split]

    def few_shot(self, new_classes: int) -> Images:
        """Returns the images of the last classes as "test", and of the others those that train.

        Images of classes that train are in "train" and "validation" as before, and in no test.
        """
        first = self.classes - new_classes

        def some(rows: Columns, new: bool) -> Columns:
            return taken(rows, (rows["label"] >= first) == new)

        splits = {split: some(self.splits[split], False) for split in ("train", "validation")}
        return self._replace(splits={**splits, "test": some(self.rows(None), True)})


def digits() -> Images:
    """Returns the 1,797 handwritten digits that scikit-learn ships, split 80/10/10 by number.

    Source: Alpaydin, Kaynak, "Optical Recognition of Handwritten Digits" (UCI, 1998), its test set:
    8 x 8 pixels of 0 to 16, here scaled to 0 to 255.

    Raises:
      SourceError: if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SourceError(
            "the digits come with scikit-learn, which is not installed: pip install scikit-learn, "
            "or name a data set of TensorFlow Datasets"
        ) from None
    found = load_digits()
    pixels = np.round(found.images[..., None] * (255 / 16)).astype(np.uint8)
    rows = {"image": pixels, "label": found.target.astype(np.int32)}
    return Images("digits", (8, 8, 1), 10, random_split(rows, 0))


def prepared(path: Path) -> Images:
    """Returns a data set of TensorFlow Datasets, of which `path` is the directory of a version.

    Raises:
      SourceError: if there is none, or not one image and one class a record.
    """
    if not path.is_dir():
        raise SourceError(
            f"{path} is no directory: name that of the version of a data set, such as "
            "~/tensorflow_datasets/mnist/3.0.1"
        )
    builder = tfds.open_prepared(str(path), None)
    image, label, shape, classes = _features(builder)
    none: Columns = {"image": np.zeros((0, *shape), np.uint8), "label": np.zeros(0, np.int32)}
    splits = {split: [none] for split in tfds.SPLITS}
    for part, rows in tfds.parts_of(builder, lambda x: _read(builder, x, image, label, classes)):
        splits[part].append(rows)
    whole = {split: joined(parts) for split, parts in splits.items()}
    return Images(f"tfds:{builder.info.full_name}", shape, classes, whole)


def _features(builder: Any) -> tuple[str, str, tuple[int, ...], int]:
    """Returns the names of image and label, the shape of an image and the number of classes."""
    import tensorflow_datasets

    kinds = tensorflow_datasets.features
    name, features = builder.info.full_name, tfds.features_of(builder)
    label = tfds.label_of(builder)
    tfds.check_features(builder, [label])
    classes = getattr(features[label], "num_classes", None)
    if classes is None:
        raise SourceError(f"{name}, feature {label}: expected the number of a class, no other type")
    images = [key for key, kind in features.items() if isinstance(kind, kinds.Image)]
    if len(images) != 1:
        raise SourceError(
            f"{name} has {len(images)} features that are images, expected one; it has "
            f"{', '.join(features)}"
        )
    kind = features[images[0]]
    if None in kind.shape or kind.np_dtype != np.uint8:
        raise SourceError(
            f"{name}, feature {images[0]}: images of shape {kind.shape} and type "
            f"{np.dtype(kind.np_dtype)}, expected one size for all and uint8"
        )
    return images[0], label, kind.shape, classes


def _read(builder: Any, split: str, image: str, label: str, classes: int) -> Iterator[Columns]:
    done = 0
    for records in tfds.records_of(builder, split, ROWS_PER_READ):
        labels = np.array([record[label] for record in records], np.int32)
        if (wrong := np.flatnonzero((labels < 0) | (labels >= classes))).size:
            raise SourceError(
                f"{builder.info.full_name}, split {split}, record {done + wrong[0]}, feature "
                f"{label}: found {labels[wrong[0]]}, expected a class from 0 to {classes - 1}"
            )
        yield {"image": np.stack([record[image] for record in records]), "label": labels}
        done += len(records)


def stored(path: Path, num_classes: int | None) -> Images:
    """Returns the images of a NumPy archive, split 80/10/10 by number.

    Args:
      path: Of "x", uint8[rows, height, width] or with channels behind, and "y", whole numbers
        [rows].
      num_classes: Declared number of classes, which are 0, 1, ...; it is never counted in `y`.

    Raises:
      SourceError: if it is no such archive.
    """
    if num_classes is None:
        raise SourceError(f"{path}: declare the number of classes of an archive by --num-classes")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            x, y = arrays["x"], arrays["y"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise SourceError(f"{path} is no NumPy archive of images x and labels y: {error}") from None
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or not x.size:
        raise SourceError(
            f"{path}, x: expected images, uint8[rows, height, width] or with channels, found "
            f"{x.dtype}{x.shape}"
        )
    if (
        y.shape != x.shape[:1]
        or y.dtype.kind not in "iu"
        or not 0 <= y.min() <= y.max() < num_classes
    ):
        raise SourceError(
            f"{path}, y: expected the class of each image, whole numbers from 0 to "
            f"{num_classes - 1}, found {y.dtype}{y.shape} from {y.min(initial=0)} to "
            f"{y.max(initial=0)}"
        )
    pixels = x if x.ndim == 4 else x[..., None]
    rows = {"image": pixels, "label": y.astype(np.int32)}
    return Images(path.name, pixels.shape[1:], num_classes, random_split(rows, 0))


def _named(data: Path | None, num_classes: int | None) -> Images:
    if data is not None and data.suffix == ".npz":
        return stored(data, num_classes)
    return digits() if data is None else prepared(data)


def load(
    data: Path | None,
    test: Path | None = None,
    num_classes: int | None = None,
) -> Images:
    """Returns the images that `data` names, or by default the digits.

    Args:
      data: A NumPy archive (.npz), or the directory of a version of a data set.
      test: An archive of the images that validate and test; all of `data` train then.
      num_classes: Of an archive, declared.

    Raises:
      SourceError: if the images cannot be read, or all images of `test` are in `data`.
    """
    found = _named(data, num_classes)
    if test is not None:
        held = stored(test, found.classes)
        if held.shape != found.shape:
            raise SourceError(
                f"{test} has images of shape {held.shape}, {found.name} of {found.shape}"
            )
        trained = {image.tobytes() for image in found.rows(None)["image"]}
        if all(image.tobytes() in trained for image in held.rows(None)["image"]):
            raise SourceError(f"{test}: all of its images are in {found.name} too: name others")
        found = found._replace(
            splits={"train": found.rows(None), **random_halves(held.rows(None), 0)}
        )
    return found
