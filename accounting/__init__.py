"""What does it cost? Privacy profiles of batch samplers, bounded from below and above."""

from accounting.attack import attack_accuracy, attack_advantage, implied_advantage
from accounting.calibration import (
    calibrate,
    calibrate_advantage,
    largest_count,
    smallest_count,
)
from accounting.checks import check_guarantee_delta
from accounting.profile import (
    Bound,
    ContradictoryBounds,
    PrivacyProfile,
    default_delta,
    epsilon,
    format_delta,
)
from accounting.profiles.balls_and_bins import BallsAndBinsProfile
from accounting.profiles.gaussian import GaussianProfile
from accounting.profiles.multistage import MultistageProfile
from accounting.profiles.poisson import PoissonProfile
from accounting.profiles.shuffle import ShuffleProfile
from accounting.profiles.truncation import (
    TruncatedProfile,
    log_overflow_probability,
    smallest_max_batch_size,
)
from accounting.profiles.units_then_poisson import UnitsThenPoissonProfile
from accounting.profiles.user_poisson import UserPoissonProfile
from accounting.profiles.worst_leaf import WorstLeafProfile
from accounting.releases.envelope import EnvelopeProfile
from accounting.releases.gaussian_release import WithGaussianReleaseProfile
from accounting.releases.pure_release import WithPureReleaseProfile
from accounting.releases.selection import SelectionProfile, TrialCount

__all__ = [
    "BallsAndBinsProfile",
    "Bound",
    "ContradictoryBounds",
    "EnvelopeProfile",
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
    "WithGaussianReleaseProfile",
    "WithPureReleaseProfile",
    "WorstLeafProfile",
    "attack_accuracy",
    "attack_advantage",
    "calibrate",
    "calibrate_advantage",
    "check_guarantee_delta",
    "default_delta",
    "epsilon",
    "format_delta",
    "implied_advantage",
    "largest_count",
    "log_overflow_probability",
    "smallest_count",
    "smallest_max_batch_size",
]
