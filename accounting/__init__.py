"""What does it cost? Privacy profiles of batch samplers, bounded from below and above."""

from accounting.balls_and_bins import BallsAndBinsProfile
from accounting.gaussian import GaussianProfile
from accounting.multistage import MultistageProfile
from accounting.poisson import PoissonProfile
from accounting.profile import (
    Bound,
    ContradictoryBounds,
    PrivacyProfile,
    calibrate,
    epsilon,
    format_delta,
    largest_count,
    smallest_count,
)
from accounting.pure_release import WithPureReleaseProfile
from accounting.selection import SelectionProfile, TrialCount
from accounting.shuffle import ShuffleProfile
from accounting.truncation import (
    TruncatedProfile,
    log_overflow_probability,
    smallest_max_batch_size,
)
from accounting.units_then_poisson import UnitsThenPoissonProfile
from accounting.user_poisson import UserPoissonProfile
from accounting.worst_leaf import WorstLeafProfile

__all__ = [
    "BallsAndBinsProfile",
    "Bound",
    "ContradictoryBounds",
    "GaussianProfile",
    "MultistageProfile",
    "PoissonProfile",
    "PrivacyProfile",
    "SelectionProfile",
    "ShuffleProfile",
    "TrialCount",
    "TruncatedProfile",
    "UnitsThenPoissonProfile",
    "UserPoissonProfile",
    "WithPureReleaseProfile",
    "WorstLeafProfile",
    "calibrate",
    "epsilon",
    "format_delta",
    "largest_count",
    "log_overflow_probability",
    "smallest_count",
    "smallest_max_batch_size",
]
