"""A task of the tests' own: a line through points, which trains in a second."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Line:
    """Points near the plane y = x1 + x2 + ..., and the weights that say so."""

    rows: int = 160
    width: int = 3
    seed: int = 0

    def columns(self):
        return self._points(self.seed, self.rows)

    def init(self, seed):
        return {"w": np.random.default_rng(seed).normal(size=self.width).astype(np.float32)}

    def loss(self, params, example):
        return jnp.square(example["x"] @ params["w"] - example["y"])

    def metrics(self, params):
        public = self._points(7, 50)
        error = np.square(public["x"] @ np.asarray(params["w"]) - public["y"]).mean()
        return {"test_error": float(error), "test_num_examples": 50}

    def generated(self, count):
        return self._points(8, count)

    def describe(self):
        return {"headline": "test_error", "better": "lower", "width": self.width}

    def _points(self, seed, count):
        x = np.random.default_rng(seed).normal(size=(count, self.width)).astype(np.float32)
        return {"x": x, "y": x.sum(axis=1)}


line = Line()
