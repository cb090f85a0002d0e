"""Refusals of settings of the papers' theory, each in one line that names the setting."""

import math
from functools import partial

import pytest

from accounting.conversions import to_privacy_loss_distribution
from experiments.papers.amplification import (
    amplify,
    deamplify,
    full_batch_noise,
    gaussian_noise_penalty,
    gaussian_noise_penalty_many_steps,
    laplace_noise_penalty,
    laplace_noise_ratio,
    laplace_noise_scale,
    mean_squared_error,
)
from experiments.papers.contribution import (
    excess_bounds,
    exponential_mechanism,
    privacy_excess,
    private_quantile,
    sum_sweet_spot,
)
from experiments.papers.episodic import add_remove_profile
from experiments.papers.monte_carlo import MonteCarloProfile, geometric_ranks
from experiments.papers.monte_carlo.confidence import bennett_upper_bound, kl_upper_bound

NAN, INF = math.nan, math.inf


BY_NAME = [  # a call, sound arguments of it, and values that it refuses by the name of one
    (private_quantile, {"contributions": [1], "quantile": 0.5, "epsilon": 1.0, "candidates": [1]},
     {"quantile": [1.2], "epsilon": [0.0]}),
    (exponential_mechanism, {"costs": [1], "epsilon": 1.0, "sensitivity": 1},
     {"epsilon": [0.0], "sensitivity": [0]}),
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
    (kl_upper_bound, {"mean": 0.5, "num_samples": 10, "beta": 0.1},
     {"mean": [1.5], "num_samples": [0], "beta": [0.0]}),
    (geometric_ranks, {"num_draws": 10}, {"growth": [1.0]}),
    (MonteCarloProfile, {"noise_multiplier": 1.0, "bins": 2},
     {"bins": [0], "epochs": [0], "beta": [1.0, 1e-17],
      "num_samples": [0], "ranks": [(2,), (1, 1)]}),
]  # fmt: skip
REFUSED = [
    *(
        (partial(call, **sound | {name: bad}), name)
        for call, sound, wrong in BY_NAME
        for name, values in wrong.items()
        for bad in values
    ),
    (lambda: add_remove_profile(1.0, 10, (1, 1), (5, 5)), "several stages have no guarantee"),
    (lambda: private_quantile([1], 0.5, epsilon=1.0, candidates=[]), "at least one cap"),
    (lambda: exponential_mechanism([], epsilon=1.0, sensitivity=1), "at least one candidate"),
    (lambda: excess_bounds([1, 2], 1, 1.0, 0), "class_size must be at least 1"),
    (lambda: excess_bounds([1, 2], 1, 1.0, 2, user_losses=[[1.0]]), "need a loss of each of 2"),
    (lambda: privacy_excess(-1.0, 1.0, 2.0, failure=0.1), "users and log_size must be >= 0"),
    (lambda: privacy_excess(1.0, 0.0, 1.0, failure=0.1), "epsilon must be > 0"),
    *(
        (partial(sum_sweet_spot, bad, 1.0), "contributions must be a list of finite")
        for bad in ([], [-1.0], [math.inf], [[1.0]])
    ),
    (lambda: to_privacy_loss_distribution(MonteCarloProfile(1.0, 3, num_samples=10)), "proved"),
    (lambda: MonteCarloProfile(1.0, 2).epsilon(0.0), "delta"),
    (lambda: MonteCarloProfile(1.0, 10, epochs=2, sampled="other bins"), "for one epoch, got 2"),
    (lambda: mean_squared_error([0.5, 1.5], 1.0), "values must be a row of numbers in"),
    *(
        (partial(bennett_upper_bound, mean, moment, 10, 0.1), "must hold")
        for mean, moment in [(0.5, 0.2), (-0.1, 0.2), (0.5, 1.1)]
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_setting_out_of_range_is_refused_in_one_line_by_name(call, message):
    # Annotations are checked under the tests: a Literal's violation is a TypeError there.
    with pytest.raises((ValueError, TypeError), match=message) as refusal:
        call()
    assert isinstance(refusal.value, TypeError) or "\n" not in str(refusal.value)
