"""A setting out of range is refused in one line that names it, by whatever takes it.

Noise multipliers, epsilons and deltas of profiles: `profiles/test_every_profile.py`.
"""

import math
from functools import partial

import numpy as np
import pytest

from accounting import (
    BallsAndBinsProfile,
    Bound,
    GaussianProfile,
    MultistageProfile,
    PoissonProfile,
    ShuffleProfile,
    TrialCount,
    UserPoissonProfile,
    calibrate,
    calibrate_advantage,
)
from accounting.algebra.likelihood_ratio import LikelihoodRatio
from accounting.conversions import PrivacyCurve, ratio_to_privacy_loss_distribution
from accounting.estimates.amplification import (
    advise_batch_size,
    amplify,
    deamplify,
    full_batch_noise,
    gaussian_noise_penalty,
    gaussian_noise_penalty_many_steps,
    laplace_noise_penalty,
    laplace_noise_ratio,
    laplace_noise_scale,
)
from accounting.estimates.monte_carlo import MonteCarloProfile, geometric_ranks
from accounting.estimates.monte_carlo.confidence import kl_upper_bound
from accounting.estimates.monte_carlo.losses import log_order_statistics, sample_losses
from accounting.profiles.max_events import Epoch, max_event_lower_bound
from accounting.profiles.multistage import add_remove_profile
from accounting.profiles.truncation import Cap, log_overflow_probability, truncated_bins
from accounting.releases.contribution import (
    excess_bounds,
    num_heavy_users,
    privacy_excess,
    private_quantile,
    sum_sweet_spot,
)
from accounting.releases.exponential_mechanism import exponential_mechanism

GAUSSIAN, RNG = GaussianProfile(1.0), np.random.default_rng()
FINE = LikelihoodRatio.gaussian(1.0, 0.1, "upper")
COARSE = LikelihoodRatio.gaussian(1.0, 0.2, "upper")
LOWER = LikelihoodRatio.gaussian(1.0, 0.1, "lower")
NO_NOISE = r"no noise multiplier up to 1e\+09"


def cut(sigma):
    return truncated_bins(BallsAndBinsProfile(sigma, 10), Cap(100, 0.1, 10))


def losses(**settings):
    return sample_losses(RNG, 1, Epoch(1.0, 2), **{"direction": "add"} | settings)


