"""A sampler of the tests' own, as one from outside the package: nothing of the package names it."""

from dataclasses import dataclass

import numpy as np

from accounting import PoissonProfile
from samplers import EpochSampler, Participations
from samplers.row_law import IndependentRows


@dataclass(frozen=True)
class Coins(EpochSampler):
    """Every example throws a coin of its own for every step."""

    heads: float = 0.125
    """Probability with which an example takes part in a step."""

    @property
    def expected_batch_size(self):
        return self.num_examples * self.heads

    @property
    def padded_batch_size(self):
        return self.num_examples

    def privacy(self, noise_multiplier):
        return PoissonProfile(noise_multiplier, self.heads, self.num_steps)

    def row_law(self):
        return IndependentRows(
            steps_per_epoch=self.steps_per_epoch,
            epochs=self.epochs,
            once=False,
            probability=self.heads,
        )

    def participations(self, seed, epoch, chunk):
        rows = self.chunk_range(chunk)
        coins = np.random.default_rng([seed % 2**128, epoch, chunk])
        steps, examples = np.nonzero(coins.random((self.steps_per_epoch, len(rows))) < self.heads)
        return Participations((rows.start + examples).astype(np.int32), steps.astype(np.int32))
