"""Sizes of the image network, which need no JAX."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Settings that decide the shapes of the network's parameters."""

    shape: tuple[int, ...]
    """Height, width and channels of an image."""
    classes: int
    """Number of classes."""
    channels: tuple[int, ...]
    """Channels of each convolution, which halves height and width."""
    new_classes: int = 0
    """Number of last classes without training images. With new classes the network ends in its
    convolutions, and distances from a few images of each class decide."""

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape) < 1:
            raise ValueError(
                f"an image shape is (height, width, channels), each at least 1, got {self.shape}"
            )
        if self.classes < 2:
            raise ValueError(f"images need at least two classes, got {self.classes}")
        if min(self.channels, default=1) < 1:
            raise ValueError(f"--channels must each be at least 1, got {self.channels}")
        if self.new_classes and not 2 <= self.new_classes <= self.classes - 2:
            raise ValueError(
                f"--new-classes must be 0, or between 2 and {self.classes - 2} with "
                f"{self.classes} classes, got {self.new_classes}"
            )
