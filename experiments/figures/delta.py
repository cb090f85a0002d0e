"""Delta over epsilon of every sampler, one epoch, at pairs of noise multiplier and batch size.

Chua et al., "Balls-and-Bins Sampling for DP-SGD" (AISTATS 2025), figure 2, at sizes of Criteo
Display Ads and Criteo Sponsored Search. Balls-and-bins has the published bounds (equation 6 below,
above Monte Carlo by order statistics), ours that samples the other bins, and our certified curve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accounting import BallsAndBinsProfile, Bound, GaussianProfile, PoissonProfile
from accounting.estimates.episodic import Estimate
from accounting.estimates.monte_carlo import MonteCarloProfile, geometric_ranks
from accounting.profiles.max_events import max_event_lower_bound
from experiments.cli.console import Console
from experiments.figures.comparison import TERMS
from experiments.figures.drawing import COLORS, Picture, blank, legend, panels, save


class Setting(NamedTuple):
    """What a panel shows: one epoch of one run, over epsilons up to a last one."""

    name: str
    noise_multiplier: float
    bins: int
    last_epsilon: float

    @property
    def title(self) -> str:
        return f"{self.name}: σ = {self.noise_multiplier:g}, T = {self.bins:,}"


SETTINGS = (
    Setting("Display, batch 1,024", 0.4, 35_938, 6.0),
    Setting("Display, batch 8,192", 0.5, 4_492, 5.0),
    Setting("Display, batch 65,536", 0.8, 562, 1.5),
    Setting("Search, batch 1,024", 0.4, 12_500, 6.0),
    Setting("Search, batch 8,192", 0.5, 1_563, 5.0),
    Setting("Search, batch 65,536", 0.8, 196, 1.5),
)

BALLS = COLORS["balls-and-bins"]
DETERMINISTIC, CERTIFIED = "deterministic", "balls-and-bins, certified"


@dataclass(frozen=True)
class Config(Picture):
    """Delta over epsilon of every sampler (Balls-and-Bins paper, figure 2)."""

    num_samples: int = 20_000
    """Samples of each Monte Carlo bound; each holds with probability 0.999."""

    points: int = 10
    """Epsilons of each curve."""

    SMALL: ClassVar[Mapping[str, Any]] = {"num_samples": 5_000, "points": 6}


class Curve(NamedTuple):
    """Bounds on delta at each epsilon, and how they are drawn.

    Attributes:
      name: Of the curve.
      bounds: At each epsilon.
      look: Of the line of upper ends, and of that of lower ends; None where it is not drawn.
      means: Estimates without confidence, if there are any.
    """

    name: str
    bounds: list[Bound]
    look: tuple[dict[str, Any] | None, dict[str, Any] | None]
    means: list[Estimate] | None = None


Curves = Callable[[Setting, Sequence[float]], Iterator[Curve]]
"""Of a panel, at its epsilons."""


def certified(
    name: str, delta: Callable[[float], Bound], epsilons: Sequence[float], look: dict[str, Any]
) -> Curve:
    """Returns a curve of bounds from both sides: dashed below."""
    return Curve(name, [delta(e) for e in epsilons], (look, {**look, "ls": "--", "lw": 0.9}))


def sampled(
    name: str,
    profile: MonteCarloProfile,
    epsilons: Sequence[float],
    **look: Any,
) -> Curve:
    """Returns a curve of estimates by samples: their upper confidence bounds and their means."""
    means, bounds = zip(*profile.estimates(epsilons), strict=True)
    return Curve(name, list(bounds), ({"ls": ":", "lw": 1, "ms": 4, **look}, None), list(means))


def balls_and_bins(setting: Setting, epsilons: Sequence[float]) -> Curve:
    """Returns the certified curve."""
    profile = BallsAndBinsProfile(setting.noise_multiplier, setting.bins)
    return certified(CERTIFIED, profile.delta, epsilons, {"color": BALLS, "lw": 1.8})


def _lower(setting: Setting, shifts: tuple[float, float], epsilon: float) -> Bound:
    found = max_event_lower_bound(
        epsilon,
        noise_multiplier=setting.noise_multiplier,
        bins=setting.bins,
        shifts=shifts,
    )
    return Bound(found, 1.0)


def _dp_accounting(setting: Setting) -> Callable[[float], Bound]:
    from dp_accounting.pld import privacy_loss_distribution as pld

    upper, lower = (
        pld.from_gaussian_mechanism(
            setting.noise_multiplier,
            sampling_prob=1.0 / setting.bins,
            pessimistic_estimate=pessimistic,
            value_discretization_interval=1e-3,
            use_connect_dots=pessimistic,
        ).self_compose(setting.bins)
        for pessimistic in (True, False)
    )

    def delta(epsilon: float) -> Bound:
        low, high = sorted(float(s.get_delta_for_epsilon(epsilon)) for s in (lower, upper))
        return Bound(low, high)

    return delta


def samplers(num_samples: int, setting: Setting, epsilons: Sequence[float]) -> Iterator[Curve]:
    """Yields the curves of figure 2."""
    sigma, bins = setting.noise_multiplier, setting.bins
    gaussian = GaussianProfile(sigma)
    yield certified(
        DETERMINISTIC, gaussian.delta, epsilons, {"color": "#000000", "lw": 4, "alpha": 0.3}
    )
    below: dict[str, Any] = {"ls": "--", "lw": 1.2}
    shuffled = [_lower(setting, (2.0, 1.0), e) for e in epsilons]
    yield Curve("shuffle, lower bound", shuffled, (None, {**below, "color": COLORS["shuffle"]}))
    poisson: dict[str, Any] = {"color": COLORS["poisson"], "lw": 1.5}
    profile = PoissonProfile(sigma, 1.0 / bins, bins)
    yield certified("Poisson, certified", profile.delta, epsilons, poisson)
    if find_spec("dp_accounting"):
        marks = {"color": COLORS["poisson"], "ls": "", "ms": 6, "mfc": "none"}
        bounds = list(map(_dp_accounting(setting), epsilons))
        look = ({**marks, "marker": "^"}, {**marks, "marker": "v"})
        yield Curve("Poisson, dp_accounting", bounds, look)
    single = [_lower(setting, (1.0, 0.0), e) for e in epsilons]
    yield Curve("balls-and-bins, equation 6", single, (None, {**below, "color": "#56B4E9"}))
    yield balls_and_bins(setting, epsilons)
    estimator = MonteCarloProfile(sigma, bins, num_samples=num_samples, ranks=geometric_ranks(bins))
    yield sampled("balls-and-bins, Monte Carlo", estimator, epsilons, color=BALLS, marker="x")
    others = replace(estimator, sampled="other bins", inequality="bennett")
    yield sampled("balls-and-bins, other bins", others, epsilons, color="#CC79A7", marker="x")


def plot(axes: Axes, epsilons: Sequence[float], curves: Sequence[Curve], title: str) -> None:
    """Draws curves: solid upper ends, dashed lower ends, means as marks of their own."""
    for curve in curves:
        label: str | None = curve.name
        for look, ends in zip(curve.look, ("upper", "lower"), strict=True):
            if look is not None:
                values = [getattr(bound, ends) for bound in curve.bounds]
                axes.plot(epsilons, values, **look, label=label)
                label = None
        if curve.means is not None:
            means = [mean.value or np.nan for mean in curve.means]
            axes.plot(epsilons, means, "+", color=(curve.look[0] or {})["color"], ms=5)
    true = next(curve for curve in curves if curve.name == CERTIFIED)
    axes.set(yscale="log", xlabel="ε", ylabel="δ", ylim=(true.bounds[-1].lower / 30, 1.0))
    axes.set_title(title)
    legend(axes, fontsize="x-small")


def figure(
    shown: Sequence[tuple[str, Setting, Curves]], points: int, config: Picture, console: Console
) -> Figure:
    """Returns a panel for each title, setting and its curves; all is saved after each panel.

    Args:
      shown: Of the panels, three in a row.
      points: Epsilons of each curve.
      config: Names the picture.
      console: Gets a table for each panel.
    """
    rows, columns = -(-len(shown) // 3), min(3, len(shown))
    found = blank(13, 4.6 * rows, f"one epoch; {TERMS}; +: means of samples")
    for axes, (title, setting, curves) in zip(panels(found, rows, columns), shown, strict=True):
        epsilons = [setting.last_epsilon * (i + 1) / points for i in range(points)]
        drawn: list[Curve] = []
        for curve in curves(setting, epsilons):
            drawn.append(curve)
            console.progress(f"{title}: {curve.name}")
        plot(axes, epsilons, drawn, title)
        console.line(f"{title}, one epoch ({TERMS})")
        some = range(0, points, max(1, points // 4))
        console.table(
            ["delta at epsilon", *(f"{epsilons[i]:.3g}" for i in some)],
            [row for curve in drawn for row in _rows(curve, some)],
        )
        save(found, config.out)
    return found


def _rows(curve: Curve, shown: Sequence[int]) -> Iterator[list[str]]:
    above, below = curve.look
    if above is not None:
        yield [f"{curve.name} <=", *(curve.bounds[i].format_upper(".2e") for i in shown)]
    if below is not None and curve.name not in (CERTIFIED, DETERMINISTIC):
        yield [f"{curve.name} >=", *(curve.bounds[i].format_lower(".2e") for i in shown)]
    if curve.means is not None:
        yield [f"{curve.name}, mean", *(f"~{curve.means[i].value:.2e}" for i in shown)]


def draw(config: Config, console: Console) -> Figure:
    """Returns the figure; prints a table for each panel."""
    curves = partial(samplers, config.num_samples)
    shown = [(setting.title, setting, curves) for setting in SETTINGS]
    return figure(shown, config.points, config, console)
