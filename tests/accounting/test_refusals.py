"""A setting out of range is refused in one line that names it, by whatever takes it.

Noise multipliers, epsilons and deltas of profiles: `profiles/test_every_profile.py`.
"""

import math

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
    TruncatedProfile,
    UserPoissonProfile,
    calibrate,
    calibrate_advantage,
    log_overflow_probability,
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
SURELY_CUT = {"epsilon": 1.0, "delta": 1e-6}


def cut(sigma):
    return TruncatedProfile(GaussianProfile(sigma), 10, -5.0)


def losses(**settings):
    return sample_losses(RNG, 1, Epoch(1.0, 2), **{"direction": "add"} | settings)


REFUSED = [
    (lambda: Bound(0.0, 1.0, 0.0), "confidence"),
    (lambda: Bound(0.0, 1.0, 1.5), "confidence"),
    (lambda: Bound(0.0, 1.0, math.nan), "confidence"),
    (lambda: format(Bound(0.0, 1.0), "d"), "formatted by"),
    (lambda: FINE.product(COARSE), "one side and one step"),
    (lambda: FINE.product(LOWER), "one side and one step"),
    (lambda: BallsAndBinsProfile(1.0, 0), "bins must be"),
    (lambda: BallsAndBinsProfile(1.0, 2, 0), "epochs must be"),
    (lambda: BallsAndBinsProfile(1.0, 2, 1, "kept"), "assignment"),
    (lambda: BallsAndBinsProfile(1.0, True), "bins"),
    (lambda: PoissonProfile(1.0, 0.0, 1), "sampling_prob must be"),
    (lambda: PoissonProfile(1.0, 1.5, 1), "sampling_prob must be"),
    (lambda: PoissonProfile(1.0, math.nan, 1), "sampling_prob must be"),
    (lambda: PoissonProfile(1.0, 0.1, 0), "steps must be"),
    (lambda: ShuffleProfile(1.0, 0, 1), "steps_per_epoch must be"),
    (lambda: ShuffleProfile(1.0, 2, 0), "epochs must be"),
    (lambda: UserPoissonProfile(1.0, 1, 0.0, 2), "sampling_prob must be in"),
    (lambda: UserPoissonProfile(1.0, 1, 0.5, 0), "max_contributions must be an integer >= 1"),
    (lambda: MultistageProfile(1.0, 0, (1,), (2,)), "steps must be an integer >= 1"),
    (lambda: MultistageProfile(1.0, 1, (), ()), "one entry per level"),
    (lambda: MultistageProfile(1.0, 1, (1, 2), (2,)), "one entry per level"),
    (lambda: MultistageProfile(1.0, 1, (1, 3), (2, 2)), "level 2 draws 3 of only 2"),
    (lambda: MultistageProfile(1.0, 1, (0,), (2,)), "draws of level 1 must be an integer >= 1"),
    (lambda: MultistageProfile(1.0, 1, (1,), (2,), 2), "clipped_level must be in"),
    (lambda: add_remove_profile(1.0, 10, (1, 1), (5, 5)), "several stages have no guarantee"),
    (lambda: TruncatedProfile(GAUSSIAN, 0, -1.0), "steps must be"),
    (lambda: TruncatedProfile(GAUSSIAN, 10, 0.5), "log_overflow_probability must be"),
    (lambda: TruncatedProfile(GAUSSIAN, 10, math.nan), "log_overflow_probability must be"),
    (lambda: log_overflow_probability(-1, 0.5, 1), "sizes must be"),
    (lambda: log_overflow_probability(5, 0.5, -1), "sizes must be"),
    (lambda: log_overflow_probability(5, 1.5, 1), "sampling_prob must be"),
    (lambda: log_overflow_probability(5, math.nan, 1), "sampling_prob must be"),
    (lambda: max_event_lower_bound(-1.0, Epoch(1.0, 2)), "epsilon"),
    (lambda: Epoch(0.0, 2), "noise_multiplier"),
    (lambda: TrialCount(1.0, 1.0), "mean"),
    (lambda: TrialCount(math.nan, 1.0), "mean"),
    (lambda: TrialCount(10.0, -1.0), "shape"),
    (lambda: TrialCount(10_000.0, -0.99), "no law of shape"),
    (lambda: TrialCount(1 + 1e-13, 1.0), "no law of shape"),
    (lambda: private_quantile([1], 1.2, epsilon=1.0, candidates=[1]), "quantile must be in"),
    (lambda: private_quantile([1], 0.5, epsilon=0.0, candidates=[1]), "epsilon must be > 0"),
    (lambda: private_quantile([1], 0.5, epsilon=1.0, candidates=[]), "at least one cap"),
    (lambda: exponential_mechanism([], epsilon=1.0, sensitivity=1), "at least one candidate"),
    (lambda: exponential_mechanism([1], epsilon=0.0, sensitivity=1), "epsilon must be > 0"),
    (lambda: exponential_mechanism([1], epsilon=1.0, sensitivity=0), "sensitivity must be"),
    (lambda: excess_bounds([1, 2], 1, 1.0, 0), "class_size must be at least 1"),
    (lambda: privacy_excess(-1.0, 1.0, 2.0, failure=0.1), "users and log_size must be >= 0"),
    (lambda: privacy_excess(1.0, 0.0, 1.0, failure=0.1), "epsilon must be > 0"),
    (lambda: num_heavy_users([0.5, 0.6], 0.1, 10, failure=0.1), "shares must add up to 1"),
    (lambda: num_heavy_users([1.0], 0.0, 10, failure=0.1), "gamma must be in"),
    (lambda: excess_bounds([1, 2], 1, 1.0, 2, user_losses=[[1.0]]), "need a loss of each of 2"),
    *(
        (lambda bad=bad: sum_sweet_spot(bad, 1.0), "contributions must be a list of finite")
        for bad in ([], [-1.0], [math.inf], [[1.0]])
    ),
    (lambda: calibrate(cut, **SURELY_CUT), NO_NOISE),
    (lambda: calibrate_advantage(cut, advantage=0.1), NO_NOISE + " .* larger maximum batch"),
    *(
        (lambda e=e, d=d: calibrate(GaussianProfile, epsilon=e, delta=d), "must (be|lie)")
        for e, d in ((0.0, 1e-6), (math.inf, 1e-6), (1.0, 0.0), (1.0, 0.1), (1.0, math.nan))
    ),
    *(
        (lambda a=a: calibrate_advantage(GaussianProfile, advantage=a), "advantage must be in")
        for a in (0.0, 1.0, -0.1, math.nan)
    ),
    (lambda: PrivacyCurve.of(GAUSSIAN, interval=0.0), "interval"),
    (lambda: PrivacyCurve.of(GAUSSIAN, tail=1.0), "tail"),
    (lambda: PrivacyCurve.of(GaussianProfile(0.01), interval=1.0), "larger tail"),
    (lambda: PrivacyCurve.of(MonteCarloProfile(1.0, 3, num_samples=10)), "confidence"),
    (lambda: PrivacyCurve.of(GAUSSIAN, tail=1e-3).gaussian_mu(1e-6), "slack"),
    (lambda: PrivacyCurve.of(GAUSSIAN, tail=1e-3).type_two_error(1.5), "type_one_error"),
    (lambda: ratio_to_privacy_loss_distribution(LOWER), "lower"),
    (lambda: ratio_to_privacy_loss_distribution(FINE, interval=2.0), "interval"),
    (lambda: amplify(-1.0, 0.0, 0.5), "epsilon"),
    (lambda: amplify(1.0, 1.5, 0.5), "delta"),
    (lambda: amplify(1.0, 0.0, 0.0), "sampling_prob"),
    (lambda: deamplify(1.0, 0.6, 0.5), "delta"),
    (lambda: deamplify(1.0, 0.0, 1.5), "sampling_prob"),
    (lambda: laplace_noise_scale(0.0, 10), "epsilon"),
    (lambda: laplace_noise_scale(1.0, 0), "num_examples"),
    (lambda: laplace_noise_ratio(math.inf, 0.5), "epsilon"),
    (lambda: laplace_noise_penalty(-1.0), "epsilon_over_prob"),
    (lambda: gaussian_noise_penalty_many_steps(math.nan), "epsilon_over_prob"),
    (lambda: gaussian_noise_penalty(0.0, 1, epsilon=1.0, delta=0.1), "sampling_prob"),
    (lambda: full_batch_noise(0, epsilon=1.0, delta=0.1), "steps"),
    (lambda: advise_batch_size(100, 10), "budget"),
    (lambda: advise_batch_size(100, 10, rho=1.0, epsilon=1.0, delta=0.1), "budget"),
    (lambda: advise_batch_size(100, 10, epsilon=1.0), "budget"),
    (lambda: advise_batch_size(100, 10, rho=0.0), "rho"),
    (lambda: advise_batch_size(100, 10, rho=1.0, penalty=1.0), "penalty"),
    (lambda: kl_upper_bound(1.5, 10, 0.1), "mean"),
    (lambda: kl_upper_bound(0.5, 0, 0.1), "num_samples"),
    (lambda: kl_upper_bound(0.5, 10, 0.0), "beta"),
    (lambda: geometric_ranks(10, 1.0), "growth"),
    (lambda: log_order_statistics(RNG, 1, 3, [1, 4]), "ranks"),
    (lambda: log_order_statistics(RNG, 1, 3, [2, 2]), "ranks"),
    (lambda: losses(direction="both"), "direction"),
    (lambda: losses(ranks=[2]), "ranks"),
    (lambda: losses(epochs=2, event_epsilon=1.0), "one epoch"),
    (lambda: MonteCarloProfile(1.0, 0), "bins"),
    (lambda: MonteCarloProfile(1.0, 2, epochs=0), "epochs"),
    (lambda: MonteCarloProfile(1.0, 2, assignment="shuffled"), "assignment"),
    (lambda: MonteCarloProfile(1.0, 2, beta=1.0), "beta"),
    (lambda: MonteCarloProfile(1.0, 2, beta=1e-17), "beta"),
    (lambda: MonteCarloProfile(1.0, 2, num_samples=0), "num_samples"),
    (lambda: MonteCarloProfile(1.0, 2).epsilon(0.0), "delta"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_a_setting_out_of_range_is_refused_in_one_line_that_names_it(call, message):
    # Annotations are checked under the tests: a Literal's violation is a TypeError there.
    with pytest.raises((ValueError, TypeError), match=message) as refusal:
        call()
    assert isinstance(refusal.value, TypeError) or "\n" not in str(refusal.value)
