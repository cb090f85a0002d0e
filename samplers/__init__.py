"""Batch samplers, each with its own privacy cost.

>>> sampler = BallsAndBins(num_examples=50_000, batch_size=500, epochs=2)
>>> sampler.num_steps
200
>>> sampler.privacy(noise_multiplier=1.0).epsilon(delta=1e-5).format_upper()
'0.805'
>>> source = BatchSource(sampler, seed=0)
>>> source.fill(0, 2).weights.shape  # two batches, padded to one size
(2, 626)
"""

from samplers.balls_and_bins import BallsAndBins
from samplers.base import BatchSampler
from samplers.batches import BatchSource, batch
from samplers.contribution import cap_contributions
from samplers.deterministic import Deterministic
from samplers.epochs import EpochSampler
from samplers.full_batch import FullBatch
from samplers.multistage import Multistage
from samplers.plans import Participations
from samplers.poisson import Poisson
from samplers.population import Population, UnitData
from samplers.shuffle import Shuffle
from samplers.tree import UnitTree
from samplers.units_then_poisson import UnitsThenPoisson
from samplers.user_poisson import UserPoisson

__all__ = [
    "BallsAndBins",
    "BatchSampler",
    "BatchSource",
    "Deterministic",
    "EpochSampler",
    "FullBatch",
    "Multistage",
    "Participations",
    "Poisson",
    "Population",
    "Shuffle",
    "UnitData",
    "UnitTree",
    "UnitsThenPoisson",
    "UserPoisson",
    "batch",
    "cap_contributions",
]
