"""A setting out of range is refused in one line that names it, by whatever takes it.

Fields, epsilons and deltas of profiles: `profiles/test_every_profile.py`.
"""

import math
from functools import partial

import pytest

from accounting import (
    Bound,
    GaussianProfile,
    MultistageProfile,
    PoissonProfile,
    TrialCount,
    calibrate,
    calibrate_advantage,
)
from accounting.conversions import to_privacy_loss_distribution
from accounting.profiles.truncation import Cap, log_overflow_probability, truncated_profile

GAUSSIAN = GaussianProfile(1.0)
NO_NOISE = r"no noise multiplier up to 1e\+09"


def cut(sigma):
    return truncated_profile(PoissonProfile(sigma, 1.0, 1), Cap(100, 0.1, 10))


NAN, INF = math.nan, math.inf
BY_NAME = [  # a call, sound arguments of it, and values that it refuses by the name of one
    (MultistageProfile, {"noise_multiplier": 1.0, "steps": 1, "draws": (1,), "sizes": (2,)},
     {"clipped_level": [2]}),
    (log_overflow_probability, {"num_examples": 5, "sampling_prob": 0.5, "max_batch_size": 1},
     {"sampling_prob": [1.5, NAN]}),
    (Bound, {"lower": 0.0, "upper": 1.0}, {"confidence": [0.0, 1.5, NAN]}),
    (TrialCount, {"mean": 10.0}, {"mean": [1.0, NAN], "shape": [-1.0]}),
    (calibrate, {"privacy": GaussianProfile, "epsilon": 1.0, "delta": 1e-6},
     {"epsilon": [0.0, INF], "delta": [0.0, 0.1, NAN]}),
    (calibrate_advantage, {"privacy": GaussianProfile}, {"advantage": [0.0, 1.0, -0.1, NAN]}),
    (to_privacy_loss_distribution, {"profile": GAUSSIAN}, {"interval": [0.0], "tail": [1.0]}),
]  # fmt: skip
REFUSED = [
    *(
        (partial(call, **sound | {name: bad}), name)
        for call, sound, wrong in BY_NAME
        for name, values in wrong.items()
        for bad in values
    ),
    (lambda: format(Bound(0.0, 1.0), "d"), "formatted by"),
    (lambda: MultistageProfile(1.0, 1, (), ()), "one entry per level"),
    (lambda: MultistageProfile(1.0, 1, (1, 2), (2,)), "one entry per level"),
    (lambda: MultistageProfile(1.0, 1, (1, 3), (2, 2)), "level 2 draws 3 of only 2"),
    (lambda: MultistageProfile(1.0, 1, (0,), (2,)), r"draws\[0\] must be an integer >= 1"),
    (lambda: log_overflow_probability(-1, 0.5, 1), "sizes must be"),
    (lambda: log_overflow_probability(5, 0.5, -1), "sizes must be"),
    (lambda: TrialCount(10_000.0, -0.99), "no law of shape"),
    (lambda: TrialCount(1 + 1e-13, 1.0), "no law of shape"),
    (lambda: calibrate(cut, epsilon=1.0, delta=1e-6), NO_NOISE),
    (lambda: calibrate_advantage(cut, advantage=1e-4), NO_NOISE + " .* larger maximum batch"),
    (lambda: to_privacy_loss_distribution(GaussianProfile(0.01), interval=1.0), "larger tail"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_setting_out_of_range_is_refused_in_one_line_by_name(call, message):
    # Annotations are checked under the tests: a Literal's violation is a TypeError there.
    with pytest.raises((ValueError, TypeError), match=message) as refusal:
        call()
    assert isinstance(refusal.value, TypeError) or "\n" not in str(refusal.value)
