"""Delta over epsilon of every sampler, one epoch, at pairs of noise multiplier and batch size.

Chua et al., "Balls-and-Bins Sampling for DP-SGD" (AISTATS 2025), figure 2, at sizes of Criteo
Display Ads and Criteo Sponsored Search. Dotted is equation 6, below Monte Carlo by order statistics
(x; means +); the other bins' samples are ours, as the certified curves are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

from matplotlib.figure import Figure

from accounting import Bound
from accounting.estimates.monte_carlo import MonteCarloProfile, geometric_ranks
from experiments.cli.console import Console
from experiments.figures import comparison
from experiments.figures.comparison import TERMS, Curve
from experiments.figures.drawing import Picture, blank, panels, save


class Setting(NamedTuple):
    """What a panel shows: one epoch of one run, over epsilons up to a last one."""

    name: str
    noise_multiplier: float
    bins: int
    last_epsilon: float


SETTINGS = (
    Setting("Display, batch 1,024", 0.4, 35_938, 6.0),
    Setting("Display, batch 8,192", 0.5, 4_492, 5.0),
    Setting("Display, batch 65,536", 0.8, 562, 1.5),
    Setting("Search, batch 1,024", 0.4, 12_500, 6.0),
    Setting("Search, batch 8,192", 0.5, 1_563, 5.0),
    Setting("Search, batch 65,536", 0.8, 196, 1.5),
)

Curves = Callable[[Setting, Sequence[float]], Iterator[Curve]]
"""Of a panel, at its epsilons."""


@dataclass(frozen=True)
class Config(Picture):
    """Delta over epsilon of every sampler (Balls-and-Bins paper, figure 2)."""

    num_samples: int = 20_000
    """Samples of each Monte Carlo bound; each holds with probability 0.999."""

    points: int = 10
    """Epsilons of each curve."""

    SMALL: ClassVar[Mapping[str, Any]] = {"num_samples": 5_000, "points": 6}


def certified(setting: Setting, epsilons: Sequence[float], *names: str) -> Iterator[Curve]:
    """Yields the certified curves of the samplers that are named, by default of all."""
    found = comparison.all_samplers(setting.bins, 1, epochs=1)
    for name in names or found:
        profile = found[name].privacy(setting.noise_multiplier)
        yield Curve(name, tuple(epsilons), tuple(profile.delta(e) for e in epsilons))


def sampled(name: str, profile: MonteCarloProfile, epsilons: Sequence[float]) -> Curve:
    """Returns a curve of estimates by samples: their upper confidence bounds and their means."""
    means, bounds = zip(*profile.estimates(epsilons), strict=True)
    return Curve(name, tuple(epsilons), bounds, tuple(mean.value for mean in means))


def _dp_accounting(setting: Setting, epsilons: Sequence[float]) -> Curve:
    from dp_accounting.pld import privacy_loss_distribution as pld

    ends = []
    for pessimistic in (True, False):
        one = pld.from_gaussian_mechanism(
            setting.noise_multiplier,
            sampling_prob=1.0 / setting.bins,
            pessimistic_estimate=pessimistic,
            value_discretization_interval=1e-3,
            use_connect_dots=pessimistic,
        )
        ends.append(one.self_compose(setting.bins).get_delta_for_epsilon(list(epsilons)))
    bounds = [Bound(float(min(e)), float(max(e))) for e in zip(*ends, strict=True)]
    return Curve("poisson, dp_accounting", tuple(epsilons), tuple(bounds))


def samplers(num_samples: int, setting: Setting, epsilons: Sequence[float]) -> Iterator[Curve]:
    """Yields the curves of figure 2."""
    if find_spec("dp_accounting"):
        yield _dp_accounting(setting, epsilons)  # below the certified curve, which it hides else
    yield from certified(setting, epsilons)
    estimator = MonteCarloProfile(
        setting.noise_multiplier,
        setting.bins,
        num_samples=num_samples,
        ranks=geometric_ranks(setting.bins, 1.05),
    )
    yield sampled(comparison.MONTE_CARLO, estimator, epsilons)
    others = replace(estimator, sampled="other bins", ranks=None, inequality="bennett")
    yield sampled("balls-and-bins, other bins", others, epsilons)


def figure(
    shown: Sequence[tuple[str, Setting, Curves]],
    points: int,
    config: Picture,
    console: Console,
    *,
    alike: bool = False,
) -> Figure:
    """Returns a panel for each name, setting and its curves; all is saved after each panel.

    Args:
      shown: Of the panels, three in a row.
      points: Epsilons of each curve.
      config: Names the picture.
      console: Gets a table for each panel.
      alike: Whether all panels have the same curves, so that one legend serves them.
    """
    rows, columns = -(-len(shown) // 3), min(3, len(shown))
    found = blank(13, 4.6 * rows, "one epoch")
    for axes, (name, setting, curves) in zip(panels(found, rows, columns), shown, strict=True):
        title = f"{name}: σ = {setting.noise_multiplier:g}, T = {setting.bins:,}"
        epsilons = [setting.last_epsilon * (i + 1) / points for i in range(points)]
        drawn: list[Curve] = []
        for curve in curves(setting, epsilons):
            drawn.append(curve)
            console.progress(f"{title}: {curve.name}")
        floor = min(c.bounds[-1].lower for c in drawn if c.name == "balls-and-bins") / 100
        how: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.0, -0.14)}
        if alike:
            how = {"key": found, "loc": "outside lower center", "ncols": 4}
            found.legends.clear()
        comparison.draw(axes, drawn, title, "ε", "δ", floor, **how)
        console.line(f"{title}, one epoch ({TERMS})")
        some = range(0, points, max(1, points // 4))
        console.table(
            ["delta at epsilon", *(f"{epsilons[i]:.3g}" for i in some)],
            [row for curve in drawn for row in _rows(curve, some)],
        )
        save(found, config.out)
    return found


def _rows(curve: Curve, shown: Sequence[int]) -> Iterator[list[str]]:
    bounds = [curve.bounds[i] for i in shown]
    yield [f"{curve.name} <=", *(bound.format_upper(".2e") for bound in bounds)]
    # Of samples, equation 6 is the lower end.
    equal = curve.means and curve.name != comparison.MONTE_CARLO
    if not equal and any(bound.lower < 0.95 * bound.upper for bound in bounds):
        yield [f"{curve.name} >=", *(bound.format_lower(".2e") for bound in bounds)]
    if curve.means:
        yield [f"{curve.name}, mean", *(f"~{curve.means[i]:.2e}" for i in shown)]


def draw(config: Config, console: Console) -> Figure:
    """Returns the figure; prints a table for each panel."""
    curves = partial(samplers, config.num_samples)
    shown = [(setting.name, setting, curves) for setting in SETTINGS]
    return figure(shown, config.points, config, console, alike=True)
