"""Who takes part, and when: batch samplers, each of which carries its own price."""

from samplers.balls_and_bins import BallsAndBins
from samplers.base import CHUNK, BatchSampler, EpochPlan, Participations
from samplers.batches import BatchSource, IndexBatch, IndexBlock, batch
from samplers.deterministic import Deterministic
from samplers.poisson import Poisson
from samplers.shuffle import Shuffle

__all__ = [
    "CHUNK",
    "BallsAndBins",
    "BatchSampler",
    "BatchSource",
    "Deterministic",
    "EpochPlan",
    "IndexBatch",
    "IndexBlock",
    "Participations",
    "Poisson",
    "Shuffle",
    "batch",
]
