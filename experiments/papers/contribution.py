"""Choice of the cap tau on each user's contribution: bias against noise, and exact private draws.

A low cap costs bias, a high cap costs noise. The exponential mechanism is drawn exactly: no
floating point, no logarithm. See docs/explanation/units-and-users.md and
docs/explanation/learning-from-a-finite-class.md, and Amin, Kulesza, Munoz Medina, Vassilvitskii,
"Bounding User Contributions", ICML 2019.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from accounting.algebra.cells import Array
from accounting.checks import check_epsilon
from accounting.profile import Bound, PrivacyProfile, Profile, Question


def exponential_mechanism(
    costs: Sequence[int | Fraction],
    *,
    epsilon: float | Fraction,
    sensitivity: int,
    one_sided: bool = False,
    randbelow: Callable[[int], int] = secrets.randbelow,
) -> int:
    r"""Draws the index i of a candidate with pure epsilon-DP.

    .. math:: P(i) \propto e^{-\lambda c_i}, \quad \lambda = \epsilon / (2 \Delta),
        \text{ or } \epsilon / \Delta \text{ if the costs are one-sided}

    with c = `costs` and Delta = `sensitivity`. Each cost differs by at most Delta between
    neighbouring data sets. Costs are one-sided if one of the two data sets has all costs at least
    as large as the other: each unit adds a cost in [0, Delta], and its neighbour adds 0. The
    distribution is exact: a uniform candidate is accepted by a Bernoulli of rational exponent.

    Source: McSherry, Talwar, "Mechanism Design via Differential Privacy", FOCS 2007; Canonne,
    Kamath, Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020, Algorithm 1
    (the exact Bernoulli).

    Args:
      costs: Cost c_i of each candidate; the candidates are public.
      epsilon: Privacy cost of this release, > 0.
      sensitivity: Largest difference Delta >= 1 of a cost between neighbours.
      one_sided: Whether costs are one-sided.
      randbelow: Uniform integers below its argument, from a secret source.

    Raises:
      ValueError: If there are no candidates, or `epsilon` or `sensitivity` is out of range.
    """
    if not costs:
        raise ValueError("the exponential mechanism needs at least one candidate")
    if not 0.0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be > 0 and finite, got {epsilon}")
    if sensitivity < 1:
        raise ValueError(f"sensitivity must be at least 1, got {sensitivity}")
    rate, least = Fraction(epsilon) / (sensitivity * (1 if one_sided else 2)), min(costs)
    while True:
        candidate = randbelow(len(costs))
        if _bernoulli_exp(rate * (costs[candidate] - least), randbelow):
            return candidate


def _bernoulli_exp(exponent: Fraction, randbelow: Callable[[int], int]) -> bool:
    """Returns True with probability exp(-`exponent`), exactly; `exponent` >= 0."""
    while exponent > 1:
        if not _bernoulli_exp(Fraction(1), randbelow):
            return False
        exponent -= 1
    # P(stop at the k-th) makes an alternating series: odd stops have probability e^-x in all.
    k = 1
    while randbelow(exponent.denominator * k) < exponent.numerator:
        k += 1
    return k % 2 == 1


def _check_contributions(contributions: ArrayLike) -> Array:
    values = np.asarray(contributions, float)
    if values.ndim != 1 or values.size == 0 or not np.all((values >= 0) & np.isfinite(values)):
        raise ValueError("contributions must be a list of finite numbers >= 0, one for each user")
    return values


def sum_error_bound(contributions: ArrayLike, cap: float, epsilon: float) -> float:
    r"""Bounds the expected error of an epsilon-DP capped sum.

    .. math:: \tau/\epsilon + \sum_i \max(0, x_i - \tau)

    is equation (2): the mean absolute value of Laplace noise of scale tau/epsilon, plus the bias of
    the cap. Not private: it reads the data.

    >>> sum_error_bound([1.0, 2.0, 3.0, 10.0], cap=3.0, epsilon=0.5)
    13.0

    Args:
      contributions: Contribution x_i >= 0 of each user, [users].
      cap: tau >= 0.
      epsilon: Privacy cost of the sum, > 0.

    Raises:
      ValueError: If a contribution is negative or not finite, `cap` < 0 or `epsilon` <= 0.
    """
    values = _check_contributions(contributions)
    _check_sum(cap, epsilon)
    return cap / epsilon + float(np.maximum(0.0, values - cap).sum())


def sum_error(contributions: ArrayLike, cap: float, epsilon: float) -> float:
    r"""Returns the expected error of an epsilon-DP capped sum.

    With bias b = sum_i max(0, x_i - tau) and Laplace noise of scale s = tau/epsilon,

    .. math:: E|b + \mathrm{Lap}(s)| = b + s\, e^{-b/s}.

    Not private: it reads the data.

    Raises:
      ValueError: If a contribution is negative or not finite, `cap` < 0 or `epsilon` <= 0.
    """
    values = _check_contributions(contributions)
    _check_sum(cap, epsilon)
    bias, scale = float(np.maximum(0.0, values - cap).sum()), cap / epsilon
    return bias + (scale * math.exp(-bias / scale) if scale > 0.0 else 0.0)


def sum_sweet_spot(contributions: ArrayLike, epsilon: float) -> float:
    """Returns the cap of the least `sum_error_bound`.

    It is the ceil(1/epsilon)-th largest contribution, or 0. Not private: it reads the data.

    >>> sum_sweet_spot([1.0, 2.0, 3.0, 10.0], epsilon=0.5)
    3.0

    Args:
      contributions: Contribution x_i >= 0 of each user, [users].
      epsilon: Privacy cost of the sum, > 0.

    Raises:
      ValueError: If a contribution is negative or not finite, or `epsilon` <= 0.
    """
    values = np.sort(_check_contributions(contributions))[::-1]
    _check_sum(0.0, epsilon)
    rank = 1.0 / epsilon  # infinite if epsilon is tiny
    return float(values[math.ceil(rank) - 1]) if rank <= values.size else 0.0


def _check_sum(cap: float, epsilon: float) -> None:
    if not 0.0 <= cap < math.inf:
        raise ValueError(f"cap must be >= 0 and finite, got {cap}")
    if not 0.0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be > 0 and finite, got {epsilon}")


class BiasBounds(NamedTuple):
    """Bounds on the change of the mean loss by a cap. Not private: diagnostics of your own data.

    The largest is 1, the range of the loss; the smallest one holds.
    """

    by_heaviest: float
    """Proposition 1: sqrt(log(1/gamma) / 2), for losses in [0, 1]."""
    by_variance: float
    """Proposition 2: sqrt(2 Var / gamma), or nan where losses were not given."""
    by_entropy: float
    """sqrt(log(1/Z) / 2), with the share Z that the cap keeps, for losses in [0, 1]."""
    by_distance: float
    """sum_j |q_j - p_j| / 2, the total variation between weights, for losses in [0, 1]."""


def bias_bounds(
    contributions: ArrayLike, cap: float, user_losses: ArrayLike | None = None
) -> BiasBounds:
    """Bounds the bias |L_tau(h) - L(h)| of a cap.

    User j has a share p_j of the n examples, and mean loss L_j(h); L(h) = sum_j p_j L_j(h). A cap
    at tau = gamma n gives it the share min(p_j, gamma) / Z, Z = sum_j min(p_j, gamma). If the cap
    cuts nothing, all bounds are 0. Not private: it reads the data. Proof:
    docs/explanation/units-and-users.md.

    Source: Amin et al., ICML 2019, Propositions 1 and 2.

    Args:
      contributions: Number of examples x_j of each user, [users]; n is their sum.
      cap: tau > 0.
      user_losses: L_j(h), [users].

    Raises:
      ValueError: If sizes differ, a number is out of range, or no user contributes.
    """
    values = _check_contributions(contributions)
    if not (cap > 0.0 and values.sum() > 0.0):
        raise ValueError(f"cap and the sum of contributions must be > 0, got cap {cap}")
    p = values / values.sum()
    gamma = cap / float(values.sum())
    variance = math.nan
    if user_losses is not None:
        losses = np.asarray(user_losses, float)
        if losses.shape != p.shape:
            raise ValueError(f"need one loss per user, got {losses.shape} for {p.shape}")
        variance = float(np.dot(p, (losses - np.dot(p, losses)) ** 2))
    if cap >= values.max():
        return BiasBounds(0.0, 0.0 if user_losses is not None else math.nan, 0.0, 0.0)
    capped_share = float(np.minimum(p, gamma).sum())
    return BiasBounds(
        by_heaviest=math.sqrt(0.5 * math.log(1.0 / gamma)),
        by_variance=math.sqrt(2.0 * variance / gamma),
        by_entropy=math.sqrt(0.5 * math.log(1.0 / capped_share)),
        by_distance=0.5 * float(np.abs(np.minimum(p, gamma) / capped_share - p).sum()),
    )


class ExcessBounds(NamedTuple):
    """Bounds on a model's loss above the least of its class. Not private.

    The sum of all but the last bounds the mean loss on all examples of the users, counted or not;
    the sum of all bounds its expectation, if the n examples are independent draws of one law.
    """

    bias: float
    """A cap moves users' weights from p to q: sum_j |q_j - p_j|; or, where losses were given, the
    range over the class of sum_j (q_j - p_j) L_j(h)."""
    choice: float
    """Error of choosing the m counted examples of capped users at random: 2 sqrt(m log(6 |H| / f) /
    2) / n_tau."""
    privacy: float
    """The model is drawn: `privacy_excess` of n_tau / tau users."""
    sample: float
    """The data are a sample: 2 sqrt(log(6 |H| / f) / (2 n))."""

    @property
    def on_data(self) -> float:
        """Bound on the mean loss over all examples of users."""
        return self.bias + self.choice + self.privacy


def excess_bounds(
    contributions: ArrayLike,
    cap: float,
    epsilon: float,
    class_size: int,
    *,
    user_losses: ArrayLike | None = None,
    failure: float = 0.05,
) -> ExcessBounds:
    """Bounds a private model's excess loss under a cap.

    A higher cap has less bias and a higher cost of privacy. A model is drawn from a class H with
    probability proportional to exp(-epsilon S(h) / tau), S the sum of losses in [0, 1] on at most
    tau examples of each user: random ones, or the first ones if their order is independent of their
    contents. Proof, and a comparison with Theorem 1 of Amin et al.:
    docs/explanation/learning-from-a-finite-class.md.

    Args:
      contributions: Number of examples of each user, [users].
      cap: tau > 0.
      epsilon: Privacy cost of the draw, for a user who is removed or zeroed out.
      class_size: Number |H| >= 1 of models.
      user_losses: L_j(h), each user's mean loss by each model of the class, [class, users].
      failure: f, the probability that the bounds fail, in (0, 1).

    Raises:
      ValueError: If sizes differ, a number is out of range, or no user contributes.
    """
    values, third = _check_contributions(contributions), failure / 3.0
    bias = 2.0 * bias_bounds(values, cap).by_distance
    if class_size < 1:
        raise ValueError(f"class_size must be at least 1, got {class_size}")
    if user_losses is not None:
        losses = np.asarray(user_losses, float)
        if losses.shape != (class_size, values.size):
            raise ValueError(
                f"need a loss of each of {class_size} models for each of {values.size} users, got "
                f"{losses.shape}"
            )
        counted = np.minimum(values, cap)
        bias = float(np.ptp(losses @ (counted / counted.sum() - values / values.sum())))
    num_counted, num_chosen = float(np.minimum(values, cap).sum()), cap * int((values > cap).sum())
    privacy = privacy_excess(num_counted / cap, epsilon, math.log(class_size), failure=third)
    spread = 0.5 * math.log(2.0 * class_size / third)
    choice = math.sqrt(num_chosen * spread) / num_counted
    sample = math.sqrt(spread / float(values.sum()))
    return ExcessBounds(bias, 2.0 * choice, privacy, 2.0 * sample)


def privacy_excess(users: float, epsilon: float, log_size: float, *, failure: float) -> float:
    r"""Bounds the excess mean loss of a privately drawn model.

    .. math:: \frac{1}{m \epsilon} \left(\log |H| + \log \frac{1}{f}\right)

    or infinity for m = 0. For the draw see `excess_bounds`. Amin et al., ICML 2019, have 8 times
    this bound with (d + 1) log 3 in place of log |H|, for d parameters: Lemma 1 with m = n_tau /
    tau, Corollary 1 with the number of users who are sure to reach the cap.

    Args:
      users: Number m >= 0 of users.
      epsilon: Privacy cost of the draw, > 0.
      log_size: log |H| >= 0, for |H| models.
      failure: Probability f in (0, 1) that the bound fails.

    Raises:
      ValueError: If an argument is out of range.
    """
    _check_sum(0.0, epsilon)
    if not (users >= 0.0 and log_size >= 0.0 and 0.0 < failure < 1.0):
        raise ValueError(
            "users and log_size must be >= 0 and failure in (0, 1), got "
            f"{users}, {log_size} and {failure}"
        )
    return (log_size - math.log(failure)) / (users * epsilon) if users else math.inf


def private_quantile(
    contributions: ArrayLike,
    quantile: float,
    *,
    epsilon: float,
    candidates: Sequence[int],
    randbelow: Callable[[int], int] = secrets.randbelow,
) -> int:
    """Chooses a cap near a quantile, with pure epsilon-DP.

    It protects users. The exponential mechanism with utility u(tau) = -|#{j : x_j <= tau} -
    quantile n|: tau comes out with probability proportional to exp(epsilon u(tau) / 2), exactly (no
    floating point). n is public under zero-out; if a user is removed, u moves by at most
    max(quantile, 1 - quantile). Compose it into the guarantee by `WithPureReleaseProfile`.

    Source: Smith, "Privacy-preserving Statistical Estimation with Optimal Convergence Rates", STOC
    2011, Algorithm 2.

    Args:
      contributions: Number of examples of each user, [users].
      quantile: Quantile in [0, 1] that the cap should be near.
      epsilon: Privacy cost of this release, > 0.
      candidates: Public list of caps, chosen without the data.
      randbelow: Uniform integers below its argument, from a secret source.

    Raises:
      ValueError: If a number is out of range or there are no candidates.
    """
    values = np.sort(_check_contributions(contributions))
    if not 0.0 <= quantile <= 1.0:
        raise ValueError(f"quantile must be in [0, 1], got {quantile}")
    if len(candidates) == 0:
        raise ValueError("candidates must name at least one cap")
    target = Fraction(quantile) * values.size
    ranks = np.searchsorted(values, np.asarray(candidates, float), side="right")
    distances = [abs(rank - target) for rank in ranks.tolist()]
    index = exponential_mechanism(distances, epsilon=epsilon, sensitivity=1, randbelow=randbelow)
    return int(candidates[index])


@dataclass(frozen=True)
class WithPureReleaseProfile(Profile):
    r"""Profile of a mechanism beside a release with pure epsilon_0, in either order.

    .. math:: \delta(\epsilon) \le p\, \delta'(\epsilon - \epsilon_0)
        + (1 - p)\, \delta'(\epsilon + \epsilon_0), \quad p = 1/(1 + e^{-\epsilon_0})

    with delta' of `profile`, which must hold for every released value. At a given delta, epsilon' +
    epsilon_0 is sufficient. Proof:
    docs/explanation/composition-with-further-releases.md.

    Source: Kairouz, Oh, Viswanath, "The Composition Theorem for Differential Privacy", ICML 2015.

    Args:
      profile: Profile of the mechanism alone.
      pure_epsilon: Epsilon_0 >= 0 of the pure release.

    Raises:
      ValueError: If `pure_epsilon` is negative or not finite.
    """

    profile: PrivacyProfile
    pure_epsilon: float

    def __post_init__(self) -> None:
        check_epsilon(self.pure_epsilon)

    def answer(self, question: Question) -> Bound:
        """Answers by the mechanism's profile at shifted epsilons."""
        inner = question.ask(self.profile)
        note = inner.note or "the lower end is that of the mechanism alone" * (
            self.pure_epsilon > 0
        )
        if question.wanted == "epsilon":
            return Bound.resting_on(inner, inner.lower, inner.upper + self.pure_epsilon, note)
        low, high = question.at - self.pure_epsilon, question.at + self.pure_epsilon
        deltas = [self.profile.delta(abs(e), question.tolerance).upper for e in (low, high)]
        if low < 0.0:
            deltas[0] = 1.0 - math.exp(low) * (1.0 - deltas[0])
        weight = 1.0 / (1.0 + math.exp(-self.pure_epsilon))
        upper = weight * deltas[0] + (1.0 - weight) * deltas[1]
        return Bound.resting_on(inner, inner.lower, min(1.0, upper * (1.0 + 1e-12)), note)
