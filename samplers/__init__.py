"""Who takes part, and when: batch samplers, each of which carries its own privacy cost."""

from samplers.balls_and_bins import BallsAndBins
from samplers.base import CHUNK, BatchSampler, EpochPlan, Participations
from samplers.batches import BatchSource, IndexBatch, IndexBlock, batch
from samplers.contribution import Contributions, cap_contributions
from samplers.deterministic import Deterministic
from samplers.epochs import EpochSampler
from samplers.full_batch import FullBatch
from samplers.multistage import Episode, Multistage
from samplers.poisson import Poisson
from samplers.population import Population, UnitData
from samplers.row_law import RowLaw
from samplers.shuffle import Shuffle
from samplers.tree import TreeShape, UnitTree
from samplers.units_then_poisson import UnitsThenPoisson
from samplers.user_poisson import UserPoisson

__all__ = [
    "CHUNK",
    "BallsAndBins",
    "BatchSampler",
    "BatchSource",
    "Contributions",
    "Deterministic",
    "Episode",
    "EpochPlan",
    "EpochSampler",
    "FullBatch",
    "IndexBatch",
    "IndexBlock",
    "Multistage",
    "Participations",
    "Poisson",
    "Population",
    "RowLaw",
    "Shuffle",
    "TreeShape",
    "UnitData",
    "UnitTree",
    "UnitsThenPoisson",
    "UserPoisson",
    "batch",
    "cap_contributions",
]
