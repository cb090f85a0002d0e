"""Delta over epsilon of every sampler, one epoch, by noise multiplier and batch size.

Chua et al., "Balls-and-Bins Sampling for DP-SGD" (AISTATS 2025), figure 2, at sizes of Criteo
Display Ads and Criteo Sponsored Search. Dotted is equation 6, below Monte Carlo by order statistics
(x; means +); the other bins' samples are ours, and so are the certified curves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

from matplotlib.figure import Figure

from accounting import Bound
from experiments.cli.console import Console
from experiments.figures import comparison
from experiments.figures.comparison import TERMS, Curve
from experiments.figures.drawing import Picture, blank, panels, save
from experiments.papers.monte_carlo import MonteCarloProfile, geometric_ranks

ESTIMATORS: Mapping[str, Mapping[str, Any]] = {
    comparison.MONTE_CARLO: {"ranks": 1.05},
    "balls-and-bins, other bins": {"sampled": "other bins", "inequality": "bennett"},
}


class Setting(NamedTuple):
    """Panel of one epoch of one run, over epsilons up to a last one."""

    name: str
    noise_multiplier: float
    bins: int
    last_epsilon: float
    samplers: Sequence[str] = ("deterministic", "shuffle", "poisson", "balls-and-bins")
    """Samplers with a certified curve."""
    estimators: Mapping[str, Mapping[str, Any]] = ESTIMATORS
    """Options of each `MonteCarloProfile`, by name; `ranks` are a list, or their growth."""


SETTINGS = (
    Setting("Display, batch 1,024", 0.4, 35_938, 6.0),
    Setting("Display, batch 8,192", 0.5, 4_492, 5.0),
    Setting("Display, batch 65,536", 0.8, 562, 1.5),
    Setting("Search, batch 1,024", 0.4, 12_500, 6.0),
    Setting("Search, batch 8,192", 0.5, 1_563, 5.0),
    Setting("Search, batch 65,536", 0.8, 196, 1.5),
)


@dataclass(frozen=True)
class Config(Picture):
    """Delta over epsilon of every sampler (Balls-and-Bins paper, figure 2)."""

    num_samples: int = 20_000
    """Samples of each Monte Carlo bound; each holds with probability 0.999."""

    points: int = 10
    """Epsilons of each curve."""

    SMALL: ClassVar[Mapping[str, Any]] = {"num_samples": 5_000, "points": 6}

    def sized(self, name: str, profile: MonteCarloProfile, _: Any) -> tuple[str, MonteCarloProfile]:
        """Returns a curve's name, and its estimator with `num_samples` samples."""
        return name, replace(profile, num_samples=self.num_samples)


def curves(setting: Setting, epsilons: Sequence[float], config: Any) -> Iterator[Curve]:
    """Yields the certified and Monte Carlo curves of a panel."""
    sigma, bins, xs = setting.noise_multiplier, setting.bins, tuple(epsilons)
    samplers = comparison.all_samplers(bins, 1, epochs=1)
    for name in setting.samplers:
        if name == "deterministic" and find_spec("dp_accounting"):
            yield _dp_accounting(setting, xs)  # below the certified curve, which hides it
        profile = samplers[name].privacy(sigma)
        yield Curve(name, xs, tuple(profile.delta(e) for e in xs))
    for name, options in setting.estimators.items():
        growth = options.get("ranks")
        ranks = geometric_ranks(bins, growth) if isinstance(growth, float) else growth
        profile = MonteCarloProfile(sigma, bins, **{**options, "ranks": ranks})
        name, profile = config.sized(name, profile, xs)
        means, bounds = zip(*profile.estimates(xs), strict=True)
        yield Curve(name, xs, bounds, tuple(mean.value for mean in means))


def _dp_accounting(setting: Setting, epsilons: Sequence[float]) -> Curve:
    from dp_accounting.pld import privacy_loss_distribution as pld

    deltas = []
    for pessimistic in (True, False):
        distribution = pld.from_gaussian_mechanism(
            setting.noise_multiplier,
            sampling_prob=1.0 / setting.bins,
            pessimistic_estimate=pessimistic,
            value_discretization_interval=1e-3,
            use_connect_dots=pessimistic,
        )
        deltas.append(distribution.self_compose(setting.bins).get_delta_for_epsilon(list(epsilons)))
    bounds = [Bound(float(min(e)), float(max(e))) for e in zip(*deltas, strict=True)]
    return Curve("poisson, dp_accounting", tuple(epsilons), tuple(bounds))


def figure(
    settings: Sequence[Setting], config: Any, console: Console, *, alike: bool = False
) -> Figure:
    """Returns a panel per setting, three in a row, saved after each."""
    rows, columns, points = -(-len(settings) // 3), min(3, len(settings)), config.points
    picture = blank(13, 4.6 * rows, "one epoch")
    for axes, setting in zip(panels(picture, rows, columns), settings, strict=True):
        title = f"{setting.name}: σ = {setting.noise_multiplier:g}, T = {setting.bins:,}"
        epsilons = [setting.last_epsilon * (i + 1) / points for i in range(points)]
        lines: list[Curve] = []
        for curve in curves(setting, epsilons, config):
            lines.append(curve)
            console.progress(f"{title}: {curve.name}")
        floor = min(c.bounds[-1].lower for c in lines if c.name == "balls-and-bins") / 100
        keys: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.0, -0.14)}
        if alike:
            keys = {"key": picture, "loc": "outside lower center", "ncols": 4}
            picture.legends.clear()
        comparison.draw(axes, lines, title, "ε", "δ", floor, **keys)
        console.line(f"{title}, one epoch ({TERMS})")
        indices = range(0, points, max(1, points // 4))
        console.table(
            ["delta at epsilon", *(f"{epsilons[i]:.3g}" for i in indices)],
            [row for curve in lines for row in _rows(curve, indices)],
        )
        save(picture, config.out)
    return picture


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
    return figure(SETTINGS, config, console, alike=True)
