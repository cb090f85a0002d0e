"""What does it cost? Privacy profiles of batch samplers, bounded from below and above."""

from accounting.attack import attack_accuracy, attack_advantage
from accounting.calibration import calibrate, calibrate_advantage, largest_count
from accounting.profile import Bound, PrivacyProfile, default_delta, epsilon
from accounting.profiles.balls_and_bins import BallsAndBinsProfile
from accounting.profiles.gaussian import GaussianProfile
from accounting.profiles.multistage import MultistageProfile
from accounting.profiles.poisson import PoissonProfile
from accounting.profiles.shuffle import ShuffleProfile
from accounting.profiles.units_then_poisson import UnitsThenPoissonProfile
from accounting.profiles.user_poisson import UserPoissonProfile
from accounting.releases import SelectionProfile, TrialCount

__all__ = [
    "BallsAndBinsProfile",
    "Bound",
    "GaussianProfile",
    "MultistageProfile",
    "PoissonProfile",
    "PrivacyProfile",
    "SelectionProfile",
    "ShuffleProfile",
    "TrialCount",
    "UnitsThenPoissonProfile",
    "UserPoissonProfile",
    "attack_accuracy",
    "attack_advantage",
    "calibrate",
    "calibrate_advantage",
    "default_delta",
    "epsilon",
    "largest_count",
]