NAN, INF = math.nan, math.inf
BY_NAME = [  # a call, sound arguments of it, and values that it refuses by the name of one
    (BallsAndBinsProfile, {"noise_multiplier": 1.0, "bins": 2},
     {"bins": [0, True], "epochs": [0], "assignment": ["kept"]}),
    (PoissonProfile, {"noise_multiplier": 1.0, "sampling_prob": 0.1, "steps": 1},
     {"sampling_prob": [0.0, 1.5, NAN], "steps": [0], "release": [0.0, NAN]}),
    (ShuffleProfile, {"noise_multiplier": 1.0, "steps_per_epoch": 2},
     {"steps_per_epoch": [0], "epochs": [0], "order": ["kept"]}),
    (UserPoissonProfile,
     {"noise_multiplier": 1.0, "steps": 1, "sampling_prob": 0.5, "max_contributions": 2},
     {"sampling_prob": [0.0], "max_contributions": [0]}),
    (MultistageProfile, {"noise_multiplier": 1.0, "steps": 1, "draws": (1,), "sizes": (2,)},
     {"steps": [0], "clipped_level": [2]}),
    (log_overflow_probability, {"num_examples": 5, "sampling_prob": 0.5, "max_batch_size": 1},
     {"sampling_prob": [1.5, NAN]}),
    (Bound, {"lower": 0.0, "upper": 1.0}, {"confidence": [0.0, 1.5, NAN]}),
    (max_event_lower_bound, {"epsilon": 1.0, "epoch": Epoch(1.0, 2)}, {"epsilon": [-1.0]}),
    (Epoch, {"noise_multiplier": 1.0, "bins": 2}, {"noise_multiplier": [0.0], "bins": [0]}),
    (TrialCount, {"mean": 10.0}, {"mean": [1.0, NAN], "shape": [-1.0]}),
    (private_quantile, {"contributions": [1], "quantile": 0.5, "epsilon": 1.0, "candidates": [1]},
     {"quantile": [1.2], "epsilon": [0.0]}),
    (exponential_mechanism, {"costs": [1], "epsilon": 1.0, "sensitivity": 1},
     {"epsilon": [0.0], "sensitivity": [0]}),
    (calibrate, {"privacy": GaussianProfile, "epsilon": 1.0, "delta": 1e-6},
     {"epsilon": [0.0, INF], "delta": [0.0, 0.1, NAN]}),
    (calibrate_advantage, {"privacy": GaussianProfile}, {"advantage": [0.0, 1.0, -0.1, NAN]}),
    (PrivacyCurve.of, {"profile": GAUSSIAN}, {"interval": [0.0], "tail": [1.0]}),
    (ratio_to_privacy_loss_distribution, {"ratio": FINE}, {"interval": [2.0]}),
    (amplify, {"epsilon": 1.0, "delta": 0.0, "sampling_prob": 0.5},
     {"epsilon": [-1.0], "delta": [1.5], "sampling_prob": [0.0]}),
    (deamplify, {"epsilon": 1.0, "delta": 0.0, "sampling_prob": 0.5},
     {"delta": [0.6], "sampling_prob": [1.5]}),
    (laplace_noise_scale, {"epsilon": 1.0, "num_examples": 10},
     {"epsilon": [0.0], "num_examples": [0]}),
    (laplace_noise_ratio, {"epsilon": 1.0, "sampling_prob": 0.5}, {"epsilon": [INF]}),
    (laplace_noise_penalty, {}, {"epsilon_over_prob": [-1.0]}),
    (gaussian_noise_penalty_many_steps, {}, {"epsilon_over_prob": [NAN]}),
    (gaussian_noise_penalty, {"steps": 1, "epsilon": 1.0, "delta": 0.1}, {"sampling_prob": [0.0]}),
    (full_batch_noise, {"epsilon": 1.0, "delta": 0.1}, {"steps": [0]}),
    (advise_batch_size, {"num_examples": 100, "steps": 10, "rho": 1.0},
     {"rho": [0.0], "penalty": [1.0]}),
    (kl_upper_bound, {"mean": 0.5, "num_samples": 10, "beta": 0.1},
     {"mean": [1.5], "num_samples": [0], "beta": [0.0]}),
    (geometric_ranks, {"num_draws": 10}, {"growth": [1.0]}),
    (log_order_statistics, {"rng": RNG, "size": 1, "num_draws": 3},
     {"ranks": [[1, 4], [2, 2]]}),
    (losses, {}, {"direction": ["both"], "ranks": [[2]]}),
    (MonteCarloProfile, {"noise_multiplier": 1.0, "bins": 2},
     {"bins": [0], "epochs": [0], "assignment": ["shuffled"], "beta": [1.0, 1e-17],
      "num_samples": [0]}),
]  # fmt: skip
REFUSED = [
    *(
        (partial(call, **sound | {name: bad}), name)
        for call, sound, wrong in BY_NAME
        for name, values in wrong.items()
        for bad in values
    ),
    (lambda: format(Bound(0.0, 1.0), "d"), "formatted by"),
    (lambda: FINE.product(COARSE), "one side and one step"),
    (lambda: FINE.product(LOWER), "one side and one step"),
    (lambda: MultistageProfile(1.0, 1, (), ()), "one entry per level"),
    (lambda: MultistageProfile(1.0, 1, (1, 2), (2,)), "one entry per level"),
    (lambda: MultistageProfile(1.0, 1, (1, 3), (2, 2)), "level 2 draws 3 of only 2"),
    (lambda: MultistageProfile(1.0, 1, (0,), (2,)), "draws of level 1 must be at least 1"),
    (lambda: add_remove_profile(1.0, 10, (1, 1), (5, 5)), "several stages have no guarantee"),
    (lambda: log_overflow_probability(-1, 0.5, 1), "sizes must be"),
    (lambda: log_overflow_probability(5, 0.5, -1), "sizes must be"),
    (lambda: TrialCount(10_000.0, -0.99), "no law of shape"),
    (lambda: TrialCount(1 + 1e-13, 1.0), "no law of shape"),
    (lambda: private_quantile([1], 0.5, epsilon=1.0, candidates=[]), "at least one cap"),
    (lambda: exponential_mechanism([], epsilon=1.0, sensitivity=1), "at least one candidate"),
    (lambda: excess_bounds([1, 2], 1, 1.0, 0), "class_size must be at least 1"),
    (lambda: excess_bounds([1, 2], 1, 1.0, 2, user_losses=[[1.0]]), "need a loss of each of 2"),
    (lambda: privacy_excess(-1.0, 1.0, 2.0, failure=0.1), "users and log_size must be >= 0"),
    (lambda: privacy_excess(1.0, 0.0, 1.0, failure=0.1), "epsilon must be > 0"),
    (lambda: num_heavy_users([0.5, 0.6], 0.1, 10, failure=0.1), "shares must add up to 1"),
    (lambda: num_heavy_users([1.0], 0.0, 10, failure=0.1), "gamma must be in"),
    *(
        (partial(sum_sweet_spot, bad, 1.0), "contributions must be a list of finite")
        for bad in ([], [-1.0], [math.inf], [[1.0]])
    ),
    (lambda: calibrate(cut, epsilon=1.0, delta=1e-6), NO_NOISE),
    (lambda: calibrate_advantage(cut, advantage=0.1), NO_NOISE + " .* larger maximum batch"),
    (lambda: PrivacyCurve.of(GaussianProfile(0.01), interval=1.0), "larger tail"),
    (lambda: PrivacyCurve.of(MonteCarloProfile(1.0, 3, num_samples=10)), "confidence"),
    (lambda: PrivacyCurve.of(GAUSSIAN, tail=1e-3).gaussian_mu(1e-6), "slack"),
    (lambda: PrivacyCurve.of(GAUSSIAN, tail=1e-3).type_two_error(1.5), "type_one_error"),
    (lambda: ratio_to_privacy_loss_distribution(LOWER), "lower"),
    *(
        (partial(advise_batch_size, 100, 10, **given), "budget")
        for given in ({}, {"rho": 1.0, "epsilon": 1.0, "delta": 0.1}, {"epsilon": 1.0})
    ),
    (lambda: losses(epochs=2, event_epsilon=1.0), "one epoch"),
    (lambda: MonteCarloProfile(1.0, 2).epsilon(0.0), "delta"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_a_setting_out_of_range_is_refused_in_one_line_that_names_it(call, message):
    # Annotations are checked under the tests: a Literal's violation is a TypeError there.
    with pytest.raises((ValueError, TypeError), match=message) as refusal:
        call()
    assert isinstance(refusal.value, TypeError) or "\n" not in str(refusal.value)
